// The vector of width one: the plain meaning of what wider vectors do, and their tail.
#pragma once

#include "dtype.h"

namespace edit_ext {
// Unnamed, like everything that is compiled once per instruction set: the linker must not merge
// the copies.
namespace {

struct VecScalar {
  static constexpr int width = 1;
  float x;

  EDIT_HD static VecScalar all(float f) { return {f}; }
  template <class T>
  EDIT_HD static VecScalar load(const T* p) {
    return {to_float(*p)};
  }
  template <class T>
  EDIT_HD void store(T* p) const {
    *p = from_float<T>(x);
  }
  template <class T>
  EDIT_HD void stream(T* p) const {
    store(p);
  }
  template <class T>
  EDIT_HD VecScalar rounded() const {
    return {to_float(from_float<T>(x))};
  }
  EDIT_HD VecScalar within(float limit) const {
    const float low = x < limit ? x : limit;
    return {low > -limit ? low : -limit};
  }
};

EDIT_HD VecScalar operator+(VecScalar a, VecScalar b) { return {a.x + b.x}; }
EDIT_HD VecScalar operator-(VecScalar a, VecScalar b) { return {a.x - b.x}; }
EDIT_HD VecScalar operator*(VecScalar a, VecScalar b) { return {a.x * b.x}; }

}  // namespace
}  // namespace edit_ext
