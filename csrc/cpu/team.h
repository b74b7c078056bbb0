// The CPU's team: one thread with vectors of type V, and scalar code for what is left of a row.
#pragma once

#include "../core/base.h"
#include "vec_scalar.h"

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

  // out[p] += is not done here: out receives the R (R + 1) / 2 sums of this chunk.
  template <int R, class F>
  void sum_products(int n, F f, float* out) const {
    constexpr int pairs = R * (R + 1) / 2;
    float segments[pairs][kSegments] = {};
    for (int s = 0, begin = 0; begin < n; ++s, begin += kSegment) {
      const int end = begin + kSegment < n ? begin + kSegment : n;
      float lanes[pairs][kLanes] = {};
      product_rows<R>(begin, end, f, lanes);
      for (int p = 0; p < pairs; ++p) segments[p][s] = fold(lanes[p], kLanes);
    }
    for (int p = 0; p < pairs; ++p) out[p] = fold(segments[p], kSegments);
  }

  template <int R, class F>
  static void product_rows(int begin, int end, F f, float (*lanes)[kLanes]) {
    int j = begin;
    for (; j + kLanes <= end; j += kLanes) {
      for (int k = 0; k < kLanes; k += V::width) add_products<R, V>(j + k, k, f, lanes);
    }
    for (int k = 0; j < end; ++j, ++k) add_products<R, VecScalar>(j, k, f, lanes);
  }

  template <int R, class U, class F>
  static void add_products(int j, int lane, F f, float (*lanes)[kLanes]) {
    U g[R];
    f(U{}, j, g);
    for (int i = 0, p = 0; i < R; ++i) {
      for (int k = i; k < R; ++k, ++p) {
        (U::load(&lanes[p][lane]) + g[i] * g[k]).store(&lanes[p][lane]);
      }
    }
  }
};

}  // namespace
}  // namespace edit_ext::cpu
