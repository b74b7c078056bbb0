// LayerView: one layer in flight as a plain struct of pointers and sizes. It crosses every seam
// (torch -> sync -> device) and owns nothing.
#pragma once

#include "codec.h"
#include "policy.h"

namespace edit_ext {

struct TensorView {
  void* data;      // dense storage of `size` elements
  int64_t size;    // elements
  int64_t offset;  // first element in the layer's flat buffers, a multiple of kGroup
  DType dtype;
};

struct Chunk {
  int32_t tensor, size;  // size <= kChunk elements
  int64_t start;         // first element inside the tensor
};

// Which sync this is, and what this replica did since the last one.
struct SyncTag {
  int64_t sync_index, steps, done;
};

struct LayerView {
  const TensorView* tensors;  // [num_tensors]
  const Chunk* chunks;        // [num_chunks], none crosses a tensor
  int32_t num_tensors;
  int64_t num_chunks;
  int64_t size;   // elements of all tensors, each rounded up to kGroup
  int64_t piece;  // elements of one piece
  // A tensor that another rank of the replica holds too counts once, with that rank: norms are
  // taken over the first `counted` elements, which are the first counted_chunks chunks.
  int64_t counted, counted_chunks;
  int32_t replica, replicas, shard, shards, mesh_rank, mesh_ranks;
  Wire wire;
  bool anchored;    // false: the anchor is taken as zero (buffers, optimizer states)
  bool replicated;  // every replica holds the momentum of the whole layer, and takes its outer step
  bool late;        // the anchor is read while the exchange runs: only step 9 may write it
  float keep;       // what step 9 leaves of the parameters: param <- keep param + (1-keep) anchor

  float* anchor;        // [replicas * piece] fp32, the last agreed weights
  float* momentum;      // fp32, of the owned piece [piece], or of all of them [replicas * piece] if
                        // replicated; null if not anchored
  Detector* detectors;  // [replicas]

  void* send;         // [replicas * piece] wire format; then what comes back, if no anchors do
  void* recv;         // [(replicas - 1) * piece] wire format
  float* merged;      // [piece] fp32; may be the owned piece of send
  float* partials;    // [max(num_chunks, chunks of a piece)] one fp32 sum per chunk
  void* table;        // room for [num_tensors] of cuda/device.h; null on the CPU
  bool table_filled;  // it holds `tensors` already

  // Scalars on the device.
  double* shard_sums;          // [shards]
  NormRecord* records;         // [replicas]
  PerReplica* per_replica;     // [replicas]
  MergeRecord* merge_records;  // [mesh_ranks]
  double* gaps;                // [mesh_ranks]
  Decision* decision;
};

// Elements of piece r that exist; the last pieces may be short or empty.
EDIT_HD int64_t piece_elements(const LayerView& v, int r) {
  const int64_t left = v.size - r * v.piece;
  return left < 0 ? 0 : left < v.piece ? left : v.piece;
}

// Elements of the owned piece that count in norms; they come first.
EDIT_HD int64_t counted_in_piece(const LayerView& v) {
  const int64_t n = piece_elements(v, v.replica), left = v.counted - v.replica * v.piece;
  return left < 0 ? 0 : left < n ? left : n;
}

// Whether `send` holds encoded steps in the end, for step 9 to take off the anchor. Else step 7 has
// changed the anchor.
EDIT_HD bool returns_steps(const LayerView& v) {
  return v.late || (v.wire != Wire::f32 && !v.replicated);
}

// The owned piece of the momentum.
EDIT_HD const float* own_momentum(const LayerView& v) {
  return v.momentum + (v.replicated ? v.replica * v.piece : 0);
}

// What step 7 covers: the owned piece, or all.
EDIT_HD int64_t step_first(const LayerView& v) { return v.replicated ? 0 : v.replica * v.piece; }
EDIT_HD int64_t step_elements(const LayerView& v) {
  return v.replicated ? v.size : piece_elements(v, v.replica);
}

// Whether step 9 writes nothing: the sync was void, or there is no anchor to go back to. The pass
// by itself, as an operator, comes without a decision.
EDIT_HD bool stays_local(const LayerView& v) {
  if (v.decision == nullptr) return false;
  return v.decision->skip == kVoid || (!v.anchored && v.decision->skip != kNoSkip);
}

// Piece r as this rank received it; its own was never sent.
EDIT_HD char* received(const LayerView& v, int r) {
  if (r == v.replica) return static_cast<char*>(v.send) + wire_bytes(v.wire, r * v.piece);
  const int64_t slot = r < v.replica ? r : r - 1;
  return static_cast<char*>(v.recv) + wire_bytes(v.wire, slot * v.piece);
}

}  // namespace edit_ext
