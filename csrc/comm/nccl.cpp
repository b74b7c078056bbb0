#include "nccl.h"

#include <unistd.h>

#include <stdexcept>

#include "nccl_wait.h"

namespace edit_ext {

std::string NcclComm::where() const {
  return "NCCL, " + options_.group + ", rank " + std::to_string(rank_) + " of " +
         std::to_string(size_);
}

NcclComm::State NcclComm::state() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

// The communicator, or the sentence that says why there is none.
nccl::Communicator NcclComm::usable(const char* what) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string start = where() + ", " + what + ": ";
  switch (state_) {
    case State::failed:
      throw std::runtime_error(start + "failed before: " + reason_);
    case State::aborted:
      throw std::runtime_error(start + "aborted: " + reason_);
    case State::closed:
      throw std::runtime_error(start + "closed already");
    default:
      return handle_ ? *handle_ : nullptr;
  }
}

nccl::Result NcclComm::locked(const char* what, const Call& call) const {
  std::lock_guard<std::mutex> one(calling_);
  return call(usable(what));
}

// Marks the communicator as failed, unless it has ended already; returns the sentence to throw.
std::string NcclComm::fail(const std::string& reason) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::made || state_ == State::ready) {
    state_ = State::failed;
    reason_ = reason;
  }
  if (state_ == State::aborted) return where() + ": aborted: " + reason_;
  return where() + ": " + reason;
}

void NcclComm::finish(const char* what, nccl::Result result, double timeout) {
  const nccl::Clock::time_point start = nccl::Clock::now();
  while (result == nccl::kInProgress) {
    const double waited = nccl::since(start);
    if (waited > timeout) {
      throw std::runtime_error(fail(std::string(what) + " timed out after " +
                                    nccl::seconds_text(timeout) + "; a peer is missing or stuck"));
    }
    if (options_.poll_signals && waited > nccl::kSoonSeconds) {
      try {
        options_.poll_signals();
      } catch (...) {
        fail(std::string(what) + " was interrupted");
        throw;
      }
    }
    nccl::pause(waited);
    result = locked(what, [&](nccl::Communicator comm) {
      nccl::Result now = nccl::kSuccess;
      const nccl::Result asked = library_->comm_get_async_error(comm, &now);
      return asked == nccl::kSuccess ? now : asked;
    });
  }
  if (result != nccl::kSuccess) {
    throw std::runtime_error(fail(std::string(what) + " failed: " + library_->error_text(result)));
  }
}

void NcclComm::run(const char* what, const Call& call) {
  if (process_ != getpid()) {
    throw std::runtime_error(where() + ", " + what + ": made in process " +
                             std::to_string(process_) + ", a forked child cannot use it");
  }
  try {
    finish(what, locked(what, call), options_.call_timeout);
  } catch (...) {
    while (aborting_) nccl::pause(1.0);  // abort_all bounds it
    throw;
  }
}

// Grouped sends and receives, also on libraries that have ncclAlltoAll (2.28): pieces differ in
// size, the own one stays at home, and blocks need not be adjacent.
void NcclComm::exchange(const Block* to, const Block* from) {
  if (size_ == 1) return void(usable("exchange"));
  int64_t bytes = 0;
  for (int peer = 0; peer < size_; ++peer) bytes += peer == rank_ ? 0 : to[peer].bytes;
  int culprit = -1;
  nccl::Result first = nccl::kSuccess;
  const auto note = [&](nccl::Result result, int peer) {
    if (result == nccl::kSuccess || result == nccl::kInProgress || culprit >= 0) return;
    culprit = peer;
    first = result;
  };
  run("exchange", [&](nccl::Communicator comm) {
    const nccl::Result start = library_->group_start();
    if (start != nccl::kSuccess) return start;
    for (int i = 1; i < size_ && culprit < 0; ++i) {
      const int next = (rank_ + i) % size_, last = (rank_ - i + size_) % size_;
      if (to[next].bytes > 0) {
        note(library_->send(to[next].data, static_cast<size_t>(to[next].bytes), nccl::kInt8, next,
                            comm, stream_),
             next);
      }
      if (from[last].bytes > 0) {
        note(library_->recv(from[last].data, static_cast<size_t>(from[last].bytes), nccl::kInt8,
                            last, comm, stream_),
             last);
      }
    }
    const nccl::Result end = library_->group_end();  // also after an error, to leave the group
    if (culprit < 0) return end;
    throw std::runtime_error(fail("exchange with rank " + std::to_string(culprit) +
                                  " failed: " + library_->error_text(first)));
  });
  sent_ += bytes;
}

void NcclComm::gather(const char* what, void* buffer, int64_t each) {
  if (size_ == 1 || each <= 0) return void(usable(what));
  run(what, [&](nccl::Communicator comm) {
    const char* own = static_cast<char*>(buffer) + rank_ * each;
    return library_->all_gather(own, buffer, static_cast<size_t>(each), nccl::kInt8, comm, stream_);
  });
  sent_ += (size_ - 1) * each;
}

void NcclComm::all_gather(void* buffer, int64_t each, int64_t total) {
  gather("all_gather", buffer, total > 0 ? each : 0);
}

void NcclComm::gather_scalars(void* buffer, int64_t each) {
  gather("gather_scalars", buffer, each);
}

void NcclComm::poll() const {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::failed) throw std::runtime_error(where() + ": " + reason_);
    if (state_ == State::aborted) throw std::runtime_error(where() + ": aborted: " + reason_);
  }
  if (size_ == 1 || process_ != getpid()) return;
  // A call in progress finds the error by itself.
  std::unique_lock<std::mutex> one(calling_, std::try_to_lock);
  if (!one.owns_lock()) return;
  nccl::Communicator comm = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::ready) comm = *handle_;
  }
  if (!comm) return;
  nccl::Result now = nccl::kSuccess;
  const nccl::Result asked = library_->comm_get_async_error(comm, &now);
  const nccl::Result result = asked == nccl::kSuccess ? now : asked;
  if (result != nccl::kSuccess && result != nccl::kInProgress) {
    throw std::runtime_error(fail("asynchronous error: " + library_->error_text(result)));
  }
}

}  // namespace edit_ext
