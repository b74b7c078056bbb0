// The passes over memory of one sync: chunk bodies of core under a block team. Persistent grids
// walk the chunks; every chunk leaves one fp32 sum, and a one-warp kernel adds them in fixed order.
#include "passes.cuh"
#include "team.cuh"

namespace edit_ext::cuda {
namespace {

template <class W>
__device__ W* wire(void* buffer, int64_t at) {
  return static_cast<W*>(buffer) + at;
}

template <class T, class W>
__device__ float pseudo_grad_chunk(const PlaceIn<DeviceTensor>& c, const LayerView& v) {
  const T* param = static_cast<T*>(c.tensor->data) + c.start;
  return pseudo_grad<T, W>(BlockTeam{aligned4(param)}, c.size, v.anchor + c.flat(), param,
                           wire<W>(v.send, c.flat()));
}

template <class W>
__global__ void __launch_bounds__(kThreads)
    pseudo_grad_kernel(const __grid_constant__ Tensors tensors, const LayerView v) {
  for (int64_t i = blockIdx.x; i < tensors.num_chunks; i += gridDim.x) {
    const auto c = place(tensors, i);
    float sum;
    switch (c.tensor->dtype) {
      case DType::bf16:
        sum = pseudo_grad_chunk<bf16, W>(c, v);
        break;
      case DType::f16:
        sum = pseudo_grad_chunk<f16, W>(c, v);
        break;
      default:
        sum = pseudo_grad_chunk<float, W>(c, v);
    }
    if (threadIdx.x == 0) v.partials[i] = sum;
    // Zeros up to the next group: padding travels and is merged like any element.
    const int padded = static_cast<int>(round_up(c.size, kGroup));
    for (int j = c.size + static_cast<int>(threadIdx.x); j < padded; j += kThreads) {
      *wire<W>(v.send, c.flat() + j) = from_float<W>(0.0f);
    }
  }
}

__global__ void __launch_bounds__(kThreads) zero_kernel(float* out, int64_t n) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t j = first; j < n; j += static_cast<int64_t>(gridDim.x) * blockDim.x) out[j] = 0.0f;
}

// Two blocks a processor: eight loads a thread are in flight, and fewer registers would spill.
template <class W>
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(const __grid_constant__ Pieces p) {
  __shared__ const W* from[kMaxReplicas];
  __shared__ float weights[kMaxReplicas];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < p.replicas) weights[thread] = p.weights[thread * p.stride];
  const BlockTeam team{true};
  for (int64_t i = blockIdx.x; i * kChunk < p.n; i += gridDim.x) {
    const int64_t at = i * kChunk;
    const int size = static_cast<int>(p.n - at < kChunk ? p.n - at : kChunk);
    if (thread < p.replicas) from[thread] = static_cast<const W*>(p.at[thread]) + at;
    __syncthreads();
    bool all = true;
    for (int r = 0; r < p.replicas; ++r) all = all && weights[r] != 0.0f;
    float sum;
    if (all && p.replicas == 2) {
      sum = merge<2>(team, size, 2, from, weights, p.merged + at);
    } else if (all && p.replicas == 4) {
      sum = merge<4>(team, size, 4, from, weights, p.merged + at);
    } else if (all && p.replicas == 8) {
      sum = merge<8>(team, size, 8, from, weights, p.merged + at);
    } else {
      sum = merge<0>(team, size, p.replicas, from, weights, p.merged + at);
    }
    if (thread == 0) p.partials[i] = sum;
    // merge() has met at a barrier after its last read of `from`.
  }
}
static_assert(kMaxReplicas <= kThreads, "one thread looks up one replica");

__global__ void __launch_bounds__(kThreads)
    square_sum_kernel(const float* values, int64_t n, float* partials) {
  for (int64_t i = blockIdx.x; i * kChunk < n; i += gridDim.x) {
    const int64_t at = i * kChunk;
    const int size = static_cast<int>(n - at < kChunk ? n - at : kChunk);
    const float sum = square_sum(BlockTeam{true}, size, values + at);
    if (threadIdx.x == 0) partials[i] = sum;
  }
}

template <class W>
__global__ void __launch_bounds__(kThreads) encode_kernel(const LayerView v) {
  const int64_t n = piece_elements(v, v.replica);
  for (int64_t i = blockIdx.x; i * kChunk < n; i += gridDim.x) {
    const int64_t at = i * kChunk;
    const int size = static_cast<int>(n - at < kChunk ? n - at : kChunk);
    outer_step<float, W>(BlockTeam{true}, size, kAsItIs, v.merged + at, nullptr, nullptr,
                         wire<W>(v.send, v.replica * v.piece + at));
  }
}

