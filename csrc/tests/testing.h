// Three macros and a counter: all a plain test executable needs. A failed check prints where and
// what, and the executable ends with a non-zero code.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace edit_ext::testing {

inline std::atomic<int> failures{0};  // ranks are threads
inline std::atomic<int> checks{0};

inline void check(bool ok, const char* what, const char* file, int line) {
  ++checks;
  if (ok) return;
  if (++failures <= 20) std::printf("%s:%d: failed: %s\n", file, line, what);
}

inline int close(const char* name) {
  std::printf("%s: %d checks, %d failures\n", name, checks.load(), failures.load());
  return failures == 0 && checks > 0 ? 0 : 1;
}

inline bool near(double a, double b, double tolerance) {
  return std::fabs(a - b) <= tolerance * (1.0 + std::fabs(b));
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace edit_ext::testing

#define CHECK(condition) ::edit_ext::testing::check((condition), #condition, __FILE__, __LINE__)
