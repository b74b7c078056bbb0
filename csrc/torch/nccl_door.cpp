#include "nccl_door.h"

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>

#include "../comm/nccl.h"

namespace edit_ext {
namespace {

#if defined(EDIT_EXT_EMULATED)
// One that a test has loaded: a real NCCL would take the emulator's addresses for a GPU's.
constexpr const char* kLibrary = "libnccl_emulated.so";
#else
constexpr const char* kLibrary = "";  // torch's, or the machine's
#endif

[[maybe_unused]] void look_around(const Check& check) {
  const pybind11::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  if (check) check();
}

}  // namespace

std::string nccl_version() { return NcclLibrary::load(kLibrary)->version_text(); }

std::string nccl_unique_id() {
  const nccl::UniqueId id = NcclLibrary::load(kLibrary)->unique_id();
  return {id.bytes, sizeof(id.bytes)};
}

std::shared_ptr<Comm> make_nccl_comm(const std::string& id, int rank, int size,
                                     const std::shared_ptr<Lane>& lane, double timeout,
                                     int max_ctas, const std::string& group, const Check& check) {
  nccl::UniqueId unique;
  TORCH_CHECK_VALUE(id.size() == sizeof(unique.bytes), "id has ", id.size(), " bytes; expected ",
                    sizeof(unique.bytes));
  std::memcpy(unique.bytes, id.data(), id.size());
#if defined(EDIT_EXT_CUDA)
  if (const auto* cuda = dynamic_cast<const CudaLane*>(lane.get()); cuda && cuda->direct()) {
    const c10::DeviceGuard guard(cuda->device());
    NcclOptions options;
    options.group = group;
    options.max_ctas = max_ctas;
    options.init_timeout = timeout;
    // A slow peer is waited for, as in C10dComm: the heartbeat tells it from a dead one and aborts.
    options.call_timeout = 1e6;
    // Later on it is the heartbeat's own thread that ends a wait, by an abort.
    const auto joining = std::make_shared<std::atomic<bool>>(true);
    options.poll_signals = [check, joining] { look_around(*joining ? check : Check()); };
    auto comm = std::make_shared<NcclComm>(NcclLibrary::load(kLibrary), unique, rank, size, options,
                                           cuda->stream());
    *joining = false;
    return comm;
  }
#endif
  (void)rank, (void)size, (void)lane, (void)timeout, (void)max_ctas, (void)group, (void)check;
  TORCH_CHECK_VALUE(false, "lane is not a direct lane of a CUDA device");
}

void abort_all(const std::vector<std::shared_ptr<Comm>>& comms, const std::string& reason) {
  std::vector<NcclComm*> together;
  for (const auto& comm : comms) {
    if (auto* nccl = dynamic_cast<NcclComm*>(comm.get())) {
      together.push_back(nccl);
    } else {
      comm->abort(reason);
    }
  }
  NcclComm::abort_all(together, reason);
}

}  // namespace edit_ext
