#include "kernels_impl.h"

namespace edit_ext::cpu {

const Kernels* scalar_kernels() { return Table<VecScalar>::make("scalar"); }

}  // namespace edit_ext::cpu
