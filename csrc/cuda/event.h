// A point in a stream: recorded here, waited for there, and the time between two of them.
#pragma once

#include "launch.h"

namespace edit_ext::cuda {

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }  // the driver keeps what is still in use
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  // What the stream gets from now on runs after this point; the host goes on.
  void before(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  bool passed() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }
  void synchronize() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  // Seconds from an earlier point to this one; both have passed.
  double since(const Event& earlier) const {
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_;
};

}  // namespace edit_ext::cuda