// M: the merged values, in fp32 or, if replicated, as they came over the wire.
template <class M, class W>
__global__ void __launch_bounds__(kThreads) outer_step_kernel(const LayerView v, const Policy p) {
  const int64_t n = step_elements(v), first = step_first(v);
  const bool returns = returns_steps(v), skip = v.decision->skip != 0;
  const M* merged = static_cast<const M*>(v.replicated ? v.send : v.merged);
  if (skip && !returns) return;
  const OuterStep numbers = outer_numbers(p, *v.decision);
  const BlockTeam team{true};
  for (int64_t i = blockIdx.x; i * kChunk < n; i += gridDim.x) {
    const int64_t at = i * kChunk;
    const int size = static_cast<int>(n - at < kChunk ? n - at : kChunk);
    W* step = returns ? wire<W>(v.send, first + at) : nullptr;
    if (skip) {
      team.map(size, [=](auto vector, int j) { decltype(vector)::all(0.0f).store(step + j); });
    } else {
      outer_step<M, W>(team, size, numbers, merged + at, v.anchor + first + at,
                       v.momentum ? v.momentum + at : nullptr, step);
    }
  }
}

template <bool Mixed, class T, class W>
__device__ void write_back_chunk(const PlaceIn<DeviceTensor>& c, const LayerView& v) {
  T* param = static_cast<T*>(c.tensor->data) + c.start;
  const W* step = returns_steps(v) ? wire<W>(v.send, c.flat()) : nullptr;
  write_back<Mixed>(BlockTeam{aligned4(param)}, c.size, v.anchor + c.flat(), step, v.keep, param);
}

// Two blocks a processor, else nvcc holds sm_80 to 32 registers and spills.
template <bool Mixed, class W>
__global__ void __launch_bounds__(kThreads, 2)
    write_back_kernel(const __grid_constant__ Tensors tensors, const LayerView v) {
  if (stays_local(v)) return;
  for (int64_t i = blockIdx.x; i < tensors.num_chunks; i += gridDim.x) {
    const auto c = place(tensors, i);
    switch (c.tensor->dtype) {
      case DType::bf16:
        write_back_chunk<Mixed, bf16, W>(c, v);
        break;
      case DType::f16:
        write_back_chunk<Mixed, f16, W>(c, v);
        break;
      default:
        write_back_chunk<Mixed, float, W>(c, v);
    }
  }
}

int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }

}  // namespace

void pseudo_grad_pass(const LayerView& v, cudaStream_t stream) {
  const Tensors tensors = tensors_of(v, stream);
  if (!v.anchored) {
    launch("zero_kernel", zero_kernel, blocks_for(chunks_of(v.size)), kThreads, stream, v.anchor,
           v.size);
  }
  launch("pseudo_grad_kernel",
         v.wire == Wire::f32 ? pseudo_grad_kernel<float> : pseudo_grad_kernel<bf16>,
         blocks_for(tensors.num_chunks), kThreads, stream, tensors, v);
}

void merge_pass(const Pieces& p, Wire wire, cudaStream_t stream) {
  launch("merge_kernel", wire == Wire::f32 ? merge_kernel<float> : merge_kernel<bf16>,
         blocks_for(chunks_of(p.n)), kThreads, stream, p);
}

void square_sum_pass(const float* values, int64_t n, float* partials, cudaStream_t stream) {
  launch("square_sum_kernel", square_sum_kernel, blocks_for(chunks_of(n)), kThreads, stream, values,
         n, partials);
}

void encode_pass(const LayerView& v, cudaStream_t stream) {
  launch("encode_kernel", encode_kernel<bf16>, blocks_for(chunks_of(piece_elements(v, v.replica))),
         kThreads, stream, v);
}

void outer_step_pass(const LayerView& v, const Policy& p, cudaStream_t stream) {
  const auto narrow = v.replicated ? outer_step_kernel<bf16, bf16> : outer_step_kernel<float, bf16>;
  launch("outer_step_kernel", v.wire == Wire::f32 ? outer_step_kernel<float, float> : narrow,
         blocks_for(chunks_of(step_elements(v))), kThreads, stream, v, p);
}

void write_back_pass(const LayerView& v, cudaStream_t stream) {
  const Tensors tensors = tensors_of(v, stream);
  const bool wide = v.wire == Wire::f32;
  const auto plain = wide ? write_back_kernel<false, float> : write_back_kernel<false, bf16>;
  const auto mixed = wide ? write_back_kernel<true, float> : write_back_kernel<true, bf16>;
  launch("write_back_kernel", v.keep == 0.0f ? plain : mixed, blocks_for(tensors.num_chunks),
         kThreads, stream, tensors, v);
}

}  // namespace edit_ext::cuda
