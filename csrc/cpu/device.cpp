#include "device.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace edit_ext::cpu {
namespace {

// Streaming stores are weakly ordered: without the fence another thread that is told "done"
// through an ordinary store could still read the old bytes.
void drain_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

void serial_for(int64_t n, const Body& body) { body(0, n); }

double total(const float* partials, int64_t n, int64_t stride) {
  double lanes[kTotalLanes];
  for (int i = 0; i < kTotalLanes; ++i) lanes[i] = total_lane(partials, n, stride, i);
  for (int half = kTotalLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0];
}

void CpuDevice::for_each(int64_t n, const std::function<void(int64_t)>& body) const {
  parallel_for_(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
    drain_streams();
  });
}

void CpuDevice::for_chunks(
    const LayerView& v,
    const std::function<void(int64_t, const Chunk&, const TensorView&)>& body) const {
  for_each(v.num_chunks, [&](int64_t i) { body(i, v.chunks[i], v.tensors[v.chunks[i].tensor]); });
}

void CpuDevice::for_flat(int64_t size,
                         const std::function<void(int64_t, int64_t, int)>& body) const {
  for_each((size + kChunk - 1) / kChunk, [&](int64_t i) {
    const int64_t at = i * kChunk;
    body(i, at, static_cast<int>(std::min<int64_t>(kChunk, size - at)));
  });
}

void CpuDevice::pseudo_grad(const LayerView& v) {
  const bool stream = streams(v.size);
  if (!v.anchored) std::memset(v.anchor, 0, static_cast<size_t>(v.size) * sizeof(float));
  for_chunks(v, [&](int64_t i, const Chunk& c, const TensorView& t) {
    const int64_t flat = t.offset + c.start;
    char* send = static_cast<char*>(v.send) + wire_bytes(v.wire, flat);
    v.partials[i] = kernels_.pseudo_grad(
        c.size, v.anchor + flat, t.dtype,
        static_cast<const char*>(t.data) + c.start * size_of(t.dtype), v.wire, send, stream);
    // Zeros up to the next group: padding travels and is merged like any element.
    const int64_t padded = round_up(c.size, kGroup);
    std::memset(send + wire_bytes(v.wire, c.size), 0,
                static_cast<size_t>(wire_bytes(v.wire, padded - c.size)));
  });
  v.shard_sums[v.shard] = total(v.partials, v.counted_chunks);
}

void CpuDevice::record(const LayerView& v, const SyncTag& tag) {
  double norm2 = 0.0;
  for (int s = 0; s < v.shards; ++s) norm2 += v.shard_sums[s];
  v.records[v.replica] = {norm2, tag.sync_index, tag.steps, tag.done};
}

void CpuDevice::merge_pieces(const std::vector<const void*>& pieces, Wire wire,
                             const float* weights, int64_t n, float* merged, float* partials,
                             double* sum) const {
  const bool stream = streams(n);
  for_flat(n, [&](int64_t i, int64_t at, int size) {
    std::vector<const void*> from(pieces.size());
    for (size_t r = 0; r < from.size(); ++r) {
      from[r] = static_cast<const char*>(pieces[r]) + wire_bytes(wire, at);
    }
    partials[i] = kernels_.merge(size, static_cast<int>(from.size()), wire, from.data(), weights,
                                 merged + at, stream);
  });
  *sum = total(partials, (n + kChunk - 1) / kChunk);
}

void CpuDevice::decide(const LayerView& v, const Policy& p) {
  edit_ext::decide(p, v.replicas, v.records, v.detectors, v.per_replica, *v.decision);
}

void CpuDevice::merge(const LayerView& v) {
  std::vector<float> weights(v.replicas);
  std::vector<const void*> pieces(v.replicas);
  for (int r = 0; r < v.replicas; ++r) {
    weights[r] = v.per_replica[r].weight;
    pieces[r] = received(v, r);
  }
  const int64_t n = piece_elements(v, v.replica), counted = counted_in_piece(v);
  MergeRecord& record = v.merge_records[v.mesh_rank];
  record.hash = v.decision->hash;
  merge_pieces(pieces, v.wire, weights.data(), counted, v.merged, v.partials, &record.norm2);
  if (counted == n) return;
  for (const void*& piece : pieces) {
    piece = static_cast<const char*>(piece) + wire_bytes(v.wire, counted);
  }
  double uncounted = 0.0;
  merge_pieces(pieces, v.wire, weights.data(), n - counted, v.merged + counted, v.partials,
               &uncounted);
}

void CpuDevice::gap(const LayerView& v) {
  const float* momentum = own_momentum(v);
  const int64_t n = counted_in_piece(v);
  for_flat(n, [&](int64_t i, int64_t at, int size) {
    v.partials[i] = kernels_.square_sum(size, momentum + at);
  });
  v.gaps[v.mesh_rank] = total(v.partials, (n + kChunk - 1) / kChunk);
}

void CpuDevice::encode_merged(const LayerView& v) {
  char* owned = received(v, v.replica);
  if (reinterpret_cast<char*>(v.merged) == owned) return;
  for_flat(piece_elements(v, v.replica), [&](int64_t, int64_t at, int size) {
    kernels_.outer_step(size, kAsItIs, Wire::f32, v.merged + at, nullptr, nullptr, v.wire,
                        owned + wire_bytes(v.wire, at));
  });
}

void CpuDevice::outer_step(const LayerView& v, const Policy& p) {
  decide_clip(p, v.mesh_ranks, v.merge_records, v.gaps, *v.decision);
  const int64_t n = step_elements(v), first = step_first(v);
  char* steps = returns_steps(v) ? static_cast<char*>(v.send) + wire_bytes(v.wire, first) : nullptr;
  if (v.decision->skip) {
    if (steps) std::memset(steps, 0, static_cast<size_t>(wire_bytes(v.wire, n)));
    return;
  }
  const OuterStep numbers = outer_numbers(p, *v.decision);
  const Wire from = v.replicated ? v.wire : Wire::f32;
  const char* merged =
      v.replicated ? static_cast<char*>(v.send) : reinterpret_cast<char*>(v.merged);
  for_flat(n, [&](int64_t, int64_t at, int size) {
    kernels_.outer_step(size, numbers, from, merged + wire_bytes(from, at), v.anchor + first + at,
                        v.momentum ? v.momentum + at : nullptr, v.wire,
                        steps ? steps + wire_bytes(v.wire, at) : nullptr);
  });
}

void CpuDevice::write_back(const LayerView& v) {
  if (stays_local(v)) return;
  const bool stream = streams(v.size);
  for_chunks(v, [&](int64_t, const Chunk& c, const TensorView& t) {
    const int64_t flat = t.offset + c.start;
    const char* steps =
        returns_steps(v) ? static_cast<char*>(v.send) + wire_bytes(v.wire, flat) : nullptr;
    kernels_.write_back(c.size, v.anchor + flat, v.wire, steps, v.keep, t.dtype,
                        static_cast<char*>(t.data) + c.start * size_of(t.dtype), stream);
  });
}

}  // namespace edit_ext::cpu
