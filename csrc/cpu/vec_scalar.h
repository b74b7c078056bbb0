// The vector of width one: the plain meaning of what the SIMD vectors do, and their tail.
#pragma once

#include "../core/dtype.h"

namespace edit_ext::cpu {
// Unnamed, like everything that is compiled once per instruction set: the linker must not merge
// the copies.
namespace {

struct VecScalar {
  static constexpr int width = 1;
  float x;

  static VecScalar all(float f) { return {f}; }
  template <class T>
  static VecScalar load(const T* p) {
    return {to_float(*p)};
  }
  template <class T>
  void store(T* p) const {
    *p = from_float<T>(x);
  }
  template <class T>
  void stream(T* p) const {
    store(p);
  }
  template <class T>
  VecScalar rounded() const {
    return {to_float(from_float<T>(x))};
  }
};

EDIT_HD VecScalar operator+(VecScalar a, VecScalar b) { return {a.x + b.x}; }
EDIT_HD VecScalar operator-(VecScalar a, VecScalar b) { return {a.x - b.x}; }
EDIT_HD VecScalar operator*(VecScalar a, VecScalar b) { return {a.x * b.x}; }

}  // namespace
}  // namespace edit_ext::cpu
