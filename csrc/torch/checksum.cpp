#include "checksum.h"

#include <array>
#include <cstring>

#include "../core/policy.h"

namespace edit_ext {

uint64_t checksum(const at::Tensor& t) {
  const at::Tensor dense = t.detach().contiguous().cpu();
  const auto* bytes = static_cast<const unsigned char*>(dense.data_ptr());
  const auto n = static_cast<int64_t>(dense.nbytes());
  // Eight interleaved multiplicative chains over words: memory speed without losing the position.
  // The shift brings high bits down again; without it two flipped signs would cancel.
  std::array<uint64_t, 8> lanes;
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = 0xcbf29ce484222325ull + i;
  int64_t at = 0;
  for (; at + 64 <= n; at += 64) {
    uint64_t words[8];
    std::memcpy(words, bytes + at, 64);
    for (int i = 0; i < 8; ++i) {
      lanes[i] = (lanes[i] ^ words[i]) * 0x9e3779b97f4a7c15ull;
      lanes[i] ^= lanes[i] >> 32;
    }
  }
  uint64_t hash = static_cast<uint64_t>(n);
  for (uint64_t lane : lanes) mix(hash, lane);
  for (; at < n; ++at) mix(hash, bytes[at]);
  return hash;
}

}  // namespace edit_ext
