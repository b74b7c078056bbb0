#include "layer.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <pybind11/pybind11.h>

#include "../core/sync.h"
#include "check.h"
#include "policy.h"
#include "range.h"

namespace edit_ext {
namespace {

at::Device device_of(const std::string& layer, const std::vector<at::Tensor>& params) {
  return params.empty() ? at::Device(at::kCPU)
                        : place_of(params[0], "layer " + layer + ": params[0]");
}

}  // namespace

Layer::Layer(std::string name, std::vector<at::Tensor> params, int64_t counted, SharedComms comms,
             std::shared_ptr<Lane> lane, std::shared_ptr<BufferPool> pool, LayerKind kind)
    : name_(std::move(name)),
      params_(std::move(params)),
      counted_(counted),
      comms_(std::move(comms)),
      lane_(std::move(lane)),
      device_(device_of(name_, params_)),
      pool_(std::move(pool)),
      kind_(kind),
      staged_(params_.size()) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(counted >= 0 && counted <= static_cast<int64_t>(params_.size()), "layer ",
                    name_, ": counted is ", counted, "; expected 0 to ", params_.size());
  TORCH_CHECK_VALUE(!kind_.offload || on_cuda(device_), "layer ", name_, ": offload is true on ",
                    device_, "; expected false where there is no GPU");
  TORCH_CHECK_VALUE(!kind_.through || !kind_.anchored, "layer ", name_,
                    ": through is true; expected it of layers without an anchor");
  TORCH_CHECK_VALUE(!kind_.late || (kind_.anchored && !kind_.offload), "layer ", name_,
                    ": late is true; expected an anchor that stays where the parameters are");
  kind_.momentum = kind_.momentum && kind_.anchored;
  kind_.replicated = kind_.replicated && kind_.momentum && group_size(comms_.replica) > 1;
  for (size_t i = 0; i < params_.size(); ++i) {
    const std::string item = "layer " + name_ + ": params[" + std::to_string(i) + "]";
    const at::Tensor& p = params_[i];
    check_on(p, item, device_);
    dtype_of(p, item);
    TORCH_CHECK_VALUE(!p.is_inference(), item,
                      " is an inference tensor; expected one made outside "
                      "torch.inference_mode()");
    TORCH_CHECK_VALUE(at::has_internal_overlap(p) != at::MemOverlap::Yes, item, " has strides ",
                      p.strides(), ": several elements share one place in memory");
    if (!p.is_non_overlapping_and_dense()) {
      staged_[i] = at::empty(p.sizes(), p.options().requires_grad(false));
    }
    strides_.push_back(p.strides().vec());
  }
  const Layout flat = layout(false);
  for (const TensorView& t : flat.tensors) offsets_.push_back(t.offset);
  const int replicas = group_size(comms_.replica);
  size_ = flat.size;
  piece_ = piece_size(size_, replicas);
  const at::TensorOptions here(device_);
  const auto zeros = [&](int64_t n) {
    return kind_.offload ? pinned_zeros(n) : at::zeros({n}, here.dtype(at::kFloat));
  };
  if (kind_.anchored) anchor_ = zeros(replicas * piece_);
  if (kind_.momentum) momentum_ = zeros(kind_.replicated ? replicas * piece_ : piece_);
  detector_ = at::zeros({replicas, 5}, here.dtype(at::kDouble));
  if (kind_.offload) {
    offload_ = std::make_unique<Offload>(lane_, pool_, device_, anchor_, momentum_);
  }
  if (kind_.anchored) capture();
  // Those that go through share buffers one after the other, which must not grow under a layer
  // that is still in flight.
  if (kind_.through) take_off();
}

std::string Layer::where(const SyncTag& tag) const {
  return "layer " + name_ + ", sync " + std::to_string(tag.sync_index) + ": ";
}

