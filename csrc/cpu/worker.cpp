#include "worker.h"

#include <chrono>
#include <stdexcept>

namespace edit_ext::cpu {
namespace {

std::chrono::duration<double> span(double seconds) {
  return std::chrono::duration<double>(seconds);
}

}  // namespace

Worker::Worker() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { run(state); }).detach();
}

Worker::~Worker() { close(0.0); }

void Worker::run(const std::shared_ptr<State>& s) {
  std::unique_lock<std::mutex> lock(s->mutex);
  while (true) {
    s->changed.wait(lock, [&] { return s->closing || !s->queue.empty(); });
    if (s->closing) break;
    {
      std::function<void()> task = std::move(s->queue.front());
      s->queue.pop_front();
      const bool skip = s->error != nullptr;
      lock.unlock();
      std::exception_ptr error;
      try {
        if (!skip) task();
      } catch (...) {
        error = std::current_exception();
      }
      task = nullptr;  // what it owned goes before anybody is told
      lock.lock();
      if (error && !s->error) s->error = error;
    }
    s->finished += 1;
    s->changed.notify_all();
  }
  s->idle = true;
  s->changed.notify_all();
}

Worker::Ticket Worker::submit(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->error) std::rethrow_exception(state_->error);
  if (state_->closing) throw std::runtime_error("the sync has been closed");
  state_->queue.push_back(std::move(task));
  state_->changed.notify_all();
  return ++state_->submitted;
}

bool Worker::wait(Ticket ticket, double seconds) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait_for(lock, span(seconds),
                           [&] { return state_->error || state_->finished >= ticket; });
  if (state_->error) std::rethrow_exception(state_->error);
  return state_->finished >= ticket;
}

bool Worker::done(Ticket ticket) { return wait(ticket, 0.0); }

void Worker::fail(const std::string& reason) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->error) state_->error = std::make_exception_ptr(std::runtime_error(reason));
  state_->changed.notify_all();
}

bool Worker::close(double seconds) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->closing = true;
  state_->changed.notify_all();
  return state_->changed.wait_for(lock, span(seconds), [&] { return state_->idle; });
}

}  // namespace edit_ext::cpu
