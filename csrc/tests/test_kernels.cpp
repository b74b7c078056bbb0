// Every chunk kernel of every instruction set: equal to plain double loops, and bit-equal to the
// scalar table, at odd sizes and odd addresses, without touching a byte outside its range.
#include "../cpu/kernels.h"
#include "testing.h"

using namespace edit_ext;
using cpu::Kernels;
using testing::near;
using testing::same_bits;

namespace {

const int kSizes[] = {0, 1, 3, 31, 127, 128, 129, 1023, 8191, 8192, 8193, 20000, 65536};
constexpr int kGuard = 32;  // bytes on either side that must stay as they were

std::mt19937 randomness(11);

std::vector<float> floats(int n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> x(n);
  for (float& v : x) v = normal(randomness);
  return x;
}

// n elements of a type at an odd place: `offset` elements behind a guard.
template <class T>
struct Guarded {
  std::vector<char> bytes;
  T* data;
  size_t n;
  Guarded(int size, int offset) : bytes(2 * kGuard + 64 + (size + offset) * sizeof(T), 0x5a) {
    auto address = reinterpret_cast<uintptr_t>(bytes.data()) + kGuard;
    address = (address + 63) / 64 * 64;
    data = reinterpret_cast<T*>(address) + offset;
    n = size;
  }
  bool intact() const {
    const auto* first = reinterpret_cast<const char*>(data);
    const auto* last = reinterpret_cast<const char*>(data + n);
    for (const char* p = bytes.data(); p < bytes.data() + bytes.size(); ++p) {
      if ((p < first || p >= last) && *p != 0x5a) return false;
    }
    return true;
  }
  std::vector<T> copy() const { return std::vector<T>(data, data + n); }
};

bool operator==(bf16 a, bf16 b) { return a.bits == b.bits; }
bool operator==(f16 a, f16 b) { return a.bits == b.bits; }

template <class T, class W>
struct Begin {
  float sum;
  std::vector<W> send;
};

template <class T, class W>
Begin<T, W> run_begin(const Kernels& k, DType type, Wire wire, const std::vector<float>& anchor,
                      const std::vector<float>& param, int offset, bool stream) {
  const int n = static_cast<int>(anchor.size());
  Guarded<T> p(n, offset);
  Guarded<W> send(n, offset % 3);
  for (int i = 0; i < n; ++i) p.data[i] = from_float<T>(param[i]);
  const float sum = k.pseudo_grad(n, anchor.data(), type, p.data, wire, send.data, stream);
  CHECK(send.intact());
  return {sum, send.copy()};
}

template <class T, class W>
void pseudo_grad_of(DType type, Wire wire) {
  for (int n : kSizes) {
    const std::vector<float> anchor = floats(n), param = floats(n);
    double sum = 0.0;
    std::vector<W> want(n);
    for (int i = 0; i < n; ++i) {
      const float rounded = to_float(from_float<T>(anchor[i]));
      const float g = rounded - to_float(from_float<T>(param[i]));
      want[i] = from_float<W>(g);
      sum += static_cast<double>(g) * g;
    }
    const auto scalar =
        run_begin<T, W>(*cpu::scalar_kernels(), type, wire, anchor, param, 0, false);
    CHECK(same_bits(scalar.send, want));
    CHECK(near(scalar.sum, sum, 2e-6));
    for (const Kernels* const* k = cpu::runnable_kernels(); *k; ++k) {
      for (int offset = 0; offset < 8; ++offset) {
        const auto got = run_begin<T, W>(**k, type, wire, anchor, param, offset, offset % 2 == 0);
        CHECK(same_bits(got.send, want));
        CHECK(bits_of(got.sum) == bits_of(scalar.sum));
      }
    }
  }
}

// A replica of weight zero holds NaN; without one, the kernels for 2, 4 and 8 take over.
template <class W>
void merge_of(Wire wire, const std::vector<float>& weights) {
  for (int n : kSizes) {
    const int replicas = static_cast<int>(weights.size());
    std::vector<std::vector<W>> pieces(replicas);
    for (int r = 0; r < replicas; ++r) {
      for (float x : floats(n)) pieces[r].push_back(from_float<W>(weights[r] == 0.0f ? NAN : x));
    }
    std::vector<const void*> at;
    for (const auto& piece : pieces) at.push_back(piece.data());
    std::vector<float> first;
    float first_sum = 0.0f;
    for (const Kernels* const* k = cpu::runnable_kernels(); *k; ++k) {
      Guarded<float> merged(n, 1);
      const float sum =
          (*k)->merge(n, replicas, wire, at.data(), weights.data(), merged.data, true);
      CHECK(merged.intact());
      if (k == cpu::runnable_kernels()) {
        first = merged.copy();
        first_sum = sum;
        for (int i = 0; i < n; ++i) {
          double want = 0.0;
          for (int r = 0; r < replicas; ++r) {
            if (weights[r] != 0.0f)
              want += static_cast<double>(weights[r]) * to_float(pieces[r][i]);
          }
          CHECK(near(first[i], want, 1e-6));
        }
      }
      CHECK(same_bits(merged.copy(), first) && bits_of(sum) == bits_of(first_sum));
    }
  }
}

template <class W>
void outer_and_back(Wire wire, OuterStep o, bool late = false, float keep = 0.0f) {
  for (int n : kSizes) {
    const std::vector<float> merged = floats(n), anchor = floats(n), momentum = floats(n);
    const std::vector<float> local = floats(n);
    const bool steps_back = late || wire != Wire::f32;
    std::vector<float> first_anchor, first_momentum;
    std::vector<f16> first_param;
    for (const Kernels* const* k = cpu::runnable_kernels(); *k; ++k) {
      std::vector<float> a = anchor, m = momentum;
      std::vector<W> step(n);
      (*k)->outer_step(n, o, Wire::f32, merged.data(), a.data(), m.data(), wire,
                       steps_back ? step.data() : nullptr);
      Guarded<f16> param(n, 3);
      for (int i = 0; i < n; ++i) param.data[i] = from_float<f16>(local[i]);
      (*k)->write_back(n, a.data(), wire, steps_back ? step.data() : nullptr, keep, DType::f16,
                       param.data, false);
      CHECK(param.intact());
      if (k == cpu::runnable_kernels()) {
        first_anchor = a;
        first_momentum = m;
        first_param = param.copy();
        for (int i = 0; i < n; ++i) {
          const double g = static_cast<double>(o.clip) * merged[i];
          double buf = o.replace ? 0.0 : o.momentum * static_cast<double>(momentum[i]) + g;
          if (o.limit > 0.0f) buf = std::max(std::min<double>(buf, o.limit), -1.0 * o.limit);
          const double s = o.replace ? g : o.lr * (o.nesterov ? g + o.momentum * buf : buf);
          CHECK(near(a[i], anchor[i] - s, wire != Wire::f32 ? 1e-2 : 1e-6));
          if (!o.replace) CHECK(near(m[i], buf, 1e-6));
          const float own = to_float(from_float<f16>(local[i]));
          const float mixed = keep == 0.0f ? a[i] : keep * own + (1.0f - keep) * a[i];
          CHECK(param.data[i] == from_float<f16>(mixed));
        }
      }
      CHECK(same_bits(a, first_anchor) && same_bits(m, first_momentum));
      CHECK(same_bits(param.copy(), first_param));
    }
  }
}

void stacked(int replicas) {
  const OuterStep o{0.7f, 0.8f, 1.0f, 0.0f, true, false};
  for (int n : kSizes) {
    std::vector<std::vector<float>> params;
    for (int r = 0; r < replicas; ++r) params.push_back(floats(n));
    const std::vector<float> anchor = floats(n), momentum = floats(n);
    const std::vector<float> weights(replicas, 1.0f / static_cast<float>(replicas));
    const int pairs = replicas * (replicas + 1) / 2;
    std::vector<float> first_gram, first_anchor;
    for (const Kernels* const* k = cpu::runnable_kernels(); *k; ++k) {
      auto p = params;
      std::vector<float*> at;
      for (auto& x : p) at.push_back(x.data());
      std::vector<float> gram(pairs), a = anchor, m = momentum;
      (*k)->gram(n, replicas, a.data(), at.data(), gram.data());
      (*k)->stacked_step(n, replicas, o, weights.data(), a.data(), m.data(), at.data(), true);
      if (k == cpu::runnable_kernels()) {
        first_gram = gram;
        first_anchor = a;
        for (int i = 0, pair = 0; i < replicas; ++i) {
          for (int j = i; j < replicas; ++j, ++pair) {
            double want = 0.0, reach = 0.0;
            for (int e = 0; e < n; ++e) {
              const double x =
                  static_cast<double>(anchor[e] - params[i][e]) * (anchor[e] - params[j][e]);
              want += x;
              reach += std::fabs(x);
            }
            CHECK(std::fabs(gram[pair] - want) <= 1e-6 * (reach + 1.0));
          }
        }
      }
      CHECK(same_bits(gram, first_gram) && same_bits(a, first_anchor));
      for (int r = 0; r < replicas; ++r) CHECK(same_bits(p[r], a));
    }
  }
}

template <class T>
void conversions() {
  for (uint32_t u = 0; u < 0x10000; ++u) {
    const T x{static_cast<uint16_t>(u)};
    const T back = from_float<T>(to_float(x));
    // Exact both ways, except that a signalling NaN comes back quiet.
    CHECK(back == x || (to_float(x) != to_float(x) && to_float(back) != to_float(back)));
  }
  CHECK(from_float<f16>(65519.99f).bits == 0x7bff && from_float<f16>(65520.0f).bits == 0x7c00);
  CHECK(from_float<f16>(2.98e-8f).bits == 0 && from_float<f16>(2.99e-8f).bits == 1);
  CHECK(from_float<bf16>(1.00390625f).bits == 0x3f80);  // a tie goes to even
  CHECK(from_float<bf16>(1.01171875f).bits == 0x3f82);
}

// All 32-bit patterns in steps of a prime, in the vectors' conversions against the scalar ones.
template <class T>
void vector_conversions(DType type) {
  constexpr int n = 65536;
  std::vector<float> anchor(n), zero(n, 0.0f);
  for (uint32_t start = 0; start < 16; ++start) {
    for (int i = 0; i < n; ++i) anchor[i] = float_of(start * 0x10000003u + i * 4093u);
    std::vector<T> want(n);
    for (int i = 0; i < n; ++i) want[i] = from_float<T>(anchor[i]);
    for (const Kernels* const* k = cpu::runnable_kernels(); *k; ++k) {
      std::vector<T> param(n);
      (*k)->write_back(n, anchor.data(), Wire::f32, nullptr, 0.0f, type, param.data(), false);
      CHECK(same_bits(param, want));
    }
  }
}

}  // namespace