Layout Layer::layout(bool copy_in) {
  Layout flat;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (static_cast<int64_t>(i) == counted_) flat.stop_counting();
    const at::Tensor& p = params_[i];
    TORCH_CHECK_VALUE(p.strides().vec() == strides_[i], "layer ", name_, ": params[", i,
                      "] has strides ", p.strides(), "; it had ", strides_[i],
                      " when it was attached");
    if (copy_in && staged_[i].defined()) staged_[i].copy_(p);
    const at::Tensor& dense = staged_[i].defined() ? staged_[i] : p;
    flat.add(dense.data_ptr(), dense.numel(), dtype_of(dense, name_));
  }
  return flat;
}

void Layer::copy_out() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (staged_[i].defined()) {
      params_[i].detach().copy_(staged_[i]);  // bumps the version counter by itself
    } else {
      // A raw write to a weight that autograd has saved would give a silently wrong gradient.
      params_[i].unsafeGetTensorImpl()->bump_version();
    }
  }
}

at::Tensor Layer::part_of(const at::Tensor& flat, size_t i) const {
  const at::Tensor& p = params_[i];
  const at::Tensor part = flat.narrow(0, offsets_[i], p.numel());
  return staged_[i].defined() ? part.view(p.sizes())
                              : part.as_strided(p.sizes(), p.strides(), part.storage_offset());
}

void Layer::fetch() {
  if (!offload_) return;
  if (in_flight()) {
    throw std::runtime_error("layer " + name_ + ": fetch() while a sync is in flight");
  }
  const c10::DeviceGuard guard(device_);
  offload_->fetch();
}

// A flight with buffers, its view pointing at everything; nothing has run.
std::shared_ptr<Flight> Layer::take_off() {
  auto f = std::make_shared<Flight>();
  f->begin_timer = std::make_shared<Timer>(device_);
  f->buffers = offload_ ? offload_->take() : kind_.through ? pool_->shared() : pool_->acquire();
  if (f->buffers->last_use) f->buffers->last_use->before_current();
  f->comms = comms_;
  f->layout = layout(true);
  f->anchor = kind_.anchored
                  ? anchor_
                  : BufferPool::room(*f->buffers, group_size(comms_.replica) * piece_, device_);
  f->momentum = momentum_;
  if (offload_) offload_->point(*f);
  f->detector = detector_;
  f->view.wire = kind_.wire;
  f->view.anchored = kind_.anchored;
  f->view.replicated = kind_.replicated;
  f->view.late = kind_.late;
  f->point();
  f->tables = table_.point(f->view, device_);
  return f;
}

void Layer::begin(const Policy& policy, const SyncTag& tag) {
  c10::NoGradGuard no_grad;
  if (flights_.size() > (kind_.late ? 1 : 0)) {
    throw std::runtime_error(where(tag) + "the layer is in flight already");
  }
  const c10::DeviceGuard guard(device_);
  const Range range(name_, "begin");
  if (last_) stats();  // nobody has asked: what it may have to throw must not be lost
  const std::shared_ptr<Flight> f = take_off();
  f->policy = policy;
  f->tag = tag;
  const bool through = kind_.through;
  if (!through) run_on(device_, [&](Device& passes) { sync_begin(passes, f->view); });
  f->begin_timer->stop();
  f->ticket = lane_->submit(comms_, [f, through, at = where(tag), name = name_,
                                     watched = Watched()](Device& passes, const Comms& comms) {
    const Timer timer(at::kCPU);
    const Watched::Here here(watched);
    const Range inner(name, "exchange");
    const int64_t before = f->sent();
    try {
      if (through) sync_begin(passes, f->view);
      sync_exchange(passes, comms, f->view, f->policy, f->tag);
      if (through) sync_finish(passes, f->view);
    } catch (const pybind11::error_already_set&) {
      throw;  // Ctrl-C, seen by a call on the training thread
    } catch (const std::exception& e) {
      throw std::runtime_error(at + e.what());
    }
    f->bytes_sent = f->sent() - before;
    f->exchange_seconds = timer.seconds_so_far();
  });
  flights_.push_back(f);
}

