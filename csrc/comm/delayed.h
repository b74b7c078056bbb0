// A slow link for tests and benchmarks: sleeps before each payload exchange of the Comm it wraps.
#pragma once

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "../core/comm.h"

namespace edit_ext {

class DelayedComm final : public Comm {
 public:
  DelayedComm(std::shared_ptr<Comm> inner, double seconds)
      : inner_(std::move(inner)), seconds_(seconds) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void exchange(const Block* to, const Block* from) override {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds_));
    inner_->exchange(to, from);
  }
  void all_gather(void* buffer, int64_t each, int64_t total) override {
    inner_->all_gather(buffer, each, total);
  }
  void gather_scalars(void* buffer, int64_t each) override { inner_->gather_scalars(buffer, each); }
  void abort(const std::string& reason) override { inner_->abort(reason); }
  bool close(double seconds) override { return inner_->close(seconds); }
  void poll() const override { inner_->poll(); }
  int64_t bytes_sent() const override { return inner_->bytes_sent(); }

 private:
  std::shared_ptr<Comm> inner_;
  const double seconds_;
};

}  // namespace edit_ext