int main() {
  pseudo_grad_of<float, float>(DType::f32, Wire::f32);
  pseudo_grad_of<float, bf16>(DType::f32, Wire::bf16);
  pseudo_grad_of<bf16, float>(DType::bf16, Wire::f32);
  pseudo_grad_of<bf16, bf16>(DType::bf16, Wire::bf16);
  pseudo_grad_of<f16, float>(DType::f16, Wire::f32);
  pseudo_grad_of<f16, bf16>(DType::f16, Wire::bf16);
  for (const std::vector<float>& weights : {std::vector<float>{0.5f, 0.0f, 0.3f, 0.2f},
                                            {1.0f},
                                            {0.25f, 0.75f},
                                            {0.5f, 0.25f, 0.25f},
                                            {0.1f, 0.2f, 0.3f, 0.4f},
                                            std::vector<float>(8, 0.125f)}) {
    merge_of<float>(Wire::f32, weights);
    merge_of<bf16>(Wire::bf16, weights);
  }
  for (bool nesterov : {false, true}) {
    for (float limit : {0.0f, 0.25f}) {
      outer_and_back<float>(Wire::f32, {0.7f, 0.8f, 0.5f, limit, nesterov, false});
      outer_and_back<bf16>(Wire::bf16, {0.7f, 0.8f, 0.5f, limit, nesterov, false});
      outer_and_back<float>(Wire::f32, {0.7f, 0.8f, 0.5f, limit, nesterov, false}, true, 0.3f);
      outer_and_back<bf16>(Wire::bf16, {0.7f, 0.8f, 0.5f, limit, nesterov, false}, true, 1.0f);
    }
  }
  outer_and_back<float>(Wire::f32, {1.0f, 0.0f, 1.0f, 0.0f, false, true});
  for (int replicas : {1, 2, 3, 4, 5, 8}) stacked(replicas);
  conversions<bf16>();
  conversions<f16>();
  vector_conversions<bf16>(DType::bf16);
  vector_conversions<f16>(DType::f16);
  return testing::close("test_kernels");
}
