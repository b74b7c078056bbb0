// The algorithm: one sync of one layer in nine steps, over any Device and any Comm.
// EDiT, arXiv 2412.07210, Algorithm 2; the order and cost of the steps is the design of this
// project: each piece is reduced once, by one rank, in replica order, and handed to all.
#pragma once

#include <vector>

#include "comm.h"
#include "device.h"

namespace edit_ext {

// On the caller's stream: the only read of the user's tensors.
inline void sync_begin(Device& dev, const LayerView& v) {
  dev.pseudo_grad(v);  // 1
}

inline void exchange_pieces(Comm& comm, const LayerView& v) {
  std::vector<Block> to(v.replicas), from(v.replicas);
  for (int r = 0; r < v.replicas; ++r) {
    char* send = static_cast<char*>(v.send) + wire_bytes(v.wire, r * v.piece);
    to[r] = {send, wire_bytes(v.wire, piece_elements(v, r))};
    from[r] = {received(v, r), wire_bytes(v.wire, piece_elements(v, v.replica))};
  }
  comm.exchange(to.data(), from.data());
}

inline void return_pieces(const Comms& comms, const LayerView& v, void* pieces) {
  if (!comms.replica) return;
  comms.replica->all_gather(pieces, wire_bytes(v.wire, v.piece), wire_bytes(v.wire, v.size));
}

// On the side stream: sees only our own buffers.
inline void sync_exchange(Device& dev, const Comms& comms, const LayerView& v, const Policy& p,
                          const SyncTag& tag) {
  if (comms.shard) comms.shard->gather_scalars(v.shard_sums, sizeof(double));  // 2
  dev.record(v, tag);
  if (comms.replica) {
    comms.replica->gather_scalars(v.records, sizeof(NormRecord));  // 3
    exchange_pieces(*comms.replica, v);                            // 4
  }
  dev.decide(v, p);  // 5
  dev.merge(v);
  if (comms.mesh) comms.mesh->gather_scalars(v.merge_records, sizeof(MergeRecord));  // 6
  if (p.gap_scale > 0.0) {
    dev.gap(v);
    if (comms.mesh) comms.mesh->gather_scalars(v.gaps, sizeof(double));
  }
  if (v.replicated) {
    dev.encode_merged(v);
    return_pieces(comms, v, v.send);  // 8
    dev.outer_step(v, p);             // 7
  } else {
    dev.outer_step(v, p);                                           // 7
    return_pieces(comms, v, returns_steps(v) ? v.send : v.anchor);  // 8
  }
}

// Sum of w_r * send over the replicas, in place, with the weights in per_replica: steps 4, 5 and 8
// for a flat vector that is no layer (gradients of the warm-up). v.merged is the owned piece of
// v.send, which has room for whole pieces.
inline void mean_exchange(Device& dev, Comm& comm, const LayerView& v) {
  exchange_pieces(comm, v);
  dev.merge(v);
  comm.all_gather(v.send, wire_bytes(v.wire, v.piece), wire_bytes(v.wire, v.size));
}

// On the caller's stream again: the only write to the user's tensors.
inline void sync_finish(Device& dev, const LayerView& v) {
  dev.write_back(v);  // 9
}

}  // namespace edit_ext
