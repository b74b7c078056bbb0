// Worker: one thread that runs tasks in the order they came. On a CPU it stands for the side
// stream: exchanges of several layers queue up here while the training thread computes.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace edit_ext::cpu {

class Worker {
 public:
  using Ticket = int64_t;

  Worker();
  // Never blocks: a task stuck in a library call keeps the thread, which then owns its state
  // together with that task and ends with the process.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // The task may still run, or be running, after the worker is gone: it must own what it uses.
  Ticket submit(std::function<void()> task);
  // True when the task is done; false after `seconds`. Throws the first error of any task, or the
  // reason given to fail(), on every call from then on.
  bool wait(Ticket ticket, double seconds);
  bool done(Ticket ticket);
  // Makes every wait, now and later, throw std::runtime_error(reason).
  void fail(const std::string& reason);
  // No task will be started any more; waits up to `seconds` for the running one. True if idle.
  bool close(double seconds);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    Ticket submitted = 0, finished = 0;
    bool closing = false, idle = false;
    std::exception_ptr error;
  };
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace edit_ext::cpu
