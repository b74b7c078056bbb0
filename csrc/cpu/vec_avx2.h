// Eight fp32 lanes of AVX2. Never FMA: a fused multiply-add rounds once where the other paths
// round twice.
#pragma once

#include <immintrin.h>

#include "../core/dtype.h"

namespace edit_ext::cpu {
namespace {

inline __m128i bf16_of(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
}

struct VecAvx2 {
  static constexpr int width = 8;
  __m256 x;

  static VecAvx2 all(float f) { return {_mm256_set1_ps(f)}; }

  static VecAvx2 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static VecAvx2 load(const bf16* p) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static VecAvx2 load(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }

  static __m128i half(VecAvx2 v, const bf16*) { return bf16_of(v.x); }
  static __m128i half(VecAvx2 v, const f16*) {
    return _mm256_cvtps_ph(v.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  void store(float* p) const { _mm256_storeu_ps(p, x); }
  void stream(float* p) const {
    if (reinterpret_cast<uintptr_t>(p) % 32) return store(p);
    _mm256_stream_ps(p, x);
  }
  template <class T>
  void store(T* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half(*this, p));
  }
  template <class T>
  void stream(T* p) const {
    if (reinterpret_cast<uintptr_t>(p) % 16) return store(p);
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), half(*this, p));
  }

  template <class T>
  VecAvx2 rounded() const {
    T kept[width];
    store(kept);
    return load(kept);
  }
  VecAvx2 within(float limit) const {
    const __m256 low = _mm256_min_ps(x, _mm256_set1_ps(limit));
    return {_mm256_max_ps(low, _mm256_set1_ps(-limit))};
  }
};

template <>
inline VecAvx2 VecAvx2::rounded<float>() const {
  return *this;
}

inline VecAvx2 operator+(VecAvx2 a, VecAvx2 b) { return {_mm256_add_ps(a.x, b.x)}; }
inline VecAvx2 operator-(VecAvx2 a, VecAvx2 b) { return {_mm256_sub_ps(a.x, b.x)}; }
inline VecAvx2 operator*(VecAvx2 a, VecAvx2 b) { return {_mm256_mul_ps(a.x, b.x)}; }

}  // namespace
}  // namespace edit_ext::cpu
