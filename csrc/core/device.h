// Device: the passes over memory of one sync, and the decisions between them. Implementations only
// enqueue or compute; none of them hands a scalar back to the caller.
#pragma once

#include "layer.h"

namespace edit_ext {

class Device {
 public:
  virtual ~Device() = default;

  // Step 1. send, shard_sums[shard] <- tensors, anchor.
  virtual void pseudo_grad(const LayerView& v) = 0;
  // Between 2 and 3. records[replica] <- all shard_sums and the tag.
  virtual void record(const LayerView& v, const SyncTag& tag) = 0;
  // Step 5, first half. decision, per_replica, detectors <- records.
  virtual void decide(const LayerView& v, const Policy& p) = 0;
  // Second half. merged, merge_records[mesh_rank] <- pieces, weights in per_replica. `merged` may
  // be the owned piece itself.
  virtual void merge(const LayerView& v) = 0;
  // With step 6 if the policy asks for it. gaps[mesh_rank] <- owned piece of momentum.
  virtual void gap(const LayerView& v) = 0;
  // Before 8 if replicated. Owned piece of send <- merged, in wire format.
  virtual void encode_merged(const LayerView& v) = 0;
  // Step 7. Owned piece of anchor or send (see codec.h), momentum <- merged, merge_records. If
  // replicated: all of anchor and momentum <- send.
  virtual void outer_step(const LayerView& v, const Policy& p) = 0;
  // Step 9. tensors (and anchor, where steps came back) <- anchor, send.
  virtual void write_back(const LayerView& v) = 0;
};

}  // namespace edit_ext
