#include "offload.h"

#include <utility>

namespace edit_ext {
namespace {

int64_t bytes_of(const at::Tensor& t) { return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; }

// As many floats of the room as the state has.
at::Tensor part_for(const at::Tensor& room, const at::Tensor& state) {
  return room.narrow(0, 0, bytes_of(state)).view(at::kFloat);
}

}  // namespace

Offload::Offload(std::shared_ptr<Lane> lane, std::shared_ptr<BufferPool> pool, at::Device device,
                 at::Tensor anchor, at::Tensor momentum)
    : lane_(std::move(lane)),
      pool_(std::move(pool)),
      device_(device),
      anchor_(std::move(anchor)),
      momentum_(std::move(momentum)) {
  pool_->reserve(bytes_of(anchor_), bytes_of(momentum_));
}

// Nobody may wait here: copies that are not over keep their memory for good. A lane that was closed
// in good time has none.
Offload::~Offload() {
  for (Travel* t : {&up_, &down_}) {
    if (t->end && !t->end->passed()) new auto(std::move(*t));
  }
}

Offload::Travel Offload::travel(bool up, const Buffers& b, const Lane::Points& after) const {
  Travel t;
  const auto add = [&](const at::Tensor& state, const at::Tensor& room) {
    if (!state.defined()) return;
    const at::Tensor part = part_for(room, state);
    t.memory.push_back(up ? Lane::Copy{part, state} : Lane::Copy{state, part});
  };
  add(anchor_, b.anchor);
  add(momentum_, b.momentum);
  t.end = lane_->copy(up, t.memory, after);
  return t;
}

void Offload::fetch() {
  if (fetched_) return;
  const std::shared_ptr<Buffers> b = pool_->acquire();
  Lane::Points after{b->last_use, down_.end};
  if (pool_->give_room(*b, device_)) {
    // torch hands out memory that the current stream may still be working on.
    const auto now = std::make_shared<Timer>(device_);
    now->stop();
    after.push_back(now);
  }
  up_ = travel(true, *b, after);
  b->last_use = up_.end;
  fetched_ = b;
}

std::shared_ptr<Buffers> Offload::take() {
  fetch();
  return std::move(fetched_);
}

void Offload::point(Flight& f) const {
  f.anchor = part_for(f.buffers->anchor, anchor_);
  if (momentum_.defined()) f.momentum = part_for(f.buffers->momentum, momentum_);
}

void Offload::bring_back(Buffers& b) {
  down_ = travel(false, b, {b.last_use});
  b.last_use = down_.end;
}

void Offload::settle() {
  fetched_.reset();
  if (down_.end) down_.end->seconds();
  down_ = {};
}

}  // namespace edit_ext
