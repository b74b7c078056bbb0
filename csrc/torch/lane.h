// Lane: where exchanges run beside the training. On the CPU a worker thread; on CUDA a side stream,
// filled by the training thread itself (NCCL) or by a worker thread (host communicators).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "../core/comm.h"
#include "../core/device.h"
#include "../cpu/worker.h"
#include "place.h"
#include "timer.h"
#if defined(EDIT_EXT_CUDA)
#include "../cuda/event.h"
#endif

namespace edit_ext {

struct SharedComms {
  std::shared_ptr<Comm> shard, replica, mesh;
};

class Lane {
 public:
  using Ticket = cpu::Worker::Ticket;
  using Task = std::function<void(Device&, const Comms&)>;
  virtual ~Lane() = default;

  // Runs the task behind everything that the caller's stream holds by now, with the communicators
  // as that place needs them.
  virtual Ticket submit(const SharedComms& comms, Task task) = 0;
  // True when the task has run, or all it does is enqueued; false after `seconds`. Throws the first
  // error of any task, or the reason given to fail(), on every call from then on.
  virtual bool wait(Ticket ticket, double seconds) = 0;
  // Puts the task before whatever the caller's stream gets from now on. After wait().
  virtual void join(Ticket ticket) = 0;
  // Seconds that the task took on its side stream, once join() has been passed there; -1 on the
  // CPU, where the task itself can look at a clock.
  virtual double seconds(Ticket ticket) = 0;
  // The other end of a ticket whose seconds nobody asks for. After join().
  virtual void forget(Ticket ticket) = 0;
  // Copies of equal sizes between the device and pinned memory of the host, one after the other, on
  // a stream that does nothing else: one up, to the device, and one down, because the link takes
  // both directions at a time. They run behind the ends of `after`, of which null ones are none;
  // the result ends with the last copy, and until then who asked keeps the memory.
  struct Copy {
    at::Tensor to, from;
  };
  using Points = std::vector<std::shared_ptr<const Timer>>;
  virtual std::shared_ptr<const Timer> copy(bool up, const std::vector<Copy>& copies,
                                            const Points& after) = 0;
  virtual void fail(const std::string& reason) = 0;
  virtual bool close(double seconds) = 0;
  // Whether tasks run inside submit() and leave their work on a stream: what breaks it later, no
  // call of the task is there to report.
  virtual bool direct() const { return false; }
};

class CpuLane final : public Lane {
 public:
  Ticket submit(const SharedComms& comms, Task task) override;
  bool wait(Ticket t, double seconds) override { return worker_.wait(t, seconds); }
  void join(Ticket) override {}
  double seconds(Ticket) override { return -1.0; }
  void forget(Ticket) override {}
  std::shared_ptr<const Timer> copy(bool up, const std::vector<Copy>& copies,
                                    const Points& after) override;
  void fail(const std::string& reason) override { worker_.fail(reason); }
  bool close(double seconds) override { return worker_.close(seconds); }

 private:
  cpu::Worker worker_;
};

#if defined(EDIT_EXT_CUDA)
class CudaLane final : public Lane {
 public:
  // direct: communicators take device memory and a stream, and tasks run on the calling thread.
  CudaLane(at::Device device, bool direct);
  ~CudaLane() override;

  Ticket submit(const SharedComms& comms, Task task) override;
  bool wait(Ticket ticket, double seconds) override;
  void join(Ticket ticket) override;
  double seconds(Ticket ticket) override;
  void forget(Ticket ticket) override { spans_.erase(ticket); }
  std::shared_ptr<const Timer> copy(bool up, const std::vector<Copy>& copies,
                                    const Points& after) override;
  void fail(const std::string& reason) override { worker_.fail(reason); }
  bool close(double seconds) override;
  cudaStream_t stream() const { return stream_.get(); }
  at::Device device() const { return device_; }
  bool direct() const override { return direct_; }

 private:
  // From submit() until what the task enqueued is known to be over, which is later than the task:
  // what it owns goes back to torch's allocators, and they know nothing of the side stream.
  struct Span {
    cuda::Event ready, begun, done;
    Task task;
  };
  using SharedStream = std::shared_ptr<std::remove_pointer_t<cudaStream_t>>;
  std::shared_ptr<Comm> staged(const std::shared_ptr<Comm>& comm);

  const at::Device device_;
  const bool direct_;
  // Shared with the tasks: one stuck in a library call may go on when the lane is gone.
  SharedStream stream_;
  SharedStream copy_streams_[2];  // down, up; made when they are first used
  cpu::Worker worker_;  // of a direct lane only the keeper of fail(), which any thread may call
  Ticket direct_tickets_ = 0;
  std::map<Ticket, std::shared_ptr<Span>> spans_;
  std::map<Comm*, std::shared_ptr<Comm>> staged_;
};
#endif

// The lane for layers whose parameters are where `like` is. direct: see CudaLane; CUDA only.
std::shared_ptr<Lane> make_lane(const at::Tensor& like, bool direct);

}  // namespace edit_ext
