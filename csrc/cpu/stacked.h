// All replicas on one CPU: a sync in two passes over memory.
#pragma once

#include <vector>

#include "../core/stacked.h"
#include "device.h"

namespace edit_ext::cpu {

// Steps 1, 5, 7 and 9 of all replicas. 12 R + 20 bytes a parameter.
void stacked_sync(const CpuDevice& device, const std::vector<StackedTensor>& tensors,
                  const StackedView& v, const Policy& p);

}  // namespace edit_ext::cpu
