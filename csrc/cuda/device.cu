#include "device.h"
#include "passes.cuh"
#include "team.cuh"

namespace edit_ext::cuda {
namespace {

// One warp adds the chunk sums of the pseudo-gradient.
__global__ void __launch_bounds__(kWarp) shard_sum_kernel(const LayerView v) {
  const double sum = total(v.partials, v.num_chunks);
  if (threadIdx.x == 0) v.shard_sums[v.shard] = sum;
}

__global__ void __launch_bounds__(kWarp) record_kernel(const LayerView v, const SyncTag tag) {
  if (threadIdx.x != 0) return;
  double norm2 = 0.0;
  for (int s = 0; s < v.shards; ++s) norm2 += v.shard_sums[s];
  v.records[v.replica] = {norm2, tag.sync_index, tag.steps, tag.done};
}

__global__ void __launch_bounds__(kWarp) decide_kernel(const LayerView v, const Policy p) {
  if (threadIdx.x != 0) return;
  decide(p, v.replicas, v.records, v.detectors, v.per_replica, *v.decision);
}

__global__ void __launch_bounds__(kWarp) merge_sum_kernel(const LayerView v) {
  const int64_t n = piece_elements(v, v.replica);
  const double sum = total(v.partials, (n + kChunk - 1) / kChunk);
  if (threadIdx.x == 0) v.merge_records[v.mesh_rank] = {sum, v.decision->hash};
}

__global__ void __launch_bounds__(kWarp) decide_clip_kernel(const LayerView v, const Policy p) {
  if (threadIdx.x == 0) decide_clip(p, v.mesh_ranks, v.merge_records, *v.decision);
}

}  // namespace

void CudaDevice::pseudo_grad(const LayerView& v) {
  pseudo_grad_pass(v, stream_);
  launch("shard_sum_kernel", shard_sum_kernel, 1, kWarp, stream_, v);
}

void CudaDevice::record(const LayerView& v, const SyncTag& tag) {
  launch("record_kernel", record_kernel, 1, kWarp, stream_, v, tag);
}

void CudaDevice::merge(const LayerView& v, const Policy& p) {
  if (v.replicas > kMaxReplicas) {
    throw std::runtime_error("a replica group has " + std::to_string(v.replicas) +
                             " replicas; on CUDA at most " + std::to_string(kMaxReplicas));
  }
  launch("decide_kernel", decide_kernel, 1, kWarp, stream_, v, p);
  merge_pass(v, stream_);
  launch("merge_sum_kernel", merge_sum_kernel, 1, kWarp, stream_, v);
}

void CudaDevice::outer_step(const LayerView& v, const Policy& p) {
  launch("decide_clip_kernel", decide_clip_kernel, 1, kWarp, stream_, v, p);
  outer_step_pass(v, p, stream_);
}

void CudaDevice::write_back(const LayerView& v) { write_back_pass(v, stream_); }

}  // namespace edit_ext::cuda
