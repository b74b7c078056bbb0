// Every decision of a sync as pure functions of gathered numbers: who is flagged, what weight each
// replica gets, how far the merged step is clipped, whether the layer is skipped.
// EDiT, arXiv 2412.07210, section 3.3 and Algorithm 2.
//
// Each rank sees all R norms, keeps all R detectors and must come to the same bits as its peers.
// So: fp64, only + - * / and sqrt (which IEEE 754 fixes), no contraction (-ffp-contract=off,
// -fmad=false), exp by our own series, powers by repeated multiplication.
#pragma once

#include <cmath>
#include <cstdint>

#include "base.h"
#include "dtype.h"

namespace edit_ext {

enum class Weighting : int32_t { softmax = 0, uniform = 1, steps = 2 };
enum class Outer : int32_t { sgd = 0, replace = 1 };

struct Policy {
  Outer outer = Outer::sgd;
  Weighting weighting = Weighting::softmax;
  double outer_lr = 0.7;
  double outer_momentum = 0.8;
  int32_t nesterov = 1;
  int32_t ema_warmup = 10;          // syncs before anything is flagged by the z-test
  int32_t max_flags_in_a_row = 10;  // then a finite norm is accepted as the new normal
  int32_t z_test = 1;               // 0: only non-finite norms are flagged
  double z_threshold = 3.0;
  double ema_alpha = 0.02;
  double temperature = 1.0;
  double clip_norm = 10.0;  // <= 0: no clipping
  double clip_value = 0.0;  // of each element of the outer momentum (CO2); <= 0: no clipping
  double staleness = 1.0;   // divides the merged step (CO2)
  double gap_scale = 0.0;   // > 0: 1 + |last outer step| / gap_scale divides it instead
  int64_t min_steps = 0;    // of all replicas together, else the sync is void
};

// Statistics of one replica in one layer, as checkpointed: mean and variance of the raw EMA
// recursion (zero start, no bias correction), the norms fed, and the current run of flags.
struct Detector {
  double mean, var, count, flags_in_a_row, nonfinite_in_a_row;
};

// What every replica tells the others about one layer before a payload is merged.
struct NormRecord {
  double norm2;  // square of the norm of its pseudo-gradient over the whole layer
  int64_t sync_index, steps, done;
};

// What every rank of the mesh tells the others after merging its piece.
struct MergeRecord {
  double norm2;  // square of the norm of its merged piece
  uint64_t hash;
};

enum Status : int32_t {
  kOk = 0,
  kWrongSync = 1,  // replicas are at different syncs
  kDisagree = 2,   // ranks came to different decisions
  kNonFinite = 4,  // one replica stays non-finite
};

// What a layer does instead of its outer step.
enum Skip : int32_t {
  kNoSkip = 0,
  kReturn = 1,  // parameters go back to the anchor
  kVoid = 2,    // nothing changes: parameters, anchor, momentum and detectors stay as they are
};

// The scalars of one layer in flight. They live on the device; the host copies them out when the
// sync is over, never between its steps.
struct Decision {
  int32_t status, skip;  // of Status, of Skip
  int32_t culprit;       // replica that kNonFinite means
  int32_t accepted;
  double clip, merged_norm;
  double staleness;  // what the merged step is divided by
  uint64_t hash;
};

struct PerReplica {
  float weight;
  int32_t flagged, idle;
  double norm;
};

// e^x for x <= 0 by x = k ln 2 + r and the series of e^r, |r| <= ln 2 / 2 (error below 2^-52).
EDIT_HD double exp_nonpositive(double x) {
  if (!(x > -700.0)) return 0.0;
  const int k = static_cast<int>(x * 1.4426950408889634 - 0.5);
  const double r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
  double sum = 1.0, term = 1.0;
  for (int i = 1; i <= 16; ++i) {
    term = term * r / i;
    sum = sum + term;
  }
  double scale = 1.0, base = 0.5;
  for (int e = -k; e > 0; e >>= 1, base *= base) {
    if (e & 1) scale *= base;
  }
  return sum * scale;
}

EDIT_HD double power(double x, int64_t n) {
  double y = 1.0;
  for (; n > 0; n >>= 1, x *= x) {
    if (n & 1) y *= x;
  }
  return y;
}

EDIT_HD void feed(Detector& d, double norm, double alpha) {
  d.mean = alpha * norm + (1.0 - alpha) * d.mean;
  const double e = norm - d.mean;
  d.var = (1.0 - alpha) * d.var + alpha * e * e;
  d.count += 1.0;
}

// Eq. 1, one-sided. The stored recursion starts at zero; what is compared is its exact
// bias-corrected reading, and `threshold` is read as a Gaussian tail: with few norms seen it
// becomes the Student quantile (Cornish-Fisher) of a new draw, so the rate of false flags is
// that tail from the first sync on. sigma is held at 1 % of the mean or more: steady norms must
// not turn a ripple into an outlier.
EDIT_HD bool is_outlier(const Detector& d, double norm, double threshold, double alpha) {
  const double decay = power(1.0 - alpha, static_cast<int64_t>(d.count));
  const double q = 1.0 - decay;
  const double mean = d.mean / q;
  const double second = (d.var / (1.0 - alpha) + d.mean * d.mean) / q;
  const double keep = 1.0 - alpha;
  // Sum of squared weights of the normalised EMA: 1 / (effective number of norms).
  const double w2 = alpha * alpha * (1.0 - decay * decay) / (1.0 - keep * keep) / (q * q);
  const double var = (second - mean * mean) / (1.0 - w2);
  double sigma = var > 0.0 ? sqrt(var) : 0.0;
  if (sigma < 0.01 * mean) sigma = 0.01 * mean;
  const double nu = 1.0 / w2 - 1.0, t = threshold, t3 = t * t * t, t5 = t3 * t * t;
  const double quantile =
      t + (t3 + t) / (4.0 * nu) + (5.0 * t5 + 16.0 * t3 + 3.0 * t) / (96.0 * nu * nu);
  return norm - mean > quantile * sigma * sqrt(1.0 + w2);
}

// Flag or accept one replica and bring its detector up to date. Flagged and non-finite norms never
// feed the statistics. Returns true when flagged.
EDIT_HD bool judge(Detector& d, double norm, const Policy& p) {
  if (!finite(norm)) {
    d.nonfinite_in_a_row += 1.0;
    return true;
  }
  // A layer that has never moved has no scale to compare with.
  const bool ready = p.z_test && d.count >= p.ema_warmup && d.mean > 0.0;
  if (ready && is_outlier(d, norm, p.z_threshold, p.ema_alpha)) {
    if (d.flags_in_a_row < p.max_flags_in_a_row) {
      d.flags_in_a_row += 1.0;
      d.nonfinite_in_a_row = 0.0;
      return true;
    }
    d = Detector{};  // the level has shifted for good: this norm starts new statistics
  }
  d.flags_in_a_row = d.nonfinite_in_a_row = 0.0;
  feed(d, norm, p.ema_alpha);
  return false;
}

EDIT_HD void mix(uint64_t& hash, uint64_t value) {
  for (int i = 0; i < 8; ++i, value >>= 8) hash = (hash ^ (value & 0xff)) * 0x100000001b3ull;
}

// Step 5, before the merge: flags and weights of all replicas (Eq. 1 and 2) from the gathered
// records. Weights of flagged and idle replicas are exactly 0 and the merge leaves them out by
// selection. No accepted replica: the layer is skipped and every replica returns to the anchor.
// Too few steps in the window of all replicas together (A-EDiT): the sync is void, and
// no detector sees its norms. The sync in which all replicas end is never void: none follows that
// could count its steps.
EDIT_HD void decide(const Policy& p, int replicas, const NormRecord* records, Detector* detectors,
                    PerReplica* out, Decision& d) {
  d.status = kOk;
  d.culprit = -1;
  d.accepted = 0;
  double least = 0.0, total = 0.0;
  int64_t steps = 0;
  bool ended = true;
  for (int r = 0; r < replicas; ++r) {
    steps += records[r].steps;
    ended = ended && records[r].done != 0;
  }
  const bool empty = !ended && steps < p.min_steps;
  for (int r = 0; r < replicas; ++r) {
    const NormRecord& rec = records[r];
    out[r].norm = finite(rec.norm2) ? sqrt(rec.norm2) : rec.norm2;
    out[r].idle = rec.steps == 0;
    out[r].flagged = !empty && !out[r].idle && judge(detectors[r], out[r].norm, p);
    if (rec.sync_index != records[0].sync_index) d.status |= kWrongSync;
    if (detectors[r].nonfinite_in_a_row > p.max_flags_in_a_row) {
      d.status |= kNonFinite;
      d.culprit = r;
    }
    if (!empty && !out[r].flagged && !out[r].idle) {
      if (d.accepted == 0 || out[r].norm < least) least = out[r].norm;
      d.accepted += 1;
      total += static_cast<double>(rec.steps);
    }
  }
  double sum = 0.0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int r = 0; r < replicas; ++r) {
      double w = 0.0;
      if (!empty && !out[r].flagged && !out[r].idle) {
        if (p.weighting == Weighting::uniform) w = 1.0 / d.accepted;
        if (p.weighting == Weighting::steps) w = static_cast<double>(records[r].steps) / total;
        if (p.weighting == Weighting::softmax) {
          w = exp_nonpositive((least - out[r].norm) / p.temperature);
        }
      }
      if (pass == 0) sum += w;
      out[r].weight = w > 0.0 ? static_cast<float>(w / sum) : 0.0f;
    }
  }
  d.skip = empty ? kVoid : d.accepted == 0 ? kReturn : kNoSkip;
  uint64_t hash = 0xcbf29ce484222325ull;
  for (int r = 0; r < replicas; ++r) {
    mix(hash, bits_of(out[r].weight));
    mix(hash, static_cast<uint64_t>(out[r].flagged) << 1 | static_cast<uint64_t>(out[r].idle));
    mix(hash, bits_of(detectors[r].mean));
  }
  mix(hash, static_cast<uint64_t>(records[0].sync_index));
  mix(hash, bits_of(p.outer_lr));
  mix(hash, bits_of(p.outer_momentum));
  mix(hash, bits_of(p.clip_norm));
  mix(hash, bits_of(p.clip_value));
  mix(hash, bits_of(p.staleness));
  mix(hash, bits_of(p.gap_scale));
  mix(hash, static_cast<uint64_t>(p.outer) << 1 | static_cast<uint64_t>(p.nesterov));
  mix(hash, static_cast<uint64_t>(p.min_steps));
  mix(hash, static_cast<uint64_t>(d.skip));
  d.hash = hash;
}

