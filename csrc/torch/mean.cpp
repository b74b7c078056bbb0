#include "mean.h"

#include "../core/sync.h"
#include "check.h"

namespace edit_ext {

struct Mean::State {
  SharedComms comms;
  at::Tensor flat, recv, partials, weights, scalars;
  LayerView view{};
};

Mean::Mean(at::Tensor flat, int64_t n, at::Tensor scratch, std::shared_ptr<Comm> replica,
           std::shared_ptr<Lane> lane)
    : lane_(std::move(lane)), state_(std::make_shared<State>()) {
  TORCH_CHECK_VALUE(replica != nullptr, "replica is None; expected a communicator");
  const at::Device device = place_of(flat, "flat");
  State& s = *state_;
  LayerView& v = s.view;
  v.replica = replica->rank();
  v.replicas = replica->size();
  v.mesh_ranks = 1;
  TORCH_CHECK_VALUE(n >= 0, "n is ", n, "; expected at least 0");
  check_flat(flat, "flat", device, at::kFloat, padded(n, v.replicas));
  v.size = v.counted = n;
  v.piece = piece_size(v.size, v.replicas);
  v.wire = Wire::f32;
  s.comms.replica = std::move(replica);
  s.flat = std::move(flat);
  check_flat(scratch, "scratch", device, at::kFloat, Mean::scratch(n, v.replicas));
  s.recv = std::move(scratch);
  s.partials = bytes_on(device, (v.piece + kChunk - 1) / kChunk * 4);
  s.weights = zeros_on(device, v.replicas * sizeof(PerReplica));
  const auto words = static_cast<int64_t>(sizeof(PerReplica) / sizeof(float));
  s.weights.view(at::kFloat)
      .view({v.replicas, words})
      .select(1, offsetof(PerReplica, weight) / sizeof(float))
      .fill_(1.0 / v.replicas);
  s.scalars = zeros_on(device, sizeof(MergeRecord) + sizeof(Decision));
  v.send = s.flat.data_ptr();
  v.recv = s.recv.data_ptr();
  v.merged = s.flat.data_ptr<float>() + v.replica * v.piece;
  v.partials = as<float>(s.partials);
  v.per_replica = as<PerReplica>(s.weights);
  v.merge_records = as<MergeRecord>(s.scalars);
  v.decision = reinterpret_cast<Decision*>(v.merge_records + 1);
  ticket_ = lane_->submit(s.comms, [state = state_](Device& passes, const Comms& comms) {
    mean_exchange(passes, *comms.replica, state->view);
  });
}

bool Mean::is_completed() {
  state_->comms.replica->poll();
  return lane_->wait(ticket_, 0.0);
}

void Mean::wait() {
  lane_->join(ticket_);
  lane_->forget(ticket_);
}

}  // namespace edit_ext
