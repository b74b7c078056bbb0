// NcclComm: a Comm over an NCCL communicator of our own, on one stream.
//
// All calls take device pointers and only enqueue: when one returns, the library has taken the
// work, and its end is an event on the stream. The owner keeps buffers alive until that event. The
// stream runs all calls of one sync in order, so scalars need no second channel here: step 3 could
// not overtake the payload of an earlier layer in any case.
//
// One thread makes the calls; abort, poll, state may come from any other. A call that an abort ends
// throws once the library has let go of its buffers; after a call that failed by itself, buffers
// are safe when abort returns.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/comm.h"
#include "nccl_library.h"

namespace edit_ext {

struct NcclOptions {
  std::string group = "group";  // in messages: "replica group"
  int max_ctas = 0;             // CTAs (SMs) a collective may take; 0 leaves it to the library
  double init_timeout = 120.0;  // seconds until all members have come
  double call_timeout = 120.0;  // seconds until a call is taken; the first one connects to peers
  double abort_timeout = 4.0;   // seconds an abort may take in the library before it is left alone
  // Called every millisecond of a wait, on the waiting thread; may throw (Ctrl-C), which ends the
  // wait and fails the communicator. The only way to end an init before its time.
  std::function<void()> poll_signals;
};

class NcclComm final : public Comm {
 public:
  // made -> ready -> closed, or failed (an error, a deadline), or aborted from any of them but
  // closed. A failed communicator still holds resources, so that abort_all can free it in one group
  // with its sisters. A group of one is ready at once and never touches the library, which may
  // then be null.
  enum class State { made, ready, failed, aborted, closed };

  // Returns when all `size` members have come with the same id, each with its own CUDA device
  // current; throws std::runtime_error after init_timeout or an error, with nothing left behind.
  NcclComm(std::shared_ptr<const NcclLibrary> library, const nccl::UniqueId& id, int rank, int size,
           NcclOptions options, nccl::Stream stream);
  // Never waits for a peer or for the stream: it aborts what close() has not ended.
  ~NcclComm() override;
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void exchange(const Block* to, const Block* from) override;
  // In place. All of `each` bytes travel, those beyond `total` too: the buffer has room for them by
  // contract, they are fewer than 128 elements a rank (512 bytes), and one collective is what the
  // library can run by NVLink SHARP or copy engines.
  void all_gather(void* buffer, int64_t each, int64_t total) override;
  void gather_scalars(void* buffer, int64_t each) override;
  void abort(const std::string& reason) override;
  void poll() const override;  // an orderly close is nothing to throw about
  // As a ring or pairwise exchange counts: each block once per peer that gets it.
  int64_t bytes_sent() const override { return sent_; }

  // Waits for everything enqueued, here and at the peers, then frees the communicator; aborts it if
  // that is not to be. Never throws.
  bool close(double seconds) override;
  State state() const;

  // Aborts all in one NCCL group: one after the other can deadlock, each waiting for a kernel that
  // waits for a kernel of the next. All of one library; null and ended ones are skipped.
  static void abort_all(const std::vector<NcclComm*>& comms, const std::string& reason);

 private:
  using Call = std::function<nccl::Result(nccl::Communicator)>;
  // On the heap: when init ends, the library writes it once more, on a thread of its own that an
  // abort may have left behind.
  using Handle = std::shared_ptr<nccl::Communicator>;

  std::string where() const;
  nccl::Communicator usable(const char* what) const;
  nccl::Result locked(const char* what, const Call& call) const;
  void run(const char* what, const Call& call);
  void finish(const char* what, nccl::Result result, double timeout);
  std::string fail(const std::string& reason) const;
  Handle retire(State state, const std::string& reason);
  void gather(const char* what, void* buffer, int64_t each);

  const std::shared_ptr<const NcclLibrary> library_;
  const int rank_, size_;
  const NcclOptions options_;
  const nccl::Stream stream_;
  const int process_;
  std::atomic<int64_t> sent_{0};
  std::atomic<bool> aborting_{false};  // retired, and the library is not done with it

  mutable std::mutex calling_;  // held during each library call: one thread at a time may make one
  mutable std::mutex mutex_;    // guards what follows; never held during a library call
  mutable State state_ = State::made;
  mutable std::string reason_;
  Handle handle_;
};

}  // namespace edit_ext