// Step 7, before the outer step: Eq. 4 from the pieces' squared norms, the check that all ranks
// decided alike, and how stale the merged step is. One that is not finite is skipped.
// gaps: square sums of the pieces of the outer momentum, null unless p.gap_scale > 0. The last
// outer step of a heavy ball is outer_lr times its momentum.
EDIT_HD void decide_clip(const Policy& p, int ranks, const MergeRecord* records, const double* gaps,
                         Decision& d) {
  double norm2 = 0.0;
  for (int r = 0; r < ranks; ++r) {
    norm2 += records[r].norm2;
    if (records[r].hash != d.hash) d.status |= kDisagree;
  }
  d.merged_norm = finite(norm2) ? sqrt(norm2) : norm2;
  d.clip = 1.0;
  const bool failed = !finite(norm2) || d.status != kOk;
  if (failed && d.skip != kVoid) d.skip = kReturn;
  if (p.clip_norm > 0.0 && d.merged_norm > 0.0) {
    const double ratio = p.clip_norm / (d.merged_norm + 1e-6);
    if (ratio < 1.0) d.clip = ratio;
  }
  d.staleness = p.staleness;
  if (p.gap_scale > 0.0) {
    double gap2 = 0.0;
    for (int r = 0; r < ranks; ++r) gap2 += gaps[r];
    d.staleness = 1.0 + p.outer_lr * sqrt(gap2) / p.gap_scale;
  }
}

}  // namespace edit_ext
