// One table of chunk kernels per instruction set; all tables give the same bits.
#pragma once

#include "../core/chunk.h"
#include "../core/codec.h"
#include "../core/stacked.h"

namespace edit_ext::cpu {

// `stream`: write outputs past the caches. Pays when the layer is far larger than they are.
struct Kernels {
  const char* name;
  float (*pseudo_grad)(int n, const float* anchor, DType type, const void* param, Wire wire,
                       void* send, bool stream);
  float (*merge)(int n, int replicas, Wire wire, const void* const* pieces, const float* weights,
                 float* merged, bool stream);
  // from: the format of merged; wire: of step.
  void (*outer_step)(int n, OuterStep o, Wire from, const void* merged, float* anchor,
                     float* momentum, Wire wire, void* step);
  float (*square_sum)(int n, const float* values);
  void (*write_back)(int n, float* anchor, Wire wire, const void* step, float keep, DType type,
                     void* param, bool stream);
  void (*gram)(int n, int replicas, const float* anchor, const float* const* params, float* out);
  float (*stacked_norm)(int n, int replicas, const float* weights, const float* anchor,
                        const float* const* params);
  void (*stacked_step)(int n, int replicas, OuterStep o, const float* weights, float* anchor,
                       float* momentum, float* const* params, bool stream);
  // Yardstick of the benchmarks: 0 out = a, 1 out = a + 2 b, 2 returns the sum of squares of a.
  float (*stream)(int kind, int n, const float* a, const float* b, float* out);
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();    // null where it was not compiled
const Kernels* avx512_kernels();  // null where it was not compiled

// The best table this machine runs, or the one EDIT_EXT_SIMD names (scalar, avx2, avx512);
// throws std::runtime_error when the named one is unknown or cannot run here.
const Kernels& kernels();
// Tables this machine can run, slowest first; terminated by null.
const Kernels* const* runnable_kernels();

}  // namespace edit_ext::cpu
