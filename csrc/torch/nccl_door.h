// NCCL as Python sees it: a version, an id for a new group, and a Comm on the side stream of a
// lane.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../core/comm.h"
#include "lane.h"

namespace edit_ext {

using Check = std::function<void()>;

// "2.27.7"; throws std::runtime_error, one sentence, when the library is absent or too old.
std::string nccl_version();
// 128 bytes, made by one rank and handed to the others.
std::string nccl_unique_id();
// Collective over the `size` ranks that pass this id. lane: direct, see CudaLane. timeout: seconds
// for all to come; calls wait until an abort or Ctrl-C ends them. max_ctas: SMs that an exchange
// may take, 0: the library's choice. group: its name in messages. Called without the interpreter
// lock. check: called now and then until all have come; what it throws ends that wait.
std::shared_ptr<Comm> make_nccl_comm(const std::string& id, int rank, int size,
                                     const std::shared_ptr<Lane>& lane, double timeout,
                                     int max_ctas, const std::string& group, const Check& check);
// Aborts all of them, those of NCCL in one group: one at a time, the first could wait for the
// others. Called without the interpreter lock.
void abort_all(const std::vector<std::shared_ptr<Comm>>& comms, const std::string& reason);

}  // namespace edit_ext
