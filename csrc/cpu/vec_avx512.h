// Sixteen fp32 lanes of AVX-512 (F, BW, VL, DQ). Never FMA, see vec_avx2.h.
#pragma once

#include <immintrin.h>

#include "../core/dtype.h"

namespace edit_ext::cpu {
namespace {

inline __m256i bf16_of(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, even, quiet), 16));
}

struct VecAvx512 {
  static constexpr int width = 16;
  __m512 x;

  static VecAvx512 all(float f) { return {_mm512_set1_ps(f)}; }

  static VecAvx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static VecAvx512 load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static VecAvx512 load(const f16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }

  static __m256i half(VecAvx512 v, const bf16*) { return bf16_of(v.x); }
  static __m256i half(VecAvx512 v, const f16*) {
    return _mm512_cvtps_ph(v.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  void store(float* p) const { _mm512_storeu_ps(p, x); }
  void stream(float* p) const {
    if (reinterpret_cast<uintptr_t>(p) % 64) return store(p);
    _mm512_stream_ps(p, x);
  }
  template <class T>
  void store(T* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half(*this, p));
  }
  template <class T>
  void stream(T* p) const {
    if (reinterpret_cast<uintptr_t>(p) % 32) return store(p);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), half(*this, p));
  }

  template <class T>
  VecAvx512 rounded() const {
    T kept[width];
    store(kept);
    return load(kept);
  }
  VecAvx512 within(float limit) const {
    const __m512 low = _mm512_min_ps(x, _mm512_set1_ps(limit));
    return {_mm512_max_ps(low, _mm512_set1_ps(-limit))};
  }
};

template <>
inline VecAvx512 VecAvx512::rounded<float>() const {
  return *this;
}

inline VecAvx512 operator+(VecAvx512 a, VecAvx512 b) { return {_mm512_add_ps(a.x, b.x)}; }
inline VecAvx512 operator-(VecAvx512 a, VecAvx512 b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline VecAvx512 operator*(VecAvx512 a, VecAvx512 b) { return {_mm512_mul_ps(a.x, b.x)}; }

}  // namespace
}  // namespace edit_ext::cpu
