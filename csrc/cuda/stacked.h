// All replicas on one device: a sync in two passes over memory or in one, nothing read back.
#pragma once

#include <vector>

#include "on_chip.h"

namespace edit_ext::cuda {

// Steps 1, 5, 7 and 9 of all replicas. 12 R + 20 bytes a parameter in five launches, and on chip
// 8 R + 16 in one; `plan` is what on_chip() says, and {} asks for the passes. Same bits.
void stacked_sync(const std::vector<StackedTensor>& tensors, void* table, const StackedView& v,
                  const OnChip& plan, const Policy& p, cudaStream_t stream);

}  // namespace edit_ext::cuda
