// Ranks as threads over the fake NCCL library: how the tests of NcclComm load it, make groups, and
// run threads that may not hang.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../comm/nccl.h"
#include "fake_nccl.h"
#include "testing.h"

namespace edit_ext::testing {

inline FakeNccl& fake() {
  static FakeNccl* const found = [] {
    void* library = dlopen(FAKE_NCCL, RTLD_NOW);
    void* symbol = library ? dlsym(library, "fake_nccl") : nullptr;
    if (!symbol) std::printf("no fake NCCL: %s\n", dlerror()), std::_Exit(1);
    return reinterpret_cast<GetFakeNccl>(symbol)();
  }();
  return *found;
}

inline std::shared_ptr<const NcclLibrary> library() {
  fake();
  static const auto loaded = NcclLibrary::load(FAKE_NCCL);
  return loaded;
}

// Everything as a well-behaved library has it, and counts from zero.
inline void reset() {
  FakeNccl& f = fake();
  f.version = 22707;
  f.init_polls = f.failing_after = f.abort_ms = f.max_ctas = 0;
  f.failing_rank = f.refused_peer = -1;
  f.hold = f.open = f.stick = false;
  FakeNccl::Counts& c = f.counts;
  for (auto* n : {&c.live, &c.inits, &c.finalizes, &c.destroys, &c.aborts, &c.group_aborts,
                  &c.in_group, &c.outside, &c.misuses}) {
    *n = 0;
  }
  std::lock_guard<std::mutex> lock(f.mutex);
  f.log.clear();
}

inline double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What work() throws; empty if nothing.
inline std::string thrown(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

inline bool says(const std::string& text, const std::vector<std::string>& parts) {
  bool all = true;
  for (const std::string& part : parts) all = all && text.find(part) != std::string::npos;
  if (!all) std::printf("unexpected text: '%s'\n", text.c_str());
  return all;
}

// work(rank) on a thread each. A hang ends the test: nothing could be joined any more.
inline void run_ranks(int size, const std::function<void(int)>& work, double seconds = 60.0) {
  std::mutex mutex;
  std::condition_variable changed;
  int running = size;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      const std::string error = thrown([&] { work(r); });
      if (!error.empty()) std::printf("rank %d: %s\n", r, error.c_str());
      CHECK(error.empty());
      std::lock_guard<std::mutex> lock(mutex);
      --running;
      changed.notify_all();
    });
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    const std::chrono::duration<double> limit(seconds);
    if (!changed.wait_for(lock, limit, [&] { return running == 0; })) {
      std::printf("%d of %d ranks hang after %g s\n", running, size, seconds);
      std::fflush(stdout);
      std::_Exit(1);
    }
  }
  for (std::thread& t : threads) t.join();
}

inline NcclOptions options(double timeout = 20.0) {
  NcclOptions o;
  o.group = "replica group";
  o.init_timeout = o.call_timeout = timeout;
  return o;
}

using Ranks = std::vector<std::unique_ptr<NcclComm>>;

inline Ranks connect(int size, const NcclOptions& o = options()) {
  Ranks ranks(size);
  const nccl::UniqueId id = library()->unique_id();
  run_ranks(size, [&](int r) {
    ranks[r] = std::make_unique<NcclComm>(library(), id, r, size, o, nullptr);
  });
  return ranks;
}

inline void gather_one(NcclComm& comm) {
  std::vector<int64_t> all(comm.size(), -1);
  all[comm.rank()] = comm.rank();
  comm.gather_scalars(all.data(), sizeof(int64_t));
  for (int r = 0; r < comm.size(); ++r) CHECK(all[r] == r);
}

// True if all ended in order and the library holds nothing of ours.
inline bool close_all(Ranks& ranks) {
  std::atomic<int> orderly{0};
  run_ranks(static_cast<int>(ranks.size()), [&](int r) { orderly += ranks[r]->close(20.0); });
  return orderly == static_cast<int>(ranks.size()) && fake().counts.live == 0 &&
         fake().counts.misuses == 0;
}

}  // namespace edit_ext::testing
