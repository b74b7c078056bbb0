// edit_ext._C: what Python sees, as a contents page.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../comm/delayed.h"
#include "../comm/threads.h"
#include "c10d_comm.h"
#include "checksum.h"
#include "info.h"
#include "layer.h"
#include "mean.h"
#include "nccl_door.h"
#include "policy.h"

namespace py = pybind11;
using namespace edit_ext;
using std::shared_ptr;

namespace {

// torch's error classes keep their meaning: TypeError, ValueError, RuntimeError, no C++ stack.
void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::TypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  }
}

// Without the interpreter lock, so that other Python threads run; signals are looked at ten times
// a second, so that Ctrl-C ends the wait.
template <class Then>
void wait_and(Layer& layer, Then then) {
  while (true) {
    {
      py::gil_scoped_release unlocked;
      if (layer.wait_for(0.1)) {
        then();
        return;
      }
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void wait(Layer& layer, float keep) {
  wait_and(layer, [&] { layer.finish(keep); });
}

void arrive(Layer& layer) {
  wait_and(layer, [&] { layer.come_after(); });
}

const LayerStats& settled_stats(Layer& layer) {
  const py::gil_scoped_release unlocked;  // it may wait for a GPU, which may wait for a peer
  return layer.stats();
}

template <at::Tensor (Layer::*of)() const>
at::Tensor state(const Layer& layer) {
  const py::gil_scoped_release unlocked;  // it may wait for a copy, likewise
  return (layer.*of)();
}

py::dict stats(Layer& layer) {
  const LayerStats& s = settled_stats(layer);
  py::list norms, weights, flags, idle, steps, done;
  for (size_t r = 0; r < s.records.size(); ++r) {
    norms.append(s.per_replica[r].norm);
    weights.append(s.per_replica[r].weight);
    flags.append(s.per_replica[r].flagged != 0);
    idle.append(s.per_replica[r].idle != 0);
    steps.append(s.records[r].steps);
    done.append(s.records[r].done != 0);
  }
  using namespace py::literals;
  return py::dict("sync_index"_a = s.tag.sync_index, "norms"_a = norms, "weights"_a = weights,
                  "flags"_a = flags, "idle"_a = idle, "steps"_a = steps, "done"_a = done,
                  "merged_norm"_a = s.decision.merged_norm, "clip"_a = s.decision.clip,
                  "skip"_a = s.decision.skip == kReturn, "void"_a = s.decision.skip == kVoid,
                  "begin_seconds"_a = s.begin_seconds, "exchange_seconds"_a = s.exchange_seconds,
                  "wait_seconds"_a = s.wait_seconds, "write_back_seconds"_a = s.write_back_seconds,
                  "bytes_sent"_a = s.bytes_sent);
}

std::vector<shared_ptr<Comm>> thread_comms(int size, double timeout) {
  TORCH_CHECK_VALUE(size >= 1, "size is ", size, "; expected 1 or more");
  const auto group = std::make_shared<ThreadGroup>(size, timeout);
  std::vector<shared_ptr<Comm>> comms;
  for (int rank = 0; rank < size; ++rank) {
    comms.push_back(std::make_shared<ThreadComm>(group, rank));
  }
  return comms;
}

Wire wire_named(const std::string& name) {
  TORCH_CHECK_VALUE(name == "fp32" || name == "bf16", "wire is '", name,
                    "'; expected 'fp32' or 'bf16'");
  return name == "fp32" ? Wire::f32 : Wire::bf16;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::register_local_exception_translator(translate);
  using unlocked = py::call_guard<py::gil_scoped_release>;

  py::class_<Policy>(m, "Policy")
      .def(py::init(&make_policy), py::kw_only(), py::arg("outer") = "sgd", py::arg("outer_lr"),
           py::arg("outer_momentum"), py::arg("nesterov"), py::arg("clip_norm"),
           py::arg("weighting"), py::arg("temperature"), py::arg("z_threshold"),
           py::arg("ema_alpha"), py::arg("ema_warmup"), py::arg("max_flags_in_a_row"),
           py::arg("min_steps") = 0, py::arg("clip_value") = py::none(), py::arg("staleness") = 1.0,
           py::arg("gap_scale") = py::none());

  py::class_<Comm, shared_ptr<Comm>>(m, "Comm")
      .def_property_readonly("rank", &Comm::rank)
      .def_property_readonly("size", &Comm::size)
      .def_property_readonly("bytes_sent", &Comm::bytes_sent)
      .def("abort", &Comm::abort, py::arg("reason"), unlocked())
      .def("close", &Comm::close, py::arg("seconds"), unlocked())
      .def("poll", &Comm::poll);
  py::class_<C10dComm, Comm, shared_ptr<C10dComm>>(m, "C10dComm")
      .def(py::init<std::string, std::string, std::vector<std::string>>(), py::arg("payload_group"),
           py::arg("scalar_group"), py::arg("names"));
  py::class_<DelayedComm, Comm, shared_ptr<DelayedComm>>(m, "DelayedComm")
      .def(py::init<shared_ptr<Comm>, double>(), py::arg("inner"), py::arg("seconds"));

  // Replicas of one process: a communicator for each rank of a group whose members are threads.
  m.def("thread_comms", &thread_comms, py::arg("size"), py::arg("timeout"));

  py::class_<Lane, shared_ptr<Lane>>(m, "Lane")
      .def("fail", &Lane::fail, py::arg("reason"))
      .def("close", &Lane::close, py::arg("seconds") = 0.0, unlocked());
  m.def("make_lane", &make_lane, py::arg("like"), py::arg("direct") = false);
  m.def("nccl_version", &nccl_version);
  m.def("nccl_unique_id", [] { return py::bytes(nccl_unique_id()); });
  m.def("make_nccl_comm", &make_nccl_comm, py::arg("id"), py::arg("rank"), py::arg("size"),
        py::arg("lane"), py::arg("timeout"), py::arg("max_ctas") = 0,
        py::arg("group") = "replica group", py::arg("check") = Check(), unlocked());
  m.def("abort_all", &abort_all, py::arg("comms"), py::arg("reason"), unlocked());
  m.def("on_cuda", [](const at::Tensor& t) { return on_cuda(t.device()); });
  py::class_<BufferPool, shared_ptr<BufferPool>>(m, "BufferPool")
      .def(py::init<int>(), py::arg("count"))
      .def_property_readonly("bytes", &BufferPool::bytes);

  py::class_<Layer, shared_ptr<Layer>>(m, "Layer")
      .def(py::init([](std::string name, std::vector<at::Tensor> params, shared_ptr<Comm> replica,
                       shared_ptr<Comm> shard, shared_ptr<Comm> mesh, shared_ptr<Lane> lane,
                       shared_ptr<BufferPool> pool, const std::string& wire, bool anchored,
                       std::optional<int64_t> counted, bool momentum, bool replicated, bool late,
                       bool through, bool offload) {
             const auto all = static_cast<int64_t>(params.size());
             return std::make_shared<Layer>(
                 std::move(name), std::move(params), counted.value_or(all),
                 SharedComms{std::move(shard), replica, mesh ? std::move(mesh) : replica},
                 std::move(lane), std::move(pool),
                 LayerKind{wire_named(wire), anchored, momentum, replicated, late, through,
                           offload});
           }),
           py::arg("name"), py::arg("params"), py::kw_only(), py::arg("replica"),
           py::arg("shard") = nullptr, py::arg("mesh") = nullptr, py::arg("lane"), py::arg("pool"),
           py::arg("wire") = "fp32", py::arg("anchored") = true, py::arg("counted") = py::none(),
           py::arg("momentum") = true, py::arg("replicated") = false, py::arg("late") = false,
           py::arg("through") = false, py::arg("offload") = false)
      .def("fetch", &Layer::fetch, unlocked())
      .def(
          "begin",
          [](Layer& layer, const Policy& policy, int64_t sync_index, int64_t steps, bool done) {
            layer.begin(policy, {sync_index, steps, done});
          },
          py::arg("policy"), py::kw_only(), py::arg("sync_index"), py::arg("steps"),
          py::arg("done"), unlocked())
      .def("wait", &wait, py::arg("keep") = 0.0f)
      .def("arrive", &arrive)
      .def_property_readonly("settled", &Layer::settled)
      .def("ready", [](Layer& layer) { return layer.wait_for(0.0); })
      .def("rebind", &Layer::rebind, py::arg("params"))
      .def("capture", &Layer::capture, unlocked())
      .def("restore", &Layer::restore, unlocked())
      .def("stats", &stats)
      .def("split", &Layer::split, py::arg("flat"))
      .def("join", &Layer::join, py::arg("tensors"))
      .def("anchor_like", &Layer::anchor_like, unlocked())
      .def("load_anchor", &Layer::load_anchor, py::arg("tensors"), unlocked())
      .def("step_in_flight", &Layer::step_in_flight, unlocked())
      .def("load_step", &Layer::load_step, py::arg("step"), unlocked())
      .def_property_readonly("name", &Layer::name)
      .def_property_readonly("params", &Layer::params)
      .def_property_readonly("size", &Layer::size)
      .def_property_readonly("piece", &Layer::piece)
      .def_property_readonly("in_flight", &Layer::in_flight)
      .def_property_readonly("anchor", state<&Layer::anchor>)
      .def_property_readonly("momentum", state<&Layer::momentum>)
      .def_property_readonly("whole_momentum", &Layer::whole_momentum)
      .def_property_readonly("detector", &Layer::detector);

  py::class_<Mean>(m, "Mean")
      .def(py::init<at::Tensor, int64_t, at::Tensor, shared_ptr<Comm>, shared_ptr<Lane>>(),
           py::arg("flat"), py::arg("n"), py::arg("scratch"), py::arg("replica"), py::arg("lane"),
           unlocked())
      .def_static("scratch", &Mean::scratch, py::arg("n"), py::arg("replicas"))
      .def_static("padded", &Mean::padded, py::arg("n"), py::arg("replicas"))
      .def("is_completed", &Mean::is_completed, unlocked())
      .def("wait", &Mean::wait, unlocked());

  m.def("checksum", &checksum, py::arg("tensor"), unlocked());
  m.def("build_info", &build_info);
  m.def("kernel_threads", &kernel_threads, unlocked());
}
