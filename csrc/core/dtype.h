// 16-bit floats as plain bit structs. Conversions round to nearest even, keep the top bits of a
// NaN and make it quiet: bit for bit what F16C and the CUDA conversions do.
#pragma once

#include <cstdint>
#include <cstring>

#include "base.h"

namespace edit_ext {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

EDIT_HD int64_t size_of(DType t) { return t == DType::f32 ? 4 : 2; }

EDIT_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
EDIT_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
EDIT_HD uint64_t bits_of(double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  return u;
}

// Exponent all ones: infinity or NaN. Integer work, so that no compiler flag can fold it away.
EDIT_HD bool finite(double x) { return (bits_of(x) >> 52 & 0x7ff) != 0x7ff; }

EDIT_HD float to_float(float x) { return x; }

EDIT_HD float to_float(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

EDIT_HD float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t exp = x.bits >> 10 & 0x1f, man = x.bits & 0x3ff;
  if (exp == 0x1f) return float_of(sign | 0x7f800000 | man << 13 | (man ? 0x400000 : 0));
  if (exp) return float_of(sign | (exp + 112) << 23 | man << 13);
  // Subnormal: man * 2^-24, exact in fp32.
  const float magnitude = static_cast<float>(man) * 5.9604644775390625e-8f;
  return float_of(sign | bits_of(magnitude));
}

template <class T>
EDIT_HD T from_float(float x);

template <>
EDIT_HD float from_float<float>(float x) {
  return x;
}

template <>
EDIT_HD bf16 from_float<bf16>(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(u >> 16 | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

template <>
EDIT_HD f16 from_float<f16>(float x) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
  if (mag > 0x7f800000) {
    return {static_cast<uint16_t>(sign | 0x7e00 | (mag >> 13 & 0x3ff))};
  }
  if (mag >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // >= 65520 -> inf
  if (mag < 0x38800000) {
    // Below 2^-14 halves are multiples of 2^-24: adding 0.5 puts that step at the last bit of
    // the fp32 significand, and the addition rounds to nearest even for us.
    const float shifted = float_of(mag) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)))};
  }
  const uint32_t rounded = mag + 0xfff + (mag >> 13 & 1);
  return {static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13)};
}

}  // namespace edit_ext