bool Layer::wait_for(double seconds) {
  if (!in_flight()) throw std::runtime_error("layer " + name_ + ": no sync is in flight");
  Flight& f = *flights_.front();
  const Timer timer(at::kCPU);
  look(f.tag);
  const Range range(name_, "wait");
  const bool done = lane_->wait(f.ticket, seconds);
  if (seconds > 0) f.wait_seconds += timer.seconds_so_far();
  return done;
}

// Throws what has broken the group of a direct lane; a worker hears of it by the call that fails.
void Layer::look(const SyncTag& tag) const {
  if (!lane_->direct() || !comms_.replica) return;
  try {
    comms_.replica->poll();
  } catch (const std::exception& e) {
    throw std::runtime_error(where(tag) + e.what());
  }
}

void Layer::finish(float keep) {
  c10::NoGradGuard no_grad;
  const c10::DeviceGuard guard(device_);
  const Range range(name_, "write_back");
  if (last_) stats();
  const std::shared_ptr<Flight> f = std::move(flights_.front());
  flights_.pop_front();
  f->stall_timer = std::make_shared<Timer>(device_);
  lane_->join(f->ticket);
  f->stall_timer->stop();
  f->write_back_timer = std::make_shared<Timer>(device_);
  if (!kind_.through) {
    // Where the parameters live now, wherever they were at begin. A void sync copies out what it
    // copies in here.
    f->layout = layout(f->policy.min_steps > 0 || keep != 0.0f);
    f->layout.describe(f->view);
    f->view.keep = keep;
    for (const at::Tensor& t : table_.point(f->view, device_)) f->tables.push_back(t);
    run_on(device_, [&](Device& passes) { sync_finish(passes, f->view); });
  }
  copy_out();
  if (on_cuda(device_)) copy_down(f->scalars.host, f->scalars.device);
  f->write_back_timer->stop();
  if (!kind_.through) f->buffers->last_use = f->write_back_timer;
  if (offload_) offload_->bring_back(*f->buffers);
  f->buffers.reset();  // the next layer may take them: its begin comes behind this point
  last_ = f;
  if (!on_cuda(device_)) stats();
}

const LayerStats& Layer::stats() {
  if (last_) {
    const c10::DeviceGuard guard(device_);
    const double write_back = last_->write_back_timer->seconds();  // waits for the device
    look(last_->tag);  // an exchange that an abort has ended counts as done there
    const std::shared_ptr<Flight> f = std::move(last_);
    last_ = nullptr;
    const double on_stream = lane_->seconds(f->ticket);
    if (f->restored) return *(stats_ = LayerStats{});
    const auto* records = f->scalars.read<NormRecord>(f->scalars.records);
    const auto* replicas = f->scalars.read<PerReplica>(f->scalars.per_replica);
    stats_ = LayerStats{f->tag,
                        {records, records + f->view.replicas},
                        {replicas, replicas + f->view.replicas},
                        *f->scalars.read<Decision>(f->scalars.decision),
                        f->begin_timer->seconds(),
                        on_stream < 0 ? f->exchange_seconds : on_stream,
                        f->wait_seconds + f->stall_timer->seconds(),
                        write_back,
                        f->bytes_sent};
    judge(*f);
  }
  if (!stats_) throw std::runtime_error("layer " + name_ + ": no sync has finished yet");
  return *stats_;
}

