// Birth and ends of a NcclComm: init, abort, close.
#include <unistd.h>

#include <future>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "nccl.h"
#include "nccl_wait.h"

namespace edit_ext {

namespace {

// How long an abort lets a call that is inside the library come out first.
constexpr double kGraceSeconds = 1.0;

// Runs work() for at most that long, then goes on without it. ncclCommAbort joins the library's
// proxy threads, and one of them may sit in poll() for good (NVIDIA/nccl issue 1777).
void bounded(double seconds, std::function<void()> work) {
  const auto done = std::make_shared<std::promise<void>>();
  std::thread thread;
  try {
    thread = std::thread([done, work = std::move(work)] {
      work();
      done->set_value();
    });
  } catch (const std::system_error&) {
    return;  // no thread to be had; what work() would free stays, since it may block and we may not
  }
  const std::chrono::duration<double> limit(seconds);
  if (done->get_future().wait_for(limit) == std::future_status::ready) {
    thread.join();
  } else {
    thread.detach();
  }
}

}  // namespace

NcclComm::NcclComm(std::shared_ptr<const NcclLibrary> library, const nccl::UniqueId& id, int rank,
                   int size, NcclOptions options, nccl::Stream stream)
    : library_(std::move(library)),
      rank_(rank),
      size_(size),
      options_(std::move(options)),
      stream_(stream),
      process_(getpid()) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw std::invalid_argument(where() + ": the rank must be in [0, size)");
  }
  if (size > 1) {
    if (!library_) throw std::invalid_argument(where() + ": no library given");
    nccl::Config config;
    config.blocking = 0;
    if (options_.max_ctas > 0) config.max_ctas = options_.max_ctas;
    handle_ = std::make_shared<nccl::Communicator>(nullptr);
    try {
      finish("init", library_->comm_init_rank_config(handle_.get(), size, id, rank, &config),
             options_.init_timeout);
    } catch (...) {
      abort("init failed");
      throw;
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  state_ = State::ready;
}

NcclComm::~NcclComm() { abort("destroyed without close"); }

// Ends the object and hands out the communicator, to be freed by whoever asked first.
NcclComm::Handle NcclComm::retire(State state, const std::string& reason) {
  if (process_ != getpid()) return nullptr;  // a child's copy: the parent still uses the group
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::aborted || (state_ == State::closed && !handle_)) return nullptr;
  reason_ = state_ == State::failed ? reason + ", after: " + reason_ : reason;
  state_ = state;
  aborting_ = state == State::aborted && handle_ && *handle_;
  return std::exchange(handle_, nullptr);
}

void NcclComm::abort(const std::string& reason) { abort_all({this}, reason); }

void NcclComm::abort_all(const std::vector<NcclComm*>& comms, const std::string& reason) {
  std::vector<Handle> handles;
  std::vector<NcclComm*> owners;
  for (NcclComm* comm : comms) {
    Handle handle = comm ? comm->retire(State::aborted, reason) : nullptr;
    if (!handle || !*handle) continue;
    handles.push_back(std::move(handle));
    owners.push_back(comm);
  }
  if (handles.empty()) return;
  // No call can begin any more, so one that is inside the library comes out soon. If it does not,
  // it is stuck, and the abort is what frees it: since 2.19 that may come from another thread.
  const nccl::Clock::time_point start = nccl::Clock::now();
  for (NcclComm* comm : owners) {
    std::unique_lock<std::mutex> one(comm->calling_, std::try_to_lock);
    while (!one.owns_lock() && nccl::since(start) < kGraceSeconds) {
      nccl::pause(1.0);
      (void)one.try_lock();
    }
  }
  const std::shared_ptr<const NcclLibrary> library = owners[0]->library_;
  const auto work = [library, handles] {
    if (handles.size() > 1) library->group_start();
    for (const Handle& handle : handles) library->comm_abort(*handle);
    if (handles.size() > 1) library->group_end();
  };
  bounded(owners[0]->options_.abort_timeout, work);
  for (NcclComm* comm : owners) comm->aborting_ = false;
}

bool NcclComm::close(double seconds) {
  bool orderly = false;
  if (process_ != getpid()) return false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::closed) return true;
    orderly = state_ == State::ready;
    if (orderly) state_ = State::closed;  // no call begins from here on
  }
  if (orderly && size_ == 1) return true;
  const nccl::Clock::time_point start = nccl::Clock::now();
  nccl::Result result = orderly ? nccl::kInProgress : nccl::kInternalError;
  for (bool asked = false; result == nccl::kInProgress && nccl::since(start) < seconds;) {
    if (asked) nccl::pause(nccl::since(start));
    // Never behind another thread's call: it may be stuck inside the library, and only the abort
    // below gets it out.
    std::unique_lock<std::mutex> one(calling_, std::try_to_lock);
    if (!one.owns_lock()) {
      nccl::pause(1.0);
      continue;
    }
    Handle handle;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      handle = handle_;
    }
    if (!handle) return false;  // aborted meanwhile
    if (!std::exchange(asked, true)) {
      result = library_->comm_finalize(*handle);
    } else if (library_->comm_get_async_error(*handle, &result) != nccl::kSuccess) {
      result = nccl::kInternalError;
    }
  }
  if (result != nccl::kSuccess) {
    abort(!orderly                      ? "closed"
          : result == nccl::kInProgress ? "not closed in " + nccl::seconds_text(seconds)
                                        : "close failed: " + library_->error_text(result));
    return false;
  }
  const Handle handle = retire(State::closed, "");
  if (!handle) return false;
  // After a finished finalize this frees memory and threads of this rank and waits for nobody.
  bounded(options_.abort_timeout, [library = library_, handle] { library->comm_destroy(*handle); });
  return true;
}

}  // namespace edit_ext
