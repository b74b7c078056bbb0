// Streams and events of the emulated GPU: queues that run as late, as early or as much at random as
// CUDA allows, so that a missing wait gives wrong numbers.
//
// - late: nothing of a stream runs until somebody must have it: who synchronizes, or a stream that
//   waits for an event and must go on itself. Then it runs up to there and no further.
// - early: everything has run when the call that enqueues it returns.
// - random: after some calls one stream, drawn with a fixed seed, gets a few items further.
//
// The null stream runs at once and is ordered with no other, as if all streams were non-blocking.
// In the tests' build for torch it is the current stream unless a test chooses another, because
// torch's own operations run at once there. What orders the current stream with itself or before a
// side stream cannot be missed while it runs at once: see test_streams.py.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "emu_memory.h"

using cudaError_t = int;
using cudaStream_t = void*;
using cudaEvent_t = void*;
constexpr cudaError_t cudaSuccess = 0;
constexpr cudaError_t cudaErrorInvalidValue = 1;
constexpr cudaError_t cudaErrorInvalidResourceHandle = 400;
constexpr cudaError_t cudaErrorNotReady = 600;
constexpr unsigned cudaStreamNonBlocking = 1;
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

namespace emu {

enum class Mode { early, late, random };

inline Mode mode_asked_for() {
  const char* const text = std::getenv("EDIT_EXT_EMULATED_STREAMS");
  const std::string name = text ? text : "late";
  if (name == "early") return Mode::early;
  if (name == "late") return Mode::late;
  if (name == "random") return Mode::random;
  throw std::runtime_error("EDIT_EXT_EMULATED_STREAMS is '" + name +
                           "'; expected early, late or random");
}

struct Stream;

// One recording of an event. Recording again makes a new one: earlier waits keep theirs.
struct Point {
  Stream* stream;  // null once passed
  std::chrono::steady_clock::time_point when;
};
struct Event {
  std::shared_ptr<Point> last;
};

struct Item {
  std::function<void()> run;
  std::shared_ptr<Point> wait;  // which must have been passed before; else null
};

// All streams of a process, as one GPU. Locked while anything of them runs, on whichever thread.
struct Gpu {
  std::mutex mutex;
  Mode mode = mode_asked_for();
  std::mt19937 randomness{7};
  // Streams stay here for ever, so that one used after its end is found out.
  std::vector<std::unique_ptr<Stream>> streams;
};
struct Stream {
  Gpu& gpu;  // not gpu(): a library that includes this file has one of its own
  std::deque<Item> queue;
  bool destroyed = false;
};
// Never destroyed: at exit threads may still be inside.
inline Gpu& gpu() {
  static auto* found = new Gpu;
  return *found;
}
// What a caller of the library has as its current stream, as torch has one on each thread.
inline thread_local cudaStream_t current_stream = nullptr;

// Changes the mode; nothing may be queued in between.
inline void set_mode(Mode mode) {
  std::lock_guard<std::mutex> lock(gpu().mutex);
  gpu().mode = mode;
}

inline Stream& stream_of(cudaStream_t handle) {
  auto& found = *static_cast<Stream*>(handle);
  if (found.destroyed) {  // no exception: a worker would keep it to itself
    std::fputs("the emulated GPU: a stream is used after it was destroyed\n", stderr);
    std::abort();
  }
  return found;
}

// Runs one item: the stream's next, or what that waits for. What is waited for was enqueued before
// the wait, so this ends, and there is always an item.
inline void step(Stream* s) {
  while (s->queue.front().wait && s->queue.front().wait->stream) s = s->queue.front().wait->stream;
  const Item item = std::move(s->queue.front());
  s->queue.pop_front();
  if (item.run) item.run();
}
inline void run_all(Stream& s) {
  while (!s.queue.empty()) step(&s);
}
inline void run_to(const Point& point) {
  while (point.stream) step(point.stream);
}
// Now and then one stream runs ahead, on average a little less than comes in, so that queues grow.
inline void run_randomly(Gpu& g) {
  if (g.randomness() % 4 != 0) return;
  std::vector<Stream*> ready;
  for (const auto& s : g.streams) {
    if (!s->queue.empty()) ready.push_back(s.get());
  }
  Stream* const ahead = ready.empty() ? nullptr : ready[g.randomness() % ready.size()];
  for (unsigned n = g.randomness() % 8; ahead && n > 0 && !ahead->queue.empty(); --n) step(ahead);
}
// A stream destroyed with work in its queue still does it: some time after, when what it uses may
// have been given back.
inline void run_orphans(Gpu& g) {
  for (const auto& s : g.streams) {
    if (s->destroyed) run_all(*s);
  }
}

inline void enqueue(cudaStream_t handle, std::function<void()> run,
                    std::shared_ptr<Point> wait = nullptr) {
  if (!handle) {
    if (wait) {
      std::lock_guard<std::mutex> lock(gpu().mutex);
      run_to(*wait);
    }
    if (run) run();
    return;
  }
  Stream& s = stream_of(handle);
  std::lock_guard<std::mutex> lock(s.gpu.mutex);
  s.queue.push_back({std::move(run), std::move(wait)});
  if (s.gpu.mode == Mode::early) run_all(s);
  if (s.gpu.mode == Mode::random) run_randomly(s.gpu);
}

inline std::shared_ptr<Point> last_of(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(gpu().mutex);
  return static_cast<Event*>(event)->last;
}

}  // namespace emu

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
  emu::Gpu& g = emu::gpu();
  std::lock_guard<std::mutex> lock(g.mutex);
  emu::run_orphans(g);
  g.streams.push_back(std::unique_ptr<emu::Stream>(new emu::Stream{g, {}}));
  *stream = g.streams.back().get();
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  emu::Stream& s = emu::stream_of(stream);
  std::lock_guard<std::mutex> lock(s.gpu.mutex);
  emu::run_orphans(s.gpu);
  s.destroyed = true;
  return cudaSuccess;
}
// A loop around a query ends: each does a little of the work.
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!stream) return cudaSuccess;
  emu::Stream& s = emu::stream_of(stream);
  std::lock_guard<std::mutex> lock(s.gpu.mutex);
  if (s.queue.empty()) return cudaSuccess;
  emu::step(&s);
  return cudaErrorNotReady;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!stream) return cudaSuccess;
  emu::Stream& s = emu::stream_of(stream);
  std::lock_guard<std::mutex> lock(s.gpu.mutex);
  emu::run_all(s);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  emu::Gpu& g = emu::gpu();
  std::lock_guard<std::mutex> lock(g.mutex);
  for (const auto& s : g.streams) emu::run_all(*s);
  return cudaSuccess;
}

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new emu::Event;
  return cudaSuccess;
}
// Queues keep their points: an event may go before it is passed.
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete static_cast<emu::Event*>(event);
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto point = std::make_shared<emu::Point>();
  point->stream = static_cast<emu::Stream*>(stream);
  {
    std::lock_guard<std::mutex> lock(emu::gpu().mutex);
    static_cast<emu::Event*>(event)->last = point;
  }
  emu::enqueue(stream, [point] {
    point->stream = nullptr;
    point->when = std::chrono::steady_clock::now();
  });
  return cudaSuccess;
}
// An event that was never recorded is nothing to wait for.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const auto point = emu::last_of(event)) emu::enqueue(stream, nullptr, point);
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto point = emu::last_of(event);
  std::lock_guard<std::mutex> lock(emu::gpu().mutex);
  if (!point || !point->stream) return cudaSuccess;
  emu::step(point->stream);
  return cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const auto point = emu::last_of(event);
  std::lock_guard<std::mutex> lock(emu::gpu().mutex);
  if (point) emu::run_to(*point);
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const auto start = emu::last_of(from), end = emu::last_of(to);
  std::lock_guard<std::mutex> lock(emu::gpu().mutex);
  if (!start || !end) return cudaErrorInvalidResourceHandle;
  if (start->stream || end->stream) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->when - start->when).count();
  return cudaSuccess;
}

// Of pinned memory both directions run in stream order. From pageable memory the call returns when
// the source has been read, into it when the copy has been made.
namespace emu {
inline int64_t copies_up = 0;  // from the host to the device
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, int kind,
                                   cudaStream_t stream) {
  if (kind == cudaMemcpyHostToDevice) ++emu::copies_up;
  if (kind == cudaMemcpyHostToDevice && !emu::memory().pinned(from)) {
    const auto* bytes = static_cast<const char*>(from);
    emu::enqueue(stream, [to, n, copy = std::vector<char>(bytes, bytes + n)] {
      std::memcpy(to, copy.data(), n);
    });
    return cudaSuccess;
  }
  emu::enqueue(stream, [to, from, n] { std::memcpy(to, from, n); });
  if (kind == cudaMemcpyDeviceToHost && !emu::memory().pinned(to)) cudaStreamSynchronize(stream);
  return cudaSuccess;
}
