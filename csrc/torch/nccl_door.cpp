#include "nccl_door.h"

#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "../comm/nccl.h"

namespace edit_ext {
namespace {

[[maybe_unused]] void look_at_signals() {
  const pybind11::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace

std::string nccl_version() { return NcclLibrary::load()->version_text(); }

std::string nccl_unique_id() {
  const nccl::UniqueId id = NcclLibrary::load()->unique_id();
  return {id.bytes, sizeof(id.bytes)};
}

std::shared_ptr<Comm> make_nccl_comm(const std::string& id, int rank, int size,
                                     const std::shared_ptr<Lane>& lane, double timeout,
                                     int max_ctas) {
  nccl::UniqueId unique;
  TORCH_CHECK_VALUE(id.size() == sizeof(unique.bytes), "id has ", id.size(), " bytes; expected ",
                    sizeof(unique.bytes));
  std::memcpy(unique.bytes, id.data(), id.size());
#if defined(EDIT_EXT_CUDA)
  if (const auto* cuda = dynamic_cast<const CudaLane*>(lane.get()); cuda && cuda->direct()) {
    const c10::DeviceGuard guard(cuda->device());
    NcclOptions options;
    options.group = "replica group";
    options.max_ctas = max_ctas;
    options.init_timeout = options.call_timeout = timeout;
    options.poll_signals = look_at_signals;
    return std::make_shared<NcclComm>(NcclLibrary::load(), unique, rank, size, options,
                                      cuda->stream());
  }
#endif
  (void)rank, (void)size, (void)lane, (void)timeout, (void)max_ctas;
  TORCH_CHECK_VALUE(false, "lane is not a direct lane of a CUDA device");
}

}  // namespace edit_ext
