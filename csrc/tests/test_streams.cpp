// The emulated streams do what CUDA promises and nothing more, in each mode; a missing wait is
// seen.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <thread>

#include "emu_streams.h"
#include "testing.h"

namespace {

using emu::Mode;

constexpr Mode kModes[] = {Mode::early, Mode::late, Mode::random};

struct Side {
  cudaStream_t stream = nullptr;
  Side() { CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess); }
  ~Side() { cudaStreamDestroy(stream); }
  void sync() const { CHECK(cudaStreamSynchronize(stream) == cudaSuccess); }
  void run(std::function<void()> work) const { emu::enqueue(stream, std::move(work)); }
};

struct Mark {
  cudaEvent_t event = nullptr;
  Mark() { CHECK(cudaEventCreate(&event) == cudaSuccess); }
  ~Mark() { cudaEventDestroy(event); }
  void record(cudaStream_t stream) const { CHECK(cudaEventRecord(event, stream) == cudaSuccess); }
  void before(cudaStream_t stream) const {
    CHECK(cudaStreamWaitEvent(stream, event, 0) == cudaSuccess);
  }
};

void one_stream_keeps_its_order() {
  std::vector<int> seen;
  const Side a;
  for (int i = 0; i < 100; ++i) a.run([&seen, i] { seen.push_back(i); });
  a.sync();
  bool right = seen.size() == 100;
  for (int i = 0; i < 100 && right; ++i) right = seen[i] == i;
  CHECK(right);
}

// What a second stream reads of 50 values that the first one writes, with a wait or without.
bool read_right(bool wait) {
  const Side writer, reader;
  std::vector<int> value(50), found(50);
  std::vector<Mark> marks(50);
  for (int i = 0; i < 50; ++i) {
    writer.run([&, i] { value[i] = i + 1; });
    marks[i].record(writer.stream);
    if (wait) marks[i].before(reader.stream);
    reader.run([&, i] { found[i] = value[i]; });
  }
  reader.sync();
  writer.sync();
  return found == value;
}

void waits_order_streams() {
  for (const Mode mode : kModes) {
    emu::set_mode(mode);
    CHECK(read_right(true));
    CHECK(read_right(false) == (mode == Mode::early));
  }
}

// A reader that is too early is seen late, a writer that is too late early: a buffer used again.
bool reuse_is_right(bool wait) {
  const Side reader, writer;
  int buffer = 1, found = 0;
  const Mark read;
  reader.run([&] { found = buffer; });
  read.record(reader.stream);
  if (wait) read.before(writer.stream);
  writer.run([&] { buffer = 2; });
  writer.sync();
  reader.sync();
  return found == 1 && buffer == 2;
}

void late_runs_what_it_must() {
  emu::set_mode(Mode::late);
  CHECK(reuse_is_right(true));
  CHECK(!reuse_is_right(false));
  const Side a, b;
  const Mark mark;
  int x = 0, y = 0;
  a.run([&] { x = 1; });
  mark.record(a.stream);
  a.run([&] { x = 2; });
  b.run([&] { y = 1; });
  CHECK(x == 0 && y == 0);
  mark.before(nullptr);  // the null stream goes on at once: up to the event, and only that stream
  CHECK(x == 1 && y == 0);
  CHECK(cudaEventQuery(mark.event) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(x == 2 && y == 1);
}

void an_event_recorded_again() {
  emu::set_mode(Mode::late);
  const Side a, b;
  const Mark mark, fresh;
  int x = 0, found = 0;
  CHECK(cudaEventQuery(fresh.event) == cudaSuccess);
  fresh.before(b.stream);  // never recorded: nothing to wait for
  a.run([&] { x = 1; });
  mark.record(a.stream);
  mark.before(b.stream);
  b.run([&] { found = x; });
  a.run([&] { x = 2; });
  mark.record(a.stream);
  b.sync();
  CHECK(x == 1 && found == 1);
  CHECK(cudaEventSynchronize(mark.event) == cudaSuccess);
  CHECK(x == 2);
}

void chains_of_waits() {
  for (const Mode mode : kModes) {
    emu::set_mode(mode);
    std::vector<std::unique_ptr<Side>> sides;
    std::vector<Mark> marks(20);
    std::vector<int> seen;
    for (int i = 0; i < 20; ++i) {
      sides.push_back(std::make_unique<Side>());
      if (i > 0) marks[i - 1].before(sides[i]->stream);
      sides[i]->run([&seen, i] { seen.push_back(i); });
      marks[i].record(sides[i]->stream);
    }
    CHECK(cudaEventSynchronize(marks[19].event) == cudaSuccess);
    CHECK(seen.size() == 20 && std::is_sorted(seen.begin(), seen.end()));
  }
}

void queries_end() {
  for (const Mode mode : kModes) {
    emu::set_mode(mode);
    const Side a, b;
    const Mark mark, other;
    int x = 0;
    b.run([&] { ++x; });
    other.record(b.stream);
    other.before(a.stream);
    for (int i = 0; i < 5; ++i) a.run([&] { ++x; });
    mark.record(a.stream);
    a.run([&] { ++x; });
    if (mode == Mode::late) CHECK(cudaEventQuery(mark.event) == cudaErrorNotReady && x < 6);
    for (int i = 0; i < 20 && cudaEventQuery(mark.event) != cudaSuccess; ++i) {
    }
    CHECK(x >= 6 && cudaEventQuery(mark.event) == cudaSuccess);
    for (int i = 0; i < 20 && cudaStreamQuery(a.stream) != cudaSuccess; ++i) {
    }
    CHECK(x == 7 && cudaStreamQuery(a.stream) == cudaSuccess);
  }
}

bool aborts(const std::function<void()>& work) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, [](int) { _exit(42); });
    work();
    _exit(0);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 42;
}

