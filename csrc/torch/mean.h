// Mean: one flat vector on its way to its mean over the replicas, on the lane. The warm-up sends
// its gradients so: over the communicator that carries the syncs, whichever it is, added in replica
// order, so that all replicas get the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "lane.h"

namespace edit_ext {

class Mean {
 public:
  // Elements of a buffer for n: whole pieces for all replicas, which a transport may fill.
  static int64_t padded(int64_t n, int replicas) { return replicas * piece_size(n, replicas); }

  // Elements of what arrives from the others.
  static int64_t scratch(int64_t n, int replicas) {
    return (replicas - 1) * piece_size(n, replicas);
  }

  // flat: [padded] fp32 where the lane works, the first n of which are averaged; nobody else
  // touches it before wait() has returned. scratch: fp32, for all that one lane does in turn.
  Mean(at::Tensor flat, int64_t n, at::Tensor scratch, std::shared_ptr<Comm> replica,
       std::shared_ptr<Lane> lane);

  // True when the mean is there, or all that makes it is enqueued. Throws what went wrong.
  bool is_completed();
  // What the caller's stream gets from now on finds the mean in `flat`. After is_completed().
  void wait();

 private:
  struct State;
  const std::shared_ptr<Lane> lane_;
  const std::shared_ptr<State> state_;  // shared with the task
  Lane::Ticket ticket_;
};

}  // namespace edit_ext
