// What one team does to one chunk, once for all processors. A team is a CPU thread with vectors of
// some width, or a CUDA block; it offers
//   map(n, f)            calls f(V{}, j) so that every element j < n is covered once;
//   sum_squares(n, f)    the same, and adds up the squares of what f returns by the tree of base.h;
//   put(p, v)            stores v (rounded to *p's type) where nothing will be read again soon.
// V is the team's vector: load, store, arithmetic without contraction.
#pragma once

#include "base.h"
#include "dtype.h"
#include "policy.h"

namespace edit_ext {

// Sums of chunks become one fp64 number by a tree of their own, the same for all processors: lane i
// adds partials i, i + 32, ..., then lanes are folded in halves.
constexpr int kTotalLanes = 32;

template <class F>
EDIT_HD double total_lane(int64_t n, int lane, F partial) {
  double sum = 0.0;
  for (int64_t i = lane; i < n; i += kTotalLanes) sum += static_cast<double>(partial(i));
  return sum;
}
EDIT_HD double total_lane(const float* partials, int64_t n, int64_t stride, int lane) {
  return total_lane(n, lane, [=](int64_t i) { return partials[i * stride]; });
}

// Step 1, Delta of Algorithm 2 with the optimizer's sign: g = round_T(anchor) - param, encoded for
// the wire, and the sum of squares before encoding. The anchor is rounded to the parameter's type
// T first: a 16-bit parameter cannot hold the anchor's low bits, and without the rounding each
// window would undo them.
// anchor, param, send: [n]; returns the sum in fp32 (overflows to inf above |g| of about 1e19,
// which flags the replica).
template <class T, class W, class Team>
EDIT_HD float pseudo_grad(Team team, int n, const float* anchor, const T* param, W* send) {
  return team.sum_squares(n, [=](auto v, int j) {
    using V = decltype(v);
    const V g = V::load(anchor + j).template rounded<T>() - V::load(param + j);
    team.put(send + j, g);
    return g;
  });
}

// Step 5, Eq. 3: merged = sum over r of w_r * g_r, in replica order, fp32. A replica of weight
// zero is not read: 0 * NaN would be NaN. R > 0 promises that there are R replicas, all of them
// accepted; the loop over them then has no branch and keeps R streams going.
// pieces: [replicas] pointers to [n]; merged: [n].
template <int R, class W, class Team>
EDIT_HD float merge(Team team, int n, int replicas, const W* const* pieces, const float* weights,
                    float* merged) {
  const int count = R > 0 ? R : replicas;
  return team.sum_squares(n, [=](auto v, int j) {
    using V = decltype(v);
    V sum = V::all(0.0f);
    EDIT_UNROLL
    for (int r = 0; r < count; ++r) {
      if (R > 0 || weights[r] != 0.0f) sum = sum + V::all(weights[r]) * V::load(pieces[r] + j);
    }
    team.put(merged + j, sum);
    return sum;
  });
}

// Numbers of one outer step, already decided: lr, momentum and clip as fp32.
struct OuterStep {
  float lr, momentum, clip;
  float limit;  // of an element of the momentum; 0: none
  bool nesterov, replace;
};
// The merged values themselves: what it takes to encode them.
constexpr OuterStep kAsItIs = {1.0f, 0.0f, 1.0f, 0.0f, false, true};

// clip: what the merged step is multiplied with, staleness included.
EDIT_HD OuterStep outer_numbers(const Policy& p, double clip) {
  return {static_cast<float>(p.outer_lr),
          static_cast<float>(p.outer_momentum),
          static_cast<float>(clip),
          p.clip_value > 0.0 ? static_cast<float>(p.clip_value) : 0.0f,
          p.nesterov != 0,
          p.outer == Outer::replace};
}
EDIT_HD OuterStep outer_numbers(const Policy& p, const Decision& d) {
  return outer_numbers(p, d.clip / d.staleness);
}

template <class V>
EDIT_HD V outer_direction(const OuterStep& o, V merged, V* momentum) {
  const V g = V::all(o.clip) * merged;
  if (o.replace) return g;
  *momentum = V::all(o.momentum) * *momentum + g;
  if (o.limit > 0.0f) *momentum = momentum->within(o.limit);
  return V::all(o.lr) * (o.nesterov ? g + V::all(o.momentum) * *momentum : *momentum);
}

// Step 7, Eq. 4 and the outer optimizer (torch SGD with dampening 0). On a wire that returns
// steps, `step` receives the encoded step and the anchor is left for write_back; otherwise `step`
// is null and the anchor is stepped in place.
// merged (fp32, or as it came over the wire), anchor, momentum, step: [n]; momentum may be null
// when o.replace, anchor when there is a step.
template <class M, class W, class Team>
EDIT_HD void outer_step(Team team, int n, OuterStep o, const M* merged, float* anchor,
                        float* momentum, W* step) {
  team.map(n, [=](auto v, int j) {
    using V = decltype(v);
    V m = o.replace ? V::all(0.0f) : V::load(momentum + j);
    const V s = outer_direction(o, V::load(merged + j), &m);
    if (!o.replace) m.store(momentum + j);
    if (step) {
      team.put(step + j, s);
    } else {
      (V::load(anchor + j) - s).store(anchor + j);
    }
  });
}

// Between 6 and 7: how far the last outer step went.
template <class Team>
EDIT_HD float square_sum(Team team, int n, const float* values) {
  return team.sum_squares(n, [=](auto v, int j) { return decltype(v)::load(values + j); });
}

// Step 9: where steps came back, anchor -= decoded step; then param <- round_T(anchor), or, if
// Mixed, because the steps since begin are kept in part, round_T(keep param + (1 - keep) anchor).
template <bool Mixed, class T, class W, class Team>
EDIT_HD void write_back(Team team, int n, float* anchor, const W* step, float keep, T* param) {
  team.map(n, [=](auto v, int j) {
    using V = decltype(v);
    V a = V::load(anchor + j);
    if (step) {
      a = a - V::load(step + j);
      a.store(anchor + j);
    }
    if constexpr (Mixed) a = V::all(keep) * V::load(param + j) + V::all(1.0f - keep) * a;
    team.put(param + j, a);
  });
}

// All replicas stacked on one device, pass 1: the inner products G[i][k] of the R pseudo-gradients
// (i <= k, row by row), from which norms, weights and the norm of any merged step follow:
// |sum w_i g_i|^2 = w'Gw.
template <int R, class Team>
EDIT_HD void gram(Team team, int n, const float* anchor, const float* const* params, float* out) {
  team.template sum_products<R>(
      n,
      [=](auto v, int j, auto* g) {
        using V = decltype(v);
        const V a = V::load(anchor + j);
        EDIT_UNROLL
        for (int r = 0; r < R; ++r) g[r] = a - V::load(params[r] + j);
      },
      out);
}

template <class V>
EDIT_HD V stacked_merge(V anchor, int replicas, const float* weights, const float* const* params,
                        int j) {
  V sum = V::all(0.0f);
  for (int r = 0; r < replicas; ++r) {
    if (weights[r] != 0.0f) sum = sum + V::all(weights[r]) * (anchor - V::load(params[r] + j));
  }
  return sum;
}

// Where w'Gw is mostly rounding (see stacked.h): the square sum of the merged step itself.
template <class Team>
EDIT_HD float stacked_norm(Team team, int n, int replicas, const float* weights,
                           const float* anchor, const float* const* params) {
  return team.sum_squares(n, [=](auto v, int j) {
    using V = decltype(v);
    return stacked_merge(V::load(anchor + j), replicas, weights, params, j);
  });
}

// Pass 2: merge, outer step and write-back of all replicas in one go.
template <class Team>
EDIT_HD void stacked_step(Team team, int n, int replicas, OuterStep o, const float* weights,
                          float* anchor, float* momentum, float* const* params) {
  team.map(n, [=](auto v, int j) {
    using V = decltype(v);
    const V a = V::load(anchor + j);
    const V sum = stacked_merge(a, replicas, weights, params, j);
    V m = o.replace ? V::all(0.0f) : V::load(momentum + j);
    const V next = a - outer_direction(o, sum, &m);
    if (!o.replace) m.store(momentum + j);
    next.store(anchor + j);
    for (int r = 0; r < replicas; ++r) team.put(params[r] + j, next);
  });
}

// A run that stays on chip: its anchor, then the R pseudo-gradients, kRun elements apart.
// held: [R + 1][kRun].
template <int R, class Team>
EDIT_HD void hold(Team team, int n, const float* anchor, const float* const* params, float* held) {
  team.map(n, [=](auto v, int j) {
    using V = decltype(v);
    const V a = V::load(anchor + j);
    V g[R];  // all loads before the first store, which might be to where `params` lies
    EDIT_UNROLL
    for (int r = 0; r < R; ++r) g[r] = a - V::load(params[r] + j);
    a.store(held + j);
    EDIT_UNROLL
    for (int r = 0; r < R; ++r) g[r].store(held + (r + 1) * kRun + j);
  });
}

// stacked_step from what was held.
template <int R, class Team>
EDIT_HD void step_held(Team team, int n, OuterStep o, const float* weights, const float* held,
                       float* anchor, float* momentum, float* const* params) {
  team.map(n, [=](auto v, int j) {
    using V = decltype(v);
    V sum = V::all(0.0f);
    EDIT_UNROLL
    for (int r = 0; r < R; ++r) {
      if (weights[r] != 0.0f) sum = sum + V::all(weights[r]) * V::load(held + (r + 1) * kRun + j);
    }
    V m = o.replace ? V::all(0.0f) : V::load(momentum + j);
    const V next = V::load(held + j) - outer_direction(o, sum, &m);
    if (!o.replace) m.store(momentum + j);
    next.store(anchor + j);
    EDIT_UNROLL
    for (int r = 0; r < R; ++r) team.put(params[r] + j, next);
  });
}

}  // namespace edit_ext
