// What a test sets and reads of the fake NCCL library (fake_nccl.cpp): one such object in it, got
// by dlsym of "fake_nccl".
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace edit_ext::testing {

struct FakeNccl {
  struct Counts {
    std::atomic<int> live{0}, inits{0}, finalizes{0}, destroys{0}, aborts{0};
    std::atomic<int> group_aborts{0};  // groups that aborted more than one communicator
    std::atomic<int> in_group{0}, outside{0};
    // Use of a dead communicator, or by two threads at a time, a call on a busy one, destroy before
    // finalize is through, a bad config, messages of no bytes or to oneself, a group end without a
    // start.
    std::atomic<int> misuses{0};
  };

  std::atomic<int> version{22707};
  std::atomic<int> init_polls{0};  // how often a complete init still says "in progress"; -1: ever
  std::atomic<int> failing_rank{-1};  // gets ncclRemoteError ...
  std::atomic<int> failing_after{0};  // ... when it has completed this many calls
  std::atomic<int> refused_peer{-1};  // sends to it are refused at once
  std::atomic<bool> hold{false};      // operations never finish
  std::atomic<bool> open{false};      // calls succeed at once, operations go on as on a stream
  std::atomic<bool> stick{false};     // calls do not return before the communicator is aborted
  std::atomic<int> abort_ms{0};       // how long an abort takes
  std::atomic<int> max_ctas{0};       // of the last config seen

  Counts counts;
  std::mutex mutex;              // of log
  std::vector<std::string> log;  // "rank: what", in the order in which calls were posted
};

using GetFakeNccl = FakeNccl* (*)();

}  // namespace edit_ext::testing
