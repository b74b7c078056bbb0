#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace edit_ext {

ThreadGroup::ThreadGroup(int members, double timeout_seconds)
    : size(members), published(members), timeout_(timeout_seconds) {}

void ThreadGroup::meet() {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t round = round_;
  if (++waiting_ == size) {
    waiting_ = 0;
    ++round_;
    changed_.notify_all();
  }
  const bool all = changed_.wait_for(lock, std::chrono::duration<double>(timeout_),
                                     [&] { return aborted_ || round_ != round; });
  if (aborted_) throw std::runtime_error("thread group aborted: " + reason_);
  if (!all) throw std::runtime_error("thread group: a member did not come in time");
}

void ThreadGroup::abort(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!aborted_) reason_ = reason;
  aborted_ = true;
  changed_.notify_all();
}

void ThreadGroup::poll() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) throw std::runtime_error("thread group aborted: " + reason_);
}

void ThreadComm::exchange(const Block* to, const Block* from) {
  group_->published[rank_] = to;
  group_->meet();
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    const Block& block = group_->published[r][rank_];
    if (block.bytes != from[r].bytes) {
      throw std::runtime_error("thread group: rank " + std::to_string(r) + " sends " +
                               std::to_string(block.bytes) + " bytes where rank " +
                               std::to_string(rank_) + " expects " + std::to_string(from[r].bytes));
    }
    if (block.bytes > 0) std::memcpy(from[r].data, block.data, static_cast<size_t>(block.bytes));
    sent_ += to[r].bytes;
  }
  group_->meet();  // nobody reuses a buffer that is still being read
}

void ThreadComm::all_gather(void* buffer, int64_t each, int64_t total) {
  const auto block = [&](int r) {
    const int64_t left = std::max<int64_t>(0, total - r * each);
    return Block{static_cast<char*>(buffer) + r * each, std::min(each, left)};
  };
  std::vector<Block> to(size(), block(rank_)), from(size());
  for (int r = 0; r < size(); ++r) from[r] = block(r);
  exchange(to.data(), from.data());
}

void ThreadComm::gather_scalars(void* buffer, int64_t each) {
  all_gather(buffer, each, each * size());
}

}  // namespace edit_ext
