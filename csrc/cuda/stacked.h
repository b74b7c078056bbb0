// All replicas on one device: a sync in two passes over memory, nothing read back.
#pragma once

#include <vector>

#include "../core/stacked.h"
#include "runtime.h"

namespace edit_ext::cuda {

// Steps 1, 5, 7 and 9 of all replicas. 12 R + 20 bytes a parameter.
void stacked_sync(const std::vector<StackedTensor>& tensors, void* table, const StackedView& v,
                  const Policy& p, cudaStream_t stream);

}  // namespace edit_ext::cuda
