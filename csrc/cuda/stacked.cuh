// What both forms of a stacked sync do alike.
#pragma once

#include "team.cuh"
#include "tensors.cuh"

namespace edit_ext::cuda {

using Stack = TensorsOf<StackedTensor>;

// The R addresses of one chunk, in shared memory; all threads of the block must call.
struct Addresses {
  float* at[kMaxStacked];
};

inline __device__ bool aligned4(const StackedTensor& t, int replicas) {
  bool aligned = true;
  for (int r = 0; r < replicas; ++r) aligned = aligned && aligned4(t.data[r]);
  return aligned;
}

inline __device__ bool find(const PlaceIn<StackedTensor>& c, int replicas, Addresses& a) {
  const bool aligned = aligned4(*c.tensor, replicas);
  __syncthreads();  // the addresses of the last chunk are no longer read
  if (static_cast<int>(threadIdx.x) < replicas) {
    a.at[threadIdx.x] = c.tensor->data[threadIdx.x] + c.start;
  }
  __syncthreads();
  return aligned;
}

// The decision from the R (R + 1) / 2 totals, but for the clip; one thread calls.
inline __device__ void decide_totals(const Policy& p, int replicas, const double* gram,
                                     Detector* detectors, PerReplica* out, float* weights,
                                     double* merged2, Decision& d) {
  decide_stacked(p, replicas, gram, detectors, out, d);
  for (int r = 0; r < replicas; ++r) weights[r] = out[r].weight;
  *merged2 = merged_norm2(gram, replicas, out);
}

// The merged step's square sums of this block's chunks, from the parameters where they lie.
inline __device__ void exact_norms(const Stack& tensors, const StackedView& v,
                                   const float* weights) {
  __shared__ Addresses a;
  for (int64_t i = blockIdx.x; i < tensors.num_chunks; i += gridDim.x) {
    const auto c = place(tensors, i);
    const BlockTeam team{find(c, v.replicas, a)};
    const float sum = stacked_norm(team, c.size, v.replicas, weights, v.anchor + c.flat(), a.at);
    if (threadIdx.x == 0) v.partials[i] = sum;
  }
}

}  // namespace edit_ext::cuda