void ends_with_work_left() {
  for (const Mode mode : kModes) {
    emu::set_mode(mode);
    int x = 0;
    cudaStream_t gone = nullptr;
    const Side b;
    {
      const Side a;
      const Mark mark;
      a.run([&] { x = 1; });
      mark.record(a.stream);
      mark.before(b.stream);
      b.run([&] { x *= 10; });
      gone = a.stream;
    }
    CHECK(aborts([&] { emu::enqueue(gone, [] {}); }));
    b.sync();
    CHECK(x == 10);
    {
      const Side a;
      a.run([&] { x = 11; });
    }
    const Side next;
    CHECK(x == 11);  // it has run by now
  }
}

void times() {
  emu::set_mode(Mode::late);
  const Side a;
  const Mark start, end;
  float ms = -1.0f;
  CHECK(cudaEventElapsedTime(&ms, start.event, end.event) == cudaErrorInvalidResourceHandle);
  start.record(a.stream);
  a.run([] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  end.record(a.stream);
  CHECK(cudaEventElapsedTime(&ms, start.event, end.event) == cudaErrorNotReady);
  a.sync();
  CHECK(cudaEventElapsedTime(&ms, start.event, end.event) == cudaSuccess && ms >= 2.0f);
}

void copies() {
  emu::set_mode(Mode::late);
  const Side a;
  auto* const pinned = static_cast<int*>(emu::memory().lend(8, true));
  auto* const device = static_cast<int*>(emu::memory().lend(8, false));
  const auto copy = [&](int* to, int* from, int kind) {
    CHECK(cudaMemcpyAsync(to, from, 4, kind, a.stream) == cudaSuccess);
  };
  int pageable = 5;
  copy(device, &pageable, cudaMemcpyHostToDevice);
  pageable = 6;
  copy(&pageable, device, cudaMemcpyDeviceToHost);
  CHECK(pageable == 5);
  pinned[1] = 7;
  copy(device, pinned + 1, cudaMemcpyHostToDevice);
  pinned[1] = 8;  // too early: the copy has not been made
  copy(pinned, device, cudaMemcpyDeviceToHost);
  CHECK(pinned[0] == -1);
  a.sync();
  CHECK(pinned[0] == 8);
  emu::memory().reclaim(pinned);
  emu::memory().reclaim(device);
}

// The system cannot read what has been given back, and neither can anybody else.
void closed_memory() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  void* const at = emu::memory().lend(100, false);
  CHECK(write(ends[1], at, 1) == 1);
  emu::memory().reclaim(at);
  CHECK(write(ends[1], at, 1) == -1 && errno == EFAULT);
  for (const int end : ends) close(end);
}

// Two host threads, a stream each, and a token that goes to and fro between the streams.
void host_threads() {
  for (const Mode mode : kModes) {
    emu::set_mode(mode);
    constexpr int kTurns = 200;
    std::vector<int> seen;
    std::vector<Mark> marks(2 * kTurns);
    std::atomic<int> recorded{0};
    std::vector<std::thread> threads;
    for (int own = 0; own < 2; ++own) {
      threads.emplace_back([&, own] {
        const Side side;
        for (int i = own; i < 2 * kTurns; i += 2) {
          while (recorded < i) std::this_thread::yield();
          if (i > 0) marks[i - 1].before(side.stream);
          side.run([&seen, i] { seen.push_back(i); });
          marks[i].record(side.stream);
          ++recorded;
        }
        side.sync();
      });
    }
    for (std::thread& t : threads) t.join();
    CHECK(seen.size() == 2 * kTurns && std::is_sorted(seen.begin(), seen.end()));
  }
}

}  // namespace

int main() {
  for (const Mode mode : kModes) {
    emu::set_mode(mode);
    one_stream_keeps_its_order();
  }
  waits_order_streams();
  late_runs_what_it_must();
  an_event_recorded_again();
  chains_of_waits();
  queries_end();
  ends_with_work_left();
  times();
  copies();
  closed_memory();
  host_threads();
  return edit_ext::testing::close("test_streams");
}
