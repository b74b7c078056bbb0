#include "device.h"
#include "passes.cuh"
#include "team.cuh"

namespace edit_ext::cuda {
namespace {

__global__ void __launch_bounds__(kWarp) record_kernel(const LayerView v, const SyncTag tag) {
  if (threadIdx.x != 0) return;
  double norm2 = 0.0;
  for (int s = 0; s < v.shards; ++s) norm2 += v.shard_sums[s];
  v.records[v.replica] = {norm2, tag.sync_index, tag.steps, tag.done};
}

__global__ void __launch_bounds__(kWarp) decide_kernel(const LayerView v, const Policy p) {
  if (threadIdx.x != 0) return;
  edit_ext::decide(p, v.replicas, v.records, v.detectors, v.per_replica, *v.decision);
}

__global__ void __launch_bounds__(kWarp)
    sum_kernel(const float* partials, int64_t chunks, double* out) {
  const double sum = total(partials, chunks);
  if (threadIdx.x == 0) *out = sum;
}

__global__ void __launch_bounds__(kWarp) merge_sum_kernel(const LayerView v) {
  const double sum = total(v.partials, (counted_in_piece(v) + kChunk - 1) / kChunk);
  if (threadIdx.x == 0) v.merge_records[v.mesh_rank] = {sum, v.decision->hash};
}

__global__ void __launch_bounds__(kWarp) decide_clip_kernel(const LayerView v, const Policy p) {
  if (threadIdx.x == 0) decide_clip(p, v.mesh_ranks, v.merge_records, v.gaps, *v.decision);
}

int checked(int64_t replicas) {
  if (replicas <= kMaxReplicas) return static_cast<int>(replicas);
  throw std::runtime_error("a replica group has " + std::to_string(replicas) +
                           " replicas; on CUDA at most " + std::to_string(kMaxReplicas));
}

}  // namespace

std::vector<TableRow> table_of(const LayerView& v) {
  std::vector<TableRow> rows = rows_of(v);
  if (rows.size() <= kByValue) rows.clear();
  return rows;
}

void merge_pieces(const std::vector<const void*>& pieces, Wire wire, const float* weights,
                  int64_t n, float* merged, float* partials, double* sum, cudaStream_t stream) {
  Pieces p{};
  p.replicas = checked(static_cast<int64_t>(pieces.size()));
  for (int r = 0; r < p.replicas; ++r) p.at[r] = pieces[r];
  p.weights = weights;
  p.stride = 1;
  p.n = n;
  p.merged = merged;
  p.partials = partials;
  merge_pass(p, wire, stream);
  launch("sum_kernel", sum_kernel, 1, kWarp, stream, partials, (n + kChunk - 1) / kChunk, sum);
}

void CudaDevice::pseudo_grad(const LayerView& v) {
  pseudo_grad_pass(v, stream_);
  launch("sum_kernel", sum_kernel, 1, kWarp, stream_, v.partials, v.counted_chunks,
         v.shard_sums + v.shard);
}

void CudaDevice::record(const LayerView& v, const SyncTag& tag) {
  launch("record_kernel", record_kernel, 1, kWarp, stream_, v, tag);
}

void CudaDevice::decide(const LayerView& v, const Policy& p) {
  launch("decide_kernel", decide_kernel, 1, kWarp, stream_, v, p);
}

void CudaDevice::merge(const LayerView& v) {
  Pieces pieces{};
  pieces.replicas = checked(v.replicas);
  for (int r = 0; r < v.replicas; ++r) pieces.at[r] = received(v, r);
  pieces.weights = &v.per_replica->weight;  // an address: nothing is read here
  pieces.stride = sizeof(PerReplica) / sizeof(float);
  pieces.n = counted_in_piece(v);
  pieces.merged = v.merged;
  pieces.partials = v.partials;
  merge_pass(pieces, v.wire, stream_);
  launch("merge_sum_kernel", merge_sum_kernel, 1, kWarp, stream_, v);
  const int64_t rest = piece_elements(v, v.replica) - pieces.n;
  if (rest == 0) return;
  for (int r = 0; r < v.replicas; ++r) {
    pieces.at[r] = static_cast<const char*>(pieces.at[r]) + wire_bytes(v.wire, pieces.n);
  }
  pieces.merged += pieces.n;
  pieces.n = rest;
  merge_pass(pieces, v.wire, stream_);
}

void CudaDevice::gap(const LayerView& v) {
  const int64_t n = counted_in_piece(v);
  square_sum_pass(own_momentum(v), n, v.partials, stream_);
  launch("sum_kernel", sum_kernel, 1, kWarp, stream_, v.partials, (n + kChunk - 1) / kChunk,
         v.gaps + v.mesh_rank);
}

void CudaDevice::encode_merged(const LayerView& v) {
  if (reinterpret_cast<char*>(v.merged) != received(v, v.replica)) encode_pass(v, stream_);
}

void CudaDevice::outer_step(const LayerView& v, const Policy& p) {
  launch("decide_clip_kernel", decide_clip_kernel, 1, kWarp, stream_, v, p);
  outer_step_pass(v, p, stream_);
}

void CudaDevice::write_back(const LayerView& v) { write_back_pass(v, stream_); }

}  // namespace edit_ext::cuda
