#include "stacked.cuh"
#include "stacked.h"

namespace edit_ext::cuda {
namespace {

constexpr int kProductThreads = BlockTeam::kProductThreads;

// Pass 1: inner products of the pseudo-gradients, R (R + 1) / 2 sums a chunk.
template <int R>
__global__ void __launch_bounds__(kProductThreads)
    gram_kernel(const __grid_constant__ Stack tensors, const StackedView v) {
  __shared__ Addresses a;
  for (int64_t i = blockIdx.x; i < tensors.num_chunks; i += gridDim.x) {
    const auto c = place(tensors, i);
    const BlockTeam team{find(c, R, a)};
    gram<R>(team, c.size, v.anchor + c.flat(), a.at, v.partials + i * pairs_of(R));
  }
}

__global__ void __launch_bounds__(kWarp, 1)
    decide_stacked_kernel(const StackedView v, const Policy p) {
  __shared__ double sums[kMaxPairs];
  const int pairs = pairs_of(v.replicas);
  for (int i = 0; i < pairs; ++i) {
    const double sum = total(v.partials + i, v.num_chunks, pairs);
    if (threadIdx.x == 0) sums[i] = sum;
  }
  if (threadIdx.x != 0) return;
  decide_totals(p, v.replicas, sums, v.detectors, v.per_replica, v.weights, v.merged2, *v.decision);
}

// Returns at once unless the Gram form cannot resolve the merged norm.
__global__ void __launch_bounds__(kThreads)
    exact_norm_kernel(const __grid_constant__ Stack tensors, const StackedView v) {
  if (*v.merged2 < 0.0) exact_norms(tensors, v, v.weights);
}

__global__ void __launch_bounds__(kWarp) clip_stacked_kernel(const StackedView v, const Policy p) {
  const double exact = *v.merged2 < 0.0 ? total(v.partials, v.num_chunks) : 0.0;
  if (threadIdx.x == 0) clip_stacked(p, *v.merged2 < 0.0 ? exact : *v.merged2, *v.decision);
}

// Pass 2: merge, outer step and write-back of all replicas.
__global__ void __launch_bounds__(kThreads)
    stacked_step_kernel(const __grid_constant__ Stack tensors, const StackedView v,
                        const Policy p) {
  __shared__ Addresses a;
  const OuterStep numbers = outer_numbers(p, *v.decision);
  const bool skip = v.decision->skip != 0;
  for (int64_t i = blockIdx.x; i < tensors.num_chunks; i += gridDim.x) {
    const auto c = place(tensors, i);
    const BlockTeam team{find(c, v.replicas, a)};
    float* const anchor = v.anchor + c.flat();
    if (skip) {
      for (int r = 0; r < v.replicas; ++r) {
        write_back<false, float, float>(team, c.size, anchor, nullptr, 0.0f, a.at[r]);
      }
    } else {
      stacked_step(team, c.size, v.replicas, numbers, v.weights, anchor, v.momentum + c.flat(),
                   a.at);
    }
  }
}

template <int R>
void launch_gram(const Stack& tensors, const StackedView& v, cudaStream_t stream) {
  if constexpr (R <= kMaxStacked) {
    if (v.replicas != R) return launch_gram<R + 1>(tensors, v, stream);
    launch("gram_kernel", gram_kernel<R>, blocks_for(tensors.num_chunks), kProductThreads, stream,
           tensors, v);
  }
}

}  // namespace

void stacked_sync(const std::vector<StackedTensor>& tensors, void* table, const StackedView& v,
                  const OnChip& plan, const Policy& p, cudaStream_t stream) {
  if (plan.blocks > 0) return on_chip_sync(tensors, table, v, plan, p, stream);
  const Stack stack = tensors_in(tensors, v.num_chunks, table, stream);
  const int64_t blocks = blocks_for(v.num_chunks);
  launch_gram<1>(stack, v, stream);
  launch("decide_stacked_kernel", decide_stacked_kernel, 1, kWarp, stream, v, p);
  launch("exact_norm_kernel", exact_norm_kernel, blocks, kThreads, stream, stack, v);
  launch("clip_stacked_kernel", clip_stacked_kernel, 1, kWarp, stream, v, p);
  launch("stacked_step_kernel", stacked_step_kernel, blocks, kThreads, stream, stack, v, p);
}

}  // namespace edit_ext::cuda
