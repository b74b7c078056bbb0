#include "layer.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <chrono>

#include "../core/sync.h"
#include "../cpu/device.h"
#include "check.h"
#include "policy.h"

namespace edit_ext {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// On the worker one thread computes: torch's others belong to the forward that runs meanwhile.
cpu::CpuDevice& worker_device() {
  // Never destroyed: at exit the worker may still be inside it.
  static auto* device = new cpu::CpuDevice;
  return *device;
}

}  // namespace

Layer::Layer(std::string name, std::vector<at::Tensor> params, SharedComms comms,
             std::shared_ptr<cpu::Worker> worker, std::shared_ptr<BufferPool> pool, Wire wire,
             bool anchored)
    : name_(std::move(name)),
      params_(std::move(params)),
      comms_(std::move(comms)),
      worker_(std::move(worker)),
      pool_(std::move(pool)),
      wire_(wire),
      anchored_(anchored),
      staged_(params_.size()) {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    const std::string item = "layer " + name_ + ": params[" + std::to_string(i) + "]";
    const at::Tensor& p = params_[i];
    check_on(p, item, at::kCPU);
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
  anchor_ = at::zeros({replicas * piece_}, at::kFloat);
  if (anchored_) momentum_ = at::zeros({piece_}, at::kFloat);
  detector_ = at::zeros({replicas, 5}, at::kDouble);
  if (anchored_) capture();
}

std::string Layer::where(const SyncTag& tag) const {
  return "layer " + name_ + ", sync " + std::to_string(tag.sync_index) + ": ";
}

Layout Layer::layout(bool copy_in) {
  Layout flat;
  for (size_t i = 0; i < params_.size(); ++i) {
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

void Layer::begin(const Policy& policy, const SyncTag& tag) {
  c10::NoGradGuard no_grad;
  if (flight_) throw std::runtime_error(where(tag) + "the layer is in flight already");
  const auto start = Clock::now();
  auto f = std::make_shared<Flight>();
  f->buffers = pool_->acquire();
  f->comms = comms_;
  f->layout = layout(true);
  f->policy = policy;
  f->tag = tag;
  f->anchor = anchor_;
  f->momentum = momentum_;
  f->detector = detector_;
  f->view.wire = wire_;
  f->view.anchored = anchored_;
  f->point();
  sync_begin(cpu_device(), f->view);
  f->ticket = worker_->submit([f, at = where(tag)] {
    const auto began = Clock::now();
    const int64_t before = f->sent();
    const Comms comms{f->comms.shard.get(), f->comms.replica.get(), f->comms.mesh.get()};
    try {
      sync_exchange(worker_device(), comms, f->view, f->policy, f->tag);
    } catch (const std::exception& e) {
      throw std::runtime_error(at + e.what());
    }
    f->bytes_sent = f->sent() - before;
    f->exchange_seconds = seconds_since(began);
  });
  f->begin_seconds = seconds_since(start);
  flight_ = std::move(f);
}

bool Layer::wait_for(double seconds) {
  if (!flight_) throw std::runtime_error("layer " + name_ + ": no sync is in flight");
  const auto start = Clock::now();
  const bool done = worker_->wait(flight_->ticket, seconds);
  if (seconds > 0) flight_->wait_seconds += seconds_since(start);
  return done;
}

void Layer::finish() {
  c10::NoGradGuard no_grad;
  const auto start = Clock::now();
  const std::shared_ptr<Flight> f = std::move(flight_);
  flight_ = nullptr;
  // Where the parameters live now, wherever they were at begin.
  f->layout = layout(false);
  f->layout.describe(f->view);
  sync_finish(cpu_device(), f->view);
  copy_out();
  stats_ = LayerStats{f->tag,          f->records,           f->per_replica,
                      f->decision,     f->begin_seconds,     f->exchange_seconds,
                      f->wait_seconds, seconds_since(start), f->bytes_sent};
  const int32_t status = f->decision.status;
  const std::string at = where(f->tag);
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
    throw std::runtime_error(at + "replica " + std::to_string(f->decision.culprit) +
                             " had a norm that is not finite more than " +
                             std::to_string(f->policy.max_flags_in_a_row) + " times in a row");
  }
}

void Layer::capture() {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) part_of(anchor_, i).copy_(params_[i]);
}

void Layer::restore() {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) params_[i].detach().copy_(part_of(anchor_, i));
}

const LayerStats& Layer::stats() const {
  if (!stats_) throw std::runtime_error("layer " + name_ + ": no sync has finished yet");
  return *stats_;
}

at::Tensor Layer::anchor() const { return anchor_.narrow(0, 0, size_); }

std::vector<at::Tensor> Layer::anchor_like() const {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < params_.size(); ++i) parts.push_back(part_of(anchor_, i).clone());
  return parts;
}

void Layer::load_anchor(const std::vector<at::Tensor>& tensors) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(tensors.size() == params_.size(), "layer ", name_, ": got ", tensors.size(),
                    " tensors; expected ", params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].sizes() == params_[i].sizes(), "layer ", name_, ": tensors[", i,
                      "] has shape ", tensors[i].sizes(), "; expected ", params_[i].sizes());
  }
  for (size_t i = 0; i < params_.size(); ++i) part_of(anchor_, i).copy_(tensors[i]);
}

}  // namespace edit_ext
