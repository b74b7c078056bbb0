// A stacked sync of a layer that fits into the shared memory of all processors: one launch, and
// each replica is read once and written once.
#pragma once

#include <vector>

#include "../core/stacked.h"
#include "runtime.h"

namespace edit_ext::cuda {

// How a layer lies on chip. blocks 0: it does not, and the sync goes in passes.
struct OnChip {
  int64_t runs;     // of all tensors
  int32_t blocks;   // one a processor
  int32_t shared;   // bytes of each
  int32_t largest;  // bytes that any layer of as many replicas takes
};

// The choice between the two forms, for the current device: on chip whenever the layer fits. A
// processor holds as many runs (of 2048 elements, the last of a tensor counts as a whole one) as
// its shared memory takes, (R + 1) * 8 KiB + 192 bytes each. Parameters at most, without tails:
//   132 processors of 227 KiB (H100, H200):  R = 2: 2 433 024   4: 1 351 680   8: 811 008
//   108 processors of 163 KiB (A100):        R = 2: 1 327 104   4:   884 736   8: 442 368
// Both forms give the same bits, so the choice is one of time alone.
OnChip on_chip(const std::vector<StackedTensor>& tensors, int replicas);

void on_chip_sync(const std::vector<StackedTensor>& tensors, void* table, const StackedView& v,
                  const OnChip& plan, const Policy& p, cudaStream_t stream);

}  // namespace edit_ext::cuda
