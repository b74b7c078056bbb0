// The table of kernels for one vector type: dispatch on parameter type and wire, then the chunk
// bodies of core. Included by one source file per instruction set.
#pragma once

#include "kernels.h"
#include "team.h"

namespace edit_ext::cpu {
namespace {

template <class F>
auto with_type(DType type, F f) {
  switch (type) {
    case DType::bf16:
      return f(bf16{});
    case DType::f16:
      return f(f16{});
    default:
      return f(float{});
  }
}

template <class F>
auto with_wire(Wire wire, F f) {
  return wire == Wire::bf16 ? f(bf16{}) : f(float{});
}

template <class V>
struct Table {
  static float pseudo_grad(int n, const float* anchor, DType type, const void* param, Wire wire,
                           void* send, bool stream) {
    return with_type(type, [=](auto t) {
      return with_wire(wire, [=](auto w) {
        using T = decltype(t);
        using W = decltype(w);
        return edit_ext::pseudo_grad<T, W>(Team<V>{stream}, n, anchor, static_cast<const T*>(param),
                                           static_cast<W*>(send));
      });
    });
  }

  static float merge(int n, int replicas, Wire wire, const void* const* pieces,
                     const float* weights, float* merged, bool stream) {
    bool all = true;
    for (int r = 0; r < replicas; ++r) all = all && weights[r] != 0.0f;
    return with_wire(wire, [=](auto w) {
      using W = decltype(w);
      const Team<V> team{stream};
      const auto* from = reinterpret_cast<const W* const*>(pieces);
      if (all && replicas == 2) {
        return edit_ext::merge<2>(team, n, replicas, from, weights, merged);
      }
      if (all && replicas == 4) {
        return edit_ext::merge<4>(team, n, replicas, from, weights, merged);
      }
      if (all && replicas == 8) {
        return edit_ext::merge<8>(team, n, replicas, from, weights, merged);
      }
      return edit_ext::merge<0>(team, n, replicas, from, weights, merged);
    });
  }

  static void outer_step(int n, OuterStep o, Wire from, const void* merged, float* anchor,
                         float* momentum, Wire wire, void* step) {
    with_wire(from, [=](auto f) {
      with_wire(wire, [=](auto w) {
        using M = decltype(f);
        using W = decltype(w);
        edit_ext::outer_step<M, W>(Team<V>{false}, n, o, static_cast<const M*>(merged), anchor,
                                   momentum, static_cast<W*>(step));
      });
    });
  }

  static float square_sum(int n, const float* values) {
    return edit_ext::square_sum(Team<V>{false}, n, values);
  }

  static void write_back(int n, float* anchor, Wire wire, const void* step, float keep, DType type,
                         void* param, bool stream) {
    with_type(type, [=](auto t) {
      with_wire(wire, [=](auto w) {
        using T = decltype(t);
        using W = decltype(w);
        const auto* steps = static_cast<const W*>(step);
        auto* params = static_cast<T*>(param);
        if (keep == 0.0f) {
          edit_ext::write_back<false>(Team<V>{stream}, n, anchor, steps, keep, params);
        } else {
          edit_ext::write_back<true>(Team<V>{stream}, n, anchor, steps, keep, params);
        }
      });
    });
  }

  template <int R>
  static void gram_of(int n, int replicas, const float* anchor, const float* const* params,
                      float* out) {
    if constexpr (R > kMaxStacked) {
      (void)n, (void)replicas, (void)anchor, (void)params, (void)out;
    } else if (replicas == R) {
      edit_ext::gram<R>(Team<V>{false}, n, anchor, params, out);
    } else {
      gram_of<R + 1>(n, replicas, anchor, params, out);
    }
  }
  static void gram(int n, int replicas, const float* anchor, const float* const* params,
                   float* out) {
    gram_of<1>(n, replicas, anchor, params, out);
  }

  static float stacked_norm(int n, int replicas, const float* weights, const float* anchor,
                            const float* const* params) {
    return edit_ext::stacked_norm(Team<V>{false}, n, replicas, weights, anchor, params);
  }

  static void stacked_step(int n, int replicas, OuterStep o, const float* weights, float* anchor,
                           float* momentum, float* const* params, bool stream) {
    edit_ext::stacked_step(Team<V>{stream}, n, replicas, o, weights, anchor, momentum, params);
  }

  static float stream(int kind, int n, const float* a, const float* b, float* out) {
    const Team<V> team{true};
    if (kind == 0) team.map(n, [=](auto v, int j) { team.put(out + j, decltype(v)::load(a + j)); });
    if (kind == 1) {
      team.map(n, [=](auto v, int j) {
        using U = decltype(v);
        team.put(out + j, U::load(a + j) + U::all(2.0f) * U::load(b + j));
      });
    }
    if (kind != 2) return 0.0f;
    return team.sum_squares(n, [=](auto v, int j) { return decltype(v)::load(a + j); });
  }

  static const Kernels* make(const char* name) {
    static const Kernels table{name,       pseudo_grad, merge,        outer_step,   square_sum,
                               write_back, gram,        stacked_norm, stacked_step, stream};
    return &table;
  }
};

}  // namespace
}  // namespace edit_ext::cpu
