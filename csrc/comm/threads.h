// Replicas as threads of one process: a Comm over shared memory, for C++ tests and sanitizers.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/comm.h"

namespace edit_ext {

// What the members of one group share. Every call is a meeting of all members: all publish, all
// copy, all leave.
class ThreadGroup {
 public:
  explicit ThreadGroup(int size, double timeout_seconds = 30.0);

  // Blocks until all members have called; throws when one is missing for longer than the timeout
  // or the group was aborted.
  void meet();
  void abort(const std::string& reason);
  void poll();

  const int size;
  std::vector<const Block*> published;  // [size]; each member writes its own slot before meet()

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const double timeout_;
  int waiting_ = 0;
  int64_t round_ = 0;
  bool aborted_ = false;
  std::string reason_;
};

class ThreadComm final : public Comm {
 public:
  ThreadComm(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size; }
  void exchange(const Block* to, const Block* from) override;
  void all_gather(void* buffer, int64_t each, int64_t total) override;
  void gather_scalars(void* buffer, int64_t each) override;
  void abort(const std::string& reason) override { group_->abort(reason); }
  void poll() const override { group_->poll(); }
  int64_t bytes_sent() const override { return sent_; }

 private:
  std::shared_ptr<ThreadGroup> group_;
  const int rank_;
  int64_t sent_ = 0;
};

}  // namespace edit_ext
