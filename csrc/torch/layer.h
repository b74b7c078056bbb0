// Layer: one layer's state and buffers as torch tensors, and its way through sync.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flight.h"
#include "offload.h"
#include "table.h"

namespace edit_ext {

// What a finished sync says about itself, copied from the device.
struct LayerStats {
  SyncTag tag;
  std::vector<NormRecord> records;
  std::vector<PerReplica> per_replica;
  Decision decision;
  double begin_seconds, exchange_seconds, wait_seconds, write_back_seconds;
  int64_t bytes_sent;
};

// What a layer keeps between syncs, and where.
struct LayerKind {
  Wire wire = Wire::f32;
  bool anchored = true;     // false: syncs average what is there (buffers, optimizer states)
  bool momentum = true;     // false: outer steps have none
  bool replicated = false;  // this replica holds the momentum of all pieces
  bool late = false;        // results are written back steps after the exchange began
  bool through = false;  // the lane does all nine steps: from begin to finish nobody else reads or
                         // writes these tensors (optimizer states)
  bool offload = false;  // anchor and momentum are in pinned memory of the host; see offload.h
};

class Layer {
 public:
  // counted: how many of the parameters, the first ones, count in this rank's norms; the others are
  // replicated inside the shard group and count with another rank.
  Layer(std::string name, std::vector<at::Tensor> params, int64_t counted, SharedComms comms,
        std::shared_ptr<Lane> lane, std::shared_ptr<BufferPool> pool, LayerKind kind);

  // Lets the state of a layer with offload travel to the device ahead of begin(), which does it
  // otherwise. Throws as begin().
  void fetch();
  // Step 1 on the caller's stream; steps 2 to 8 go to the lane, with `through` all of them. Throws
  // when a sync of this layer is in flight, of a late one two, or a parameter no longer looks as it
  // did.
  void begin(const Policy& policy, const SyncTag& tag);
  // True when steps 2 to 8 of the oldest sync in flight are over, or enqueued; false after
  // `seconds`. Throws what went wrong.
  bool wait_for(double seconds);
  // Puts it before whatever the caller's stream gets from now on; after wait_for returned true.
  void come_after() const { lane_->join(flights_.front()->ticket); }
  // Its step 9 on the caller's stream, if it is still to come, after wait_for returned true; keep:
  // of LayerView. On the CPU it throws when the ranks did not agree; on CUDA stats() does, since
  // the host does not know before.
  void finish(float keep);
  // Whether stats() would return without waiting for the device.
  bool settled() const { return !last_ || last_->write_back_timer->passed(); }

  // The same parameters at other addresses; not while a sync is in flight.
  void rebind(std::vector<at::Tensor> params);
  void capture();  // anchor <- params
  void restore();  // params <- anchor rounded to their dtype

  const std::string& name() const { return name_; }
  const std::vector<at::Tensor>& params() const { return params_; }
  bool in_flight() const { return !flights_.empty(); }
  int64_t size() const { return size_; }
  int64_t piece() const { return piece_; }
  const LayerStats& stats();
  // Themselves, not copies, undefined if there is none, as the last finished sync has left them:
  // with offload the host waits until they are back, here and wherever it reads or writes them. Not
  // over a fetch().
  at::Tensor anchor() const;    // [size] fp32
  at::Tensor momentum() const;  // [piece], or [replicas * piece] if whole
  bool whole_momentum() const {
    return momentum_.defined() && momentum_.numel() == anchor_.numel();
  }
  at::Tensor detector() const { return detector_; }  // [replicas, 5] fp64
  // Copies of the parts of a flat fp32 tensor of size() elements or more, shaped like the
  // parameters; and the inverse, [replicas * piece].
  std::vector<at::Tensor> split(const at::Tensor& flat) const;
  at::Tensor join(const std::vector<at::Tensor>& tensors) const;
  std::vector<at::Tensor> anchor_like() const { return split(anchor()); }
  void load_anchor(const std::vector<at::Tensor>& tensors) { home().copy_(join(tensors)); }
  // What the oldest sync in flight of a late layer will take off the anchor, fp32, shaped like the
  // parameters; call come_after first. And a flight that has this to write back; such a sync has no
  // statistics.
  std::vector<at::Tensor> step_in_flight() const;
  void load_step(const std::vector<at::Tensor>& step);

 private:
  Layout layout(bool copy_in);
  void copy_out();
  at::Tensor part_of(const at::Tensor& flat, size_t param) const;
  const at::Tensor& home() const;  // anchor_, when it may be read and written
  std::string where(const SyncTag& tag) const;

  const std::string name_;
  std::vector<at::Tensor> params_;
  const int64_t counted_;
  const SharedComms comms_;
  const std::shared_ptr<Lane> lane_;
  const at::Device device_;
  const std::shared_ptr<BufferPool> pool_;
  LayerKind kind_;

  std::vector<at::Tensor> staged_;  // dense copies of parameters that have gaps, else undefined
  std::vector<std::vector<int64_t>> strides_;
  std::vector<int64_t> offsets_;
  int64_t size_ = 0, piece_ = 0;
  at::Tensor anchor_, momentum_, detector_;
  TensorTable table_;
  std::unique_ptr<Offload> offload_;  // null without
  void judge(const Flight& f);
  void look(const SyncTag& tag) const;

  std::shared_ptr<Flight> take_off();

  std::deque<std::shared_ptr<Flight>> flights_;  // in flight, oldest first
  std::shared_ptr<Flight> last_;                 // finished, with statistics not yet read
  std::optional<LayerStats> stats_;
};

}  // namespace edit_ext