// Throws when the ranks did not agree.
void Layer::judge(const Flight& f) {
  const Decision& decision = stats_->decision;
  const int32_t status = decision.status;
  const std::string at = where(f.tag);
  if (status & kWrongSync) {
    throw std::runtime_error(at +
                             "replicas are at different syncs; every replica must take part "
                             "in every sync, in the same order");
  }
  if (status & kDisagree) {
    throw std::runtime_error(
        at +
        "ranks came to different decisions; settings (outer_lr, perhaps) or detector "
        "state differ between replicas");
  }
  if (status & kNonFinite) {
    throw std::runtime_error(at + "replica " + std::to_string(decision.culprit) +
                             " had a norm that is not finite more than " +
                             std::to_string(f.policy.max_flags_in_a_row) + " times in a row");
  }
}

void Layer::rebind(std::vector<at::Tensor> params) {
  if (in_flight() && !kind_.late) {
    throw std::runtime_error("layer " + name_ + ": rebind() while a sync is in flight");
  }
  TORCH_CHECK_VALUE(params.size() == params_.size(), "layer ", name_, ": got ", params.size(),
                    " tensors; expected ", params_.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string item = "layer " + name_ + ": params[" + std::to_string(i) + "]";
    check_on(params[i], item, device_);
    TORCH_CHECK_VALUE(params[i].scalar_type() == params_[i].scalar_type() &&
                          params[i].sizes() == params_[i].sizes() &&
                          params[i].strides() == params_[i].strides(),
                      item, " is ", params[i].scalar_type(), " of shape ", params[i].sizes(),
                      " and strides ", params[i].strides(), "; it was ", params_[i].scalar_type(),
                      " of shape ", params_[i].sizes(), " and strides ", params_[i].strides());
  }
  params_ = std::move(params);
}

void Layer::capture() {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) part_of(home(), i).copy_(params_[i]);
}

void Layer::restore() {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) params_[i].detach().copy_(part_of(home(), i));
}

const at::Tensor& Layer::home() const {
  if (offload_) offload_->settle();
  return anchor_;
}

at::Tensor Layer::anchor() const {
  return kind_.anchored ? home().narrow(0, 0, size_) : at::Tensor();
}

at::Tensor Layer::momentum() const {
  home();
  return momentum_;
}

std::vector<at::Tensor> Layer::split(const at::Tensor& flat) const {
  check_flat(flat, "layer " + name_ + ": flat", flat.device(), at::kFloat, size_);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < params_.size(); ++i) parts.push_back(part_of(flat, i).clone());
  return parts;
}

at::Tensor Layer::join(const std::vector<at::Tensor>& tensors) const {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(tensors.size() == params_.size(), "layer ", name_, ": got ", tensors.size(),
                    " tensors; expected ", params_.size());
  at::Tensor flat = at::zeros_like(anchor_);
  for (size_t i = 0; i < params_.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].sizes() == params_[i].sizes(), "layer ", name_, ": tensors[", i,
                      "] has shape ", tensors[i].sizes(), "; expected ", params_[i].sizes());
    part_of(flat, i).copy_(tensors[i]);
  }
  return flat;
}

std::vector<at::Tensor> Layer::step_in_flight() const {
  const c10::DeviceGuard guard(device_);
  const Flight& f = *flights_.front();
  const at::ScalarType type = kind_.wire == Wire::f32 ? at::kFloat : at::kBFloat16;
  const at::Tensor sent = f.buffers->send.narrow(0, 0, wire_bytes(kind_.wire, size_)).view(type);
  return split(sent.to(at::kFloat));
}

void Layer::load_step(const std::vector<at::Tensor>& step) {
  c10::NoGradGuard no_grad;
  const c10::DeviceGuard guard(device_);
  const std::shared_ptr<Flight> f = take_off();
  const at::Tensor flat = join(step);
  const at::ScalarType type = kind_.wire == Wire::f32 ? at::kFloat : at::kBFloat16;
  f->buffers->send.narrow(0, 0, wire_bytes(kind_.wire, flat.numel())).view(type).copy_(flat);
  f->begin_timer->stop();
  f->restored = true;
  f->ticket = lane_->submit(comms_, [f](Device&, const Comms&) {});
  flights_.push_back(f);
}

}  // namespace edit_ext
