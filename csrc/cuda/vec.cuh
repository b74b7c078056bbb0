// Four fp32 values of one thread, loaded with one access where the address allows.
#pragma once

#include "../core/dtype.h"
#include "runtime.h"

namespace edit_ext::cuda {

struct alignas(8) Half4 {
  uint16_t bits[4];
};

// Aligned: pointers are multiples of four elements. The other form takes a tensor at any address,
// element by element; the flat buffers beside it are always aligned, so peeling a head off one
// would misalign the other.
template <bool Aligned>
struct Vec4 {
  static constexpr int width = 4;
  float x[4];

  static __device__ Vec4 all(float f) { return {{f, f, f, f}}; }

  static __device__ Vec4 load(const float* p) {
    if constexpr (Aligned) {
      const float4 v = *reinterpret_cast<const float4*>(p);
      return {{v.x, v.y, v.z, v.w}};
    } else {
      return {{p[0], p[1], p[2], p[3]}};
    }
  }
  template <class T>
  static __device__ Vec4 load(const T* p) {
    Vec4 v;
    if constexpr (Aligned) {
      const Half4 h = *reinterpret_cast<const Half4*>(p);
      for (int k = 0; k < 4; ++k) v.x[k] = to_float(T{h.bits[k]});
    } else {
      for (int k = 0; k < 4; ++k) v.x[k] = to_float(p[k]);
    }
    return v;
  }

  __device__ void store(float* p) const {
    if constexpr (Aligned) {
      *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      for (int k = 0; k < 4; ++k) p[k] = x[k];
    }
  }
  template <class T>
  __device__ void store(T* p) const {
    if constexpr (Aligned) {
      Half4 h;
      for (int k = 0; k < 4; ++k) h.bits[k] = from_float<T>(x[k]).bits;
      *reinterpret_cast<Half4*>(p) = h;
    } else {
      for (int k = 0; k < 4; ++k) p[k] = from_float<T>(x[k]);
    }
  }

  template <class T>
  __device__ Vec4 rounded() const {
    Vec4 v;
    for (int k = 0; k < 4; ++k) v.x[k] = to_float(from_float<T>(x[k]));
    return v;
  }
  __device__ Vec4 within(float limit) const {
    Vec4 v;
    for (int k = 0; k < 4; ++k) {
      const float low = x[k] < limit ? x[k] : limit;
      v.x[k] = low > -limit ? low : -limit;
    }
    return v;
  }
};

template <bool A>
__device__ Vec4<A> operator+(Vec4<A> a, Vec4<A> b) {
  return {{a.x[0] + b.x[0], a.x[1] + b.x[1], a.x[2] + b.x[2], a.x[3] + b.x[3]}};
}
template <bool A>
__device__ Vec4<A> operator-(Vec4<A> a, Vec4<A> b) {
  return {{a.x[0] - b.x[0], a.x[1] - b.x[1], a.x[2] - b.x[2], a.x[3] - b.x[3]}};
}
template <bool A>
__device__ Vec4<A> operator*(Vec4<A> a, Vec4<A> b) {
  return {{a.x[0] * b.x[0], a.x[1] * b.x[1], a.x[2] * b.x[2], a.x[3] * b.x[3]}};
}

}  // namespace edit_ext::cuda
