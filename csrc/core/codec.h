// Wire formats: how pseudo-gradients and returned steps travel between replicas. Sums are always
// taken in fp32 by ourselves, after decoding, so a format costs one rounding and not one per hop.
#pragma once

#include "dtype.h"

namespace edit_ext {

// fp32: pieces of the new anchor come back as they are, in place.
// bf16: pieces of the *step* come back encoded, and every rank, the owner too, subtracts the
//       decoded step from its fp32 anchor; so anchors stay bit-identical and never lose bits.
// With replicated momentum pieces of the merged pseudo-gradient come back in either format, and
// every rank takes the outer step of the whole layer itself.
enum class Wire : int32_t { f32 = 0, bf16 = 1 };

EDIT_HD int64_t wire_bytes(Wire wire, int64_t elements) {
  return wire == Wire::f32 ? elements * 4 : elements * 2;
}

}  // namespace edit_ext
