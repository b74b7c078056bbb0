// Launches of the passes; each enqueues on the stream and throws when a launch fails.
#pragma once

#include "tensors.cuh"

namespace edit_ext::cuda {

struct Pieces {
  const void* at[kMaxReplicas];
  const float* weights;
  int32_t replicas;
  int32_t stride;  // floats from one weight to the next
  int64_t n;       // elements of each piece
  float* merged;
  float* partials;
};

void pseudo_grad_pass(const LayerView& v, cudaStream_t stream);    // send, partials
void merge_pass(const Pieces& p, Wire wire, cudaStream_t stream);  // merged, partials
void square_sum_pass(const float* values, int64_t n, float* partials, cudaStream_t stream);
void encode_pass(const LayerView& v, cudaStream_t stream);  // owned piece of send
void outer_step_pass(const LayerView& v, const Policy& p, cudaStream_t stream);
void write_back_pass(const LayerView& v, cudaStream_t stream);

}  // namespace edit_ext::cuda
