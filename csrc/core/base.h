// What every other file in core stands on: the host+device macro and the fixed sizes that the
// order of every sum depends on. No CUDA header and no torch header in this folder.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EDIT_HD __host__ __device__ __forceinline__
#if defined(__CUDA_ARCH__)
#define EDIT_UNROLL _Pragma("unroll")
#else
#define EDIT_UNROLL
#endif
#else
#define EDIT_UNROLL _Pragma("GCC unroll 8")
// always_inline: the same header is compiled under several instruction sets, and the linker must
// never pick the AVX-512 copy of a small function for a machine without it.
#define EDIT_HD inline __attribute__((always_inline))
#endif

namespace edit_ext {

// One team (a CPU thread, a CUDA block) works on one chunk of one tensor. A chunk is cut into
// segments of rows of kLanes elements; lane j sums the squares of elements j, j + 128, ... of a
// segment, lanes are folded in halves, then segments are. This tree is the same for scalar code,
// AVX2, AVX-512 and CUDA, so a sum never depends on who computed it.
constexpr int kLanes = 128;
constexpr int kSegment = 8192;
constexpr int kChunk = 65536;
constexpr int kSegments = kChunk / kSegment;

// Inner products have a tree of their own: a run is folded from kProductLanes lanes, then the runs
// of a chunk are.
constexpr int kProductLanes = 16;
constexpr int kRun = 2048;
constexpr int kRuns = kChunk / kRun;

// Every tensor starts at a multiple of kGroup elements in a layer's flat buffers, and so does
// every piece: vector loads of our own buffers are always aligned, and a group never spans two
// tensors.
constexpr int kGroup = 128;

EDIT_HD int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Elements of one piece: 1/R of a layer of `size` elements, in whole groups.
EDIT_HD int64_t piece_size(int64_t size, int replicas) {
  return round_up((size + replicas - 1) / replicas, kGroup);
}

}  // namespace edit_ext
