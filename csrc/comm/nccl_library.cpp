#include "nccl_library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace edit_ext {

namespace {

// The first version with the whole of nccl::Config. Nothing that we call is newer, so there is one
// set of symbols and no optional one; what a later version adds would be looked up by version here.
constexpr int kOldest = 22700;

std::string dotted(int version) {
  // Up to 2.8 a version was 1000 * major + 100 * minor + patch.
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int rest = version >= 10000 ? version % 10000 : version % 1000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." +
         std::to_string(rest % 100);
}

template <class Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error("the NCCL library " + path + " has no symbol " + name);
}

}  // namespace

std::shared_ptr<const NcclLibrary> NcclLibrary::load(const std::string& path) {
  const std::shared_ptr<NcclLibrary> found(new NcclLibrary);
  NcclLibrary& x = *found;
  x.path_ = path.empty() ? "libnccl.so.2" : path;
  void* library = dlopen(x.path_.c_str(), RTLD_NOW | RTLD_NOLOAD);
  x.was_loaded_ = library != nullptr;
  if (!library) library = dlopen(x.path_.c_str(), RTLD_NOW);
  if (!library) {
    const char* why = dlerror();
    throw std::runtime_error("no NCCL library: " + std::string(why ? why : x.path_));
  }
  nccl::GetVersion get_version = nullptr;
  find(library, x.path_, "ncclGetVersion", get_version);
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(get_version), &info) && info.dli_fname) {
    x.path_ = info.dli_fname;
  }
  // The version comes before all other symbols: an old library is to be called old, not incomplete.
  if (get_version(&x.version_) != nccl::kSuccess) {
    throw std::runtime_error("the NCCL library " + x.path_ + " does not tell its version");
  }
  if (x.version_ < kOldest) {
    throw std::runtime_error("NCCL " + x.version_text() + " (" + x.path_ +
                             ") is too old: 2.27 or newer is needed");
  }
  find(library, x.path_, "ncclGetUniqueId", x.get_unique_id_);
  find(library, x.path_, "ncclGetErrorString", x.get_error_string_);
  find(library, x.path_, "ncclGetLastError", x.get_last_error_);
  find(library, x.path_, "ncclCommInitRankConfig", x.comm_init_rank_config);
  find(library, x.path_, "ncclCommFinalize", x.comm_finalize);
  find(library, x.path_, "ncclCommDestroy", x.comm_destroy);
  find(library, x.path_, "ncclCommAbort", x.comm_abort);
  find(library, x.path_, "ncclCommGetAsyncError", x.comm_get_async_error);
  find(library, x.path_, "ncclGroupStart", x.group_start);
  find(library, x.path_, "ncclGroupEnd", x.group_end);
  find(library, x.path_, "ncclSend", x.send);
  find(library, x.path_, "ncclRecv", x.recv);
  find(library, x.path_, "ncclAllGather", x.all_gather);
  return found;
}

std::string NcclLibrary::version_text() const { return dotted(version_); }

nccl::UniqueId NcclLibrary::unique_id() const {
  nccl::UniqueId id{};
  const nccl::Result result = get_unique_id_(&id);
  if (result != nccl::kSuccess) {
    throw std::runtime_error("NCCL gave no id for a new group: " + error_text(result));
  }
  return id;
}

std::string NcclLibrary::error_text(nccl::Result result) const {
  const char* kind = get_error_string_(result);
  const char* last = get_last_error_(nullptr);  // the argument is not looked at
  std::string text = kind ? kind : "result " + std::to_string(result);
  if (last && *last) text += " (" + std::string(last) + ")";
  return text;
}

}  // namespace edit_ext
