// The GPU's team: one block of 256 threads on one chunk. A warp takes a segment, a thread four
// neighbouring lanes of each of its rows, so that a row of 128 lanes is one load of 16 bytes a
// thread and the tree of sums is the CPU's, bit for bit.
#pragma once

#include "../core/chunk.h"
#include "../core/stacked.h"
#include "../core/vec_scalar.h"
#include "vec.cuh"

namespace edit_ext::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;  // lanes of a warp that take part: all
constexpr int kThreads = kWarp * kSegments;
constexpr int kMaxWarps = 16;  // of a block that calls a team
static_assert(kLanes == 4 * kWarp, "a warp covers a row with four lanes a thread");

// Folds the 32 values of a warp in halves; lane 0 holds the result.
template <class T>
__device__ T fold_warp(T x) {
  for (int half = kWarp / 2; half > 0; half /= 2) x = x + __shfl_down_sync(kAll, x, half);
  return x;
}

// total() of the CPU on the first warp of a block; lane 0 holds the result.
inline __device__ double total(const float* partials, int64_t n, int64_t stride = 1) {
  return fold_warp(total_lane(partials, n, stride, static_cast<int>(threadIdx.x)));
}

template <class T>
__device__ bool aligned4(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

struct BlockTeam {
  bool aligned;  // every array of this call starts at a multiple of four of its elements

  template <class V, class T>
  static __device__ void put(T* p, V v) {
    v.store(p);
  }

  template <class F>
  __device__ void map(int n, F f) const {
    if (aligned) {
      map_with<Vec4<true>>(n, f);
    } else {
      map_with<Vec4<false>>(n, f);
    }
  }

  template <class V, class F>
  static __device__ void map_with(int n, F f) {
    const int whole = n / 4 * 4, thread = static_cast<int>(threadIdx.x);
#pragma unroll 2
    for (int j = 4 * thread; j < whole; j += 4 * static_cast<int>(blockDim.x)) f(V{}, j);
    if (whole + thread < n) f(VecScalar{}, whole + thread);
  }

  // The sum is thread 0's; all threads of the block must call.
  template <class F>
  __device__ float sum_squares(int n, F f) const {
    return fold_segments(aligned ? segment<Vec4<true>>(n, f) : segment<Vec4<false>>(n, f));
  }

  // This warp's segment; lane 0 holds the sum.
  template <class V, class F>
  static __device__ float segment(int n, F f) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int begin = static_cast<int>(threadIdx.x) / kWarp * kSegment;
    const int end = begin + kSegment < n ? begin + kSegment : n;
    float sums[4] = {};
    int row = begin;
#pragma unroll 4
    for (; row + kLanes <= end; row += kLanes) {
      const V g = f(V{}, row + 4 * lane);
      for (int k = 0; k < 4; ++k) sums[k] = sums[k] + g.x[k] * g.x[k];
    }
    for (int k = 0; k < 4; ++k) {
      const int j = row + 4 * lane + k;
      if (j >= end) continue;
      const VecScalar g = f(VecScalar{}, j);
      sums[k] = sums[k] + g.x * g.x;
    }
    for (int half = kWarp / 2; half > 0; half /= 2) {
      for (int k = 0; k < 4; ++k) sums[k] = sums[k] + __shfl_down_sync(kAll, sums[k], half);
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }

  static __device__ float fold_segments(float sum) {
    // A block may have more warps than a chunk has segments: theirs are empty.
    __shared__ float segments[kMaxWarps];
    if (threadIdx.x % kWarp == 0) segments[threadIdx.x / kWarp] = sum;
    __syncthreads();
    float x[kSegments];
    for (int s = 0; s < kSegments; ++s) x[s] = segments[s];
    for (int half = kSegments / 2; half > 0; half /= 2) {
      for (int s = 0; s < half; ++s) x[s] = x[s] + x[s + half];
    }
    __syncthreads();  // the next chunk writes `segments`
    return x[0];
  }

  // As cpu::Team::sum_products: a run of 2048 elements is folded from 16 lanes, here four threads
  // of four lanes each, and the 32 runs of a chunk by a warp. For blocks of kProductThreads, which
  // meet at a barrier before the next call.
  template <int R, class F>
  __device__ void sum_products(int n, F f, float* out) const {
    if (aligned) {
      products<R, Vec4<true>>(n, f, out);
    } else {
      products<R, Vec4<false>>(n, f, out);
    }
  }

  static constexpr int kProductThreads = kRuns * kProductLanes / 4;

  template <int R, class V, class F>
  static __device__ void products(int n, F f, float* out) {
    constexpr int pairs = R * (R + 1) / 2;
    __shared__ float runs[pairs][kRuns];
    const int run = static_cast<int>(threadIdx.x) / 4, quad = static_cast<int>(threadIdx.x) % 4;
    const int begin = run * kRun, end = begin + kRun < n ? begin + kRun : n;
    float sums[pairs][4] = {};
    int row = begin;
    for (; row + kProductLanes <= end; row += kProductLanes) {
      V g[R];
      f(V{}, row + 4 * quad, g);
      EDIT_UNROLL
      for (int i = 0, p = 0; i < R; ++i) {
        EDIT_UNROLL
        for (int k = i; k < R; ++k, ++p) {
          for (int e = 0; e < 4; ++e) sums[p][e] = sums[p][e] + g[i].x[e] * g[k].x[e];
        }
      }
    }
    EDIT_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int j = row + 4 * quad + e;
      if (j >= end) continue;
      VecScalar g[R];
      f(VecScalar{}, j, g);
      EDIT_UNROLL
      for (int i = 0, p = 0; i < R; ++i) {
        EDIT_UNROLL
        for (int k = i; k < R; ++k, ++p) sums[p][e] = sums[p][e] + g[i].x * g[k].x;
      }
    }
    EDIT_UNROLL
    for (int p = 0; p < pairs; ++p) {
      for (int half = 2; half > 0; half /= 2) {
        for (int e = 0; e < 4; ++e) {
          sums[p][e] = sums[p][e] + __shfl_down_sync(kAll, sums[p][e], half);
        }
      }
      if (quad == 0) runs[p][run] = (sums[p][0] + sums[p][2]) + (sums[p][1] + sums[p][3]);
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
    for (int p = warp; p < pairs; p += kProductThreads / kWarp) {
      const float sum = fold_warp(runs[p][lane]);
      if (lane == 0) out[p] = sum;
    }
  }
};
static_assert(kRuns == kWarp, "a warp folds the runs of a chunk");

}  // namespace edit_ext::cuda
