// The NCCL library, found at run time: the one that torch has loaded if there is one, never linked.
#pragma once

#include <memory>
#include <string>

#include "nccl_api.h"

namespace edit_ext {

class NcclLibrary {
 public:
  // Without a path: the libnccl.so.2 that is loaded already, else the one the loader finds. Throws
  // std::runtime_error, one sentence, when it is absent, older than 2.27, or lacks a symbol. The
  // library is never unloaded: torch may hold it too, and so may a thread that an abort left
  // behind.
  static std::shared_ptr<const NcclLibrary> load(const std::string& path = "");

  int version() const { return version_; }           // as NCCL counts: 22707 is 2.27.7
  std::string version_text() const;                  // "2.27.7"
  const std::string& path() const { return path_; }  // the file it came from
  bool was_loaded() const { return was_loaded_; }    // by somebody else, before us

  // A name for a new group: made by one rank, handed to the others by the caller.
  nccl::UniqueId unique_id() const;
  // What the library says of a result, with its last error message if it has one.
  std::string error_text(nccl::Result result) const;

  nccl::CommInitRankConfig comm_init_rank_config = nullptr;
  nccl::CommFinalize comm_finalize = nullptr;
  nccl::CommDestroy comm_destroy = nullptr;
  nccl::CommAbort comm_abort = nullptr;
  nccl::CommGetAsyncError comm_get_async_error = nullptr;
  nccl::GroupStart group_start = nullptr;
  nccl::GroupEnd group_end = nullptr;
  nccl::Send send = nullptr;
  nccl::Recv recv = nullptr;
  nccl::AllGather all_gather = nullptr;

 private:
  NcclLibrary() = default;

  nccl::GetUniqueId get_unique_id_ = nullptr;
  nccl::GetErrorString get_error_string_ = nullptr;
  nccl::GetLastError get_last_error_ = nullptr;
  int version_ = 0;
  std::string path_;
  bool was_loaded_ = false;
};

}  // namespace edit_ext
