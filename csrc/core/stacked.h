// Decisions when all replicas lie on one device: norms and the norm of any merged step follow from
// the inner products G of the R pseudo-gradients, so a sync takes two passes over memory.
#pragma once

#include "policy.h"

namespace edit_ext {

constexpr int kMaxStacked = 8;  // replicas that one stacked call takes
constexpr int kMaxPairs = kMaxStacked * (kMaxStacked + 1) / 2;

struct StackedTensor {
  float* data[kMaxStacked];  // of each replica
  int64_t size, offset;      // elements; first element in the flat buffers
  int64_t first_chunk;
  int64_t first_run;
};

// One sync of R stacked replicas; every pointer is memory of their device.
struct StackedView {
  int32_t replicas;
  int64_t num_chunks;
  float* anchor;            // flat
  float* momentum;          // flat
  Detector* detectors;      // [replicas]
  float* partials;          // [chunks * pairs]
  float* run_sums;          // [pairs * runs] where the layer stays on chip
  uint32_t* arrived;        // blocks at the barrier of the grid; zero when a sync begins
  PerReplica* per_replica;  // [replicas]
  float* weights;           // [replicas]
  double* merged2;          // square of the merged norm; -1: the exact pass decides
  Decision* decision;
};

EDIT_HD int64_t runs_of(int64_t size) { return (size + kRun - 1) / kRun; }

EDIT_HD int pairs_of(int replicas) { return replicas * (replicas + 1) / 2; }

// G[i][k] = <g_i, g_k>, i <= k, row by row: place of the diagonal element of row r.
EDIT_HD int diagonal(int replicas, int r) { return r * replicas - r * (r - 1) / 2; }

// Eq. 1 and 2 from the diagonal. gram: [R (R + 1) / 2] fp64.
EDIT_HD void decide_stacked(const Policy& p, int replicas, const double* gram, Detector* detectors,
                            PerReplica* out, Decision& d) {
  NormRecord records[kMaxStacked] = {};
  for (int r = 0; r < replicas; ++r) records[r] = {gram[diagonal(replicas, r)], 0, 1, 0};
  decide(p, replicas, records, detectors, out, d);
}

// Eq. 4 from the square of the merged norm, however it was found.
EDIT_HD void clip_stacked(const Policy& p, double norm2, Decision& d) {
  const MergeRecord merged{norm2, d.hash};
  decide_clip(p, 1, &merged, nullptr, d);
}

// |sum w_i g_i|^2 without a pass over memory: w'Gw. Where the replicas cancel each other almost
// (below 1e-6 of the squared sum of weighted norms) fp32 products no longer resolve it: -1, and
// one exact pass is due.
EDIT_HD double merged_norm2(const double* gram, int replicas, const PerReplica* of) {
  double norm2 = 0.0, reach = 0.0;
  for (int i = 0, p = 0; i < replicas; ++i) {
    if (of[i].weight > 0) reach += of[i].weight * of[i].norm;
    for (int k = i; k < replicas; ++k, ++p) {
      if (of[i].weight == 0 || of[k].weight == 0) continue;
      norm2 += (i == k ? 1.0 : 2.0) * of[i].weight * of[k].weight * gram[p];
    }
  }
  return norm2 < 1e-6 * reach * reach ? -1.0 : norm2;
}

}  // namespace edit_ext
