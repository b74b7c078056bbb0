// The tests' build of the CUDA part: its sources as C++ on the emulator, where no nvcc takes them.
#if defined(EDIT_EXT_EMULATED)
#include <torch/library.h>

#include <map>

#include "../cuda/device.cu"
#include "../cuda/on_chip.cu"
#include "../cuda/passes.cu"
#include "../cuda/stacked.cu"
#include "place.h"

namespace edit_ext {
namespace {

// Stream 0 runs at once, the others as the emulator's streams do; each lives as long as the
// process.
void use_stream(int64_t index) {
  static auto* streams = new std::map<int64_t, cudaStream_t>;
  cudaStream_t& found = (*streams)[index];
  if (index != 0 && !found) {
    cuda::check(cudaStreamCreateWithFlags(&found, cudaStreamNonBlocking), "making a stream");
  }
  emu::current_stream = found;
}

void synchronize() { cuda::check(cudaDeviceSynchronize(), "waiting for all streams"); }

int64_t held(bool pinned) { return static_cast<int64_t>(emu::memory().held(pinned)); }

}  // namespace

TORCH_LIBRARY(edit_ext_emulated, m) {
  m.def("use_stream(int index) -> ()", use_stream);
  m.def("synchronize() -> ()", synchronize);
  m.def("copies_up() -> int", [] { return emu::copies_up; });
  m.def("held(bool pinned) -> int", held);
}

}  // namespace edit_ext
#endif
