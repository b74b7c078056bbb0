// The CPU's team: one thread with vectors of type V, and scalar code for what is left of a row.
#pragma once

#include "../core/base.h"
#include "../core/vec_scalar.h"

namespace edit_ext::cpu {
namespace {

// Fold n values in halves: x[i] += x[i + n/2], and so on. n is a power of two.
inline float fold(float* x, int n) {
  for (int half = n / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  }
  return x[0];
}

template <class V>
struct Team {
  bool streaming;  // outputs go past the caches

  template <class U, class T>
  void put(T* p, U v) const {
    if (streaming) {
      v.stream(p);
    } else {
      v.store(p);
    }
  }

  template <class F>
  void map(int n, F f) const {
    int j = 0;
    for (; j + V::width <= n; j += V::width) f(V{}, j);
    for (; j < n; ++j) f(VecScalar{}, j);
  }

  template <class F>
  float sum_squares(int n, F f) const {
    float segments[kSegments] = {};
    for (int s = 0, begin = 0; begin < n; ++s, begin += kSegment) {
      segments[s] = segment(begin, begin + kSegment < n ? begin + kSegment : n, f);
    }
    return fold(segments, kSegments);
  }

  template <class F>
  static float segment(int begin, int end, F f) {
    constexpr int rows = kLanes / V::width;
    V sums[rows];
    for (V& sum : sums) sum = V::all(0.0f);
    int j = begin;
    for (; j + kLanes <= end; j += kLanes) {
      for (int k = 0; k < rows; ++k) {
        const V g = f(V{}, j + k * V::width);
        sums[k] = sums[k] + g * g;
      }
    }
    float lanes[kLanes];
    for (int k = 0; k < rows; ++k) sums[k].store(lanes + k * V::width);
    for (int lane = 0; j < end; ++j, ++lane) {
      const VecScalar g = f(VecScalar{}, j);
      lanes[lane] = lanes[lane] + g.x * g.x;
    }
    return fold(lanes, kLanes);
  }

  // out receives the R (R + 1) / 2 inner products of what f writes to g, row by row. Sixteen lanes
  // and short runs, not the tree of squares: that keeps all sums in registers.
  template <int R, class F>
  void sum_products(int n, F f, float* out) const {
    constexpr int pairs = R * (R + 1) / 2;
    float runs[pairs][kRuns] = {};
    for (int i = 0, begin = 0; begin < n; ++i, begin += kRun) {
      float lanes[pairs][kProductLanes];
      run_products<R>(begin, begin + kRun < n ? begin + kRun : n, f, lanes);
      for (int p = 0; p < pairs; ++p) runs[p][i] = fold(lanes[p], kProductLanes);
    }
    for (int p = 0; p < pairs; ++p) out[p] = fold(runs[p], kRuns);
  }

  template <int R, class F>
  static void run_products(int begin, int end, F f, float (*lanes)[kProductLanes]) {
    constexpr int pairs = R * (R + 1) / 2, vectors = kProductLanes / V::width;
    V sums[vectors][pairs];
    for (auto& row : sums) {
      for (V& sum : row) sum = V::all(0.0f);
    }
    int j = begin;
    for (; j + kProductLanes <= end; j += kProductLanes) {
#pragma GCC unroll 8
      for (int k = 0; k < vectors; ++k) add_products<R>(f, j + k * V::width, sums[k]);
    }
    for (int p = 0; p < pairs; ++p) {
      for (int k = 0; k < vectors; ++k) sums[k][p].store(&lanes[p][k * V::width]);
    }
    for (int lane = 0; j < end; ++j, ++lane) {
      VecScalar rest[pairs];
      for (int p = 0; p < pairs; ++p) rest[p].x = lanes[p][lane];
      add_products<R>(f, j, rest);
      for (int p = 0; p < pairs; ++p) lanes[p][lane] = rest[p].x;
    }
  }

  template <int R, class U, class F>
  static EDIT_HD void add_products(F f, int j, U* sums) {
    U g[R];
    f(U{}, j, g);
#pragma GCC unroll 8
    for (int i = 0, p = 0; i < R; ++i) {
#pragma GCC unroll 8
      for (int k = i; k < R; ++k, ++p) sums[p] = sums[p] + g[i] * g[k];
    }
  }
};

}  // namespace
}  // namespace edit_ext::cpu
