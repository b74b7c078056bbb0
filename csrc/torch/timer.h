// Timer: how long something took where it ran, on the caller's clock or between two points of the
// caller's stream. Nothing is waited for until seconds() is asked.
#pragma once

#include <chrono>
#include <memory>

#include "place.h"
#if defined(EDIT_EXT_CUDA)
#include "../cuda/event.h"
#endif

namespace edit_ext {

class Timer {
 public:
#if defined(EDIT_EXT_CUDA)
  explicit Timer(at::Device device)
      : Timer(device, on_cuda(device) ? current_stream(device) : nullptr) {}
  // Between two points of another stream than the current one.
  Timer(at::Device device, cudaStream_t stream) : device_(device), stream_(stream) {
    if (on_cuda(device)) events_ = std::make_unique<Events>();
    if (events_) events_->start.record(stream_);
    start_ = stop_ = Clock::now();
  }
#else
  explicit Timer(at::Device device) : device_(device) { start_ = stop_ = Clock::now(); }
#endif

  void stop() {
    stop_ = Clock::now();
#if defined(EDIT_EXT_CUDA)
    if (events_) events_->stop.record(stream_);
#endif
  }

  // What the current stream gets from now on runs after stop().
  void before_current() const {
#if defined(EDIT_EXT_CUDA)
    if (events_) events_->stop.before(current_stream(device_));
#endif
  }

#if defined(EDIT_EXT_CUDA)
  // The same of another stream.
  void before(cudaStream_t stream) const {
    if (events_) events_->stop.before(stream);
  }
#endif

  bool passed() const {
#if defined(EDIT_EXT_CUDA)
    if (events_) return events_->stop.passed();
#endif
    return true;
  }

  double seconds_so_far() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }

  // Waits for stop() to have been reached.
  double seconds() const {
#if defined(EDIT_EXT_CUDA)
    if (events_) {
      events_->stop.synchronize();
      return events_->stop.since(events_->start);
    }
#endif
    return std::chrono::duration<double>(stop_ - start_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
#if defined(EDIT_EXT_CUDA)
  struct Events {
    cuda::Event start, stop;
  };
  std::unique_ptr<Events> events_;
#endif
  const at::Device device_;
#if defined(EDIT_EXT_CUDA)
  const cudaStream_t stream_;
#endif
  Clock::time_point start_, stop_;
};

}  // namespace edit_ext
