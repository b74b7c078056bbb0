// Launches of the four passes; each enqueues on the stream and throws when a launch fails.
#pragma once

#include "tensors.cuh"

namespace edit_ext::cuda {

// Pointers to the replicas' pieces lie in shared memory while they are merged.
constexpr int kMaxReplicas = 256;

void pseudo_grad_pass(const LayerView& v, cudaStream_t stream);  // send, partials
void merge_pass(const LayerView& v, cudaStream_t stream);        // merged, partials
void outer_step_pass(const LayerView& v, const Policy& p, cudaStream_t stream);
void write_back_pass(const LayerView& v, cudaStream_t stream);

}  // namespace edit_ext::cuda
