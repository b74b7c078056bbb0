// The tests' build of the CUDA part: its sources as C++ on the emulator, where no nvcc takes them.
#if defined(EDIT_EXT_EMULATED)
#include "../cuda/device.cu"
#include "../cuda/passes.cu"
#include "../cuda/stacked.cu"
#endif
