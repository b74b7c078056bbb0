// Ranges in torch's profiler, on the thread that trains and on the worker.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <string>

namespace edit_ext {

// In the profiler, and in NVTX where torch emits it: edit_ext::layer::step.
class Range {
 public:
  Range(const std::string& layer, const char* step) : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) range_.before("edit_ext::" + layer + "::" + step);
  }

 private:
  at::RecordFunction range_;
};

// Who profiles the thread that made this; Here lets them see a task on another thread.
class Watched {
 public:
  Watched()
      : callbacks_(at::get_record_function_tls_()), info_(c10::ThreadLocalDebugInfo::current()) {}

  class Here {
   public:
    explicit Here(const Watched& w) : before_(at::get_record_function_tls_()), info_(w.info_) {
      at::set_record_function_tls_(w.callbacks_);
    }
    ~Here() { at::set_record_function_tls_(before_); }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    const at::RecordFunctionTLS before_;
    const c10::DebugInfoGuard info_;
  };

 private:
  at::RecordFunctionTLS callbacks_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
};

}  // namespace edit_ext
