#include "lane.h"

#include <chrono>
#include <thread>
#include <utility>

#include "staged.h"

namespace edit_ext {
namespace {

// On the worker one thread computes: torch's others belong to the forward that runs meanwhile.
cpu::CpuDevice& worker_device() {
  // Never destroyed: at exit the worker may still be inside it.
  static auto* device = new cpu::CpuDevice;
  return *device;
}

Comms pointers(const SharedComms& c) { return {c.shard.get(), c.replica.get(), c.mesh.get()}; }

}  // namespace

Lane::Ticket CpuLane::submit(const SharedComms& comms, Task task) {
  return worker_.submit(
      [comms, task = std::move(task)] { task(worker_device(), pointers(comms)); });
}

std::shared_ptr<const Timer> CpuLane::copy(bool, const std::vector<Copy>& copies, const Points&) {
  for (const Copy& c : copies) c.to.copy_(c.from);
  return std::make_shared<Timer>(at::kCPU);
}

#if defined(EDIT_EXT_CUDA)
namespace {

// Of the current device. The stream ends when its work does; destroying it does not wait.
std::shared_ptr<std::remove_pointer_t<cudaStream_t>> new_stream() {
  cudaStream_t made = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "making a side stream");
  return {made, [](cudaStream_t stream) { cudaStreamDestroy(stream); }};
}

}  // namespace

CudaLane::CudaLane(at::Device device, bool direct) : device_(device), direct_(direct) {
  const c10::DeviceGuard guard(device_);
  stream_ = new_stream();
}

// Nobody may wait here: a GPU that is not done keeps the memory of its tasks for good.
CudaLane::~CudaLane() {
  if (!spans_.empty() && !close(0.0)) new auto(std::move(spans_));
}

std::shared_ptr<Comm> CudaLane::staged(const std::shared_ptr<Comm>& comm) {
  if (!comm || direct_) return comm;
  auto& found = staged_[comm.get()];
  if (!found) found = std::make_shared<StagedComm>(comm, stream_.get());
  return found;
}

Lane::Ticket CudaLane::submit(const SharedComms& comms, Task task) {
  if (direct_) worker_.wait(0, 0.0);
  const c10::DeviceGuard guard(device_);
  auto span = std::make_shared<Span>();
  span->task = std::move(task);
  span->ready.record(current_stream(device_));
  const SharedComms own{staged(comms.shard), staged(comms.replica), staged(comms.mesh)};
  const auto run = [own, span, device = device_, stream = stream_] {
    const c10::DeviceGuard inside(device);
    cuda::CudaDevice passes(stream.get());
    span->ready.before(stream.get());
    span->begun.record(stream.get());
    span->task(passes, pointers(own));
    span->done.record(stream.get());
  };
  if (!direct_) {
    const Ticket ticket = worker_.submit(run);
    spans_[ticket] = span;
    return ticket;
  }
  spans_[++direct_tickets_] = span;  // also when the task throws: it may have enqueued something
  run();
  return direct_tickets_;
}

bool CudaLane::wait(Ticket ticket, double seconds) {
  return worker_.wait(direct_ ? 0 : ticket, seconds);
}

void CudaLane::join(Ticket ticket) { spans_.at(ticket)->done.before(current_stream(device_)); }

double CudaLane::seconds(Ticket ticket) {
  const auto span = spans_.at(ticket);
  spans_.erase(ticket);
  return span->done.since(span->begun);
}

std::shared_ptr<const Timer> CudaLane::copy(bool up, const std::vector<Copy>& copies,
                                            const Points& after) {
  const c10::DeviceGuard guard(device_);
  SharedStream& stream = copy_streams_[up];
  if (!stream) stream = new_stream();
  for (const auto& point : after) {
    if (point) point->before(stream.get());
  }
  auto timer = std::make_shared<Timer>(device_, stream.get());
  const auto kind = up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  for (const Copy& c : copies) {
    if (c.from.nbytes() == 0) continue;
    cuda::check(
        cudaMemcpyAsync(c.to.data_ptr(), c.from.data_ptr(), c.from.nbytes(), kind, stream.get()),
        "copying between the device and pinned memory");
  }
  timer->stop();
  return timer;
}

bool CudaLane::close(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  if (!worker_.close(seconds)) return false;
  for (const SharedStream& stream : {stream_, copy_streams_[0], copy_streams_[1]}) {
    if (!stream) continue;
    cudaError_t status = cudaStreamQuery(stream.get());
    while (status == cudaErrorNotReady && Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      status = cudaStreamQuery(stream.get());
    }
    if (status != cudaSuccess) return false;
  }
  return true;
}

#endif

std::shared_ptr<Lane> make_lane(const at::Tensor& like, bool direct) {
  const at::Device device = place_of(like, "like");
#if defined(EDIT_EXT_CUDA)
  if (on_cuda(device)) return std::make_shared<CudaLane>(device, direct);
#endif
  TORCH_CHECK_VALUE(!direct, "direct is true; expected false on ", device);
  return std::make_shared<CpuLane>();
}

}  // namespace edit_ext
