#include <chrono>
#include <deque>
#include <exception>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

bool Event::done() const {
  return !state_ || state_->done.load(std::memory_order_acquire);
}

void Event::wait() const {
  if (done()) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done.load(std::memory_order_acquire); });
}

void Event::on_done(std::function<void()> action) const {
  if (!done()) {
    std::lock_guard lock(state_->mutex);
    if (!state_->done.load(std::memory_order_acquire)) {
      state_->actions.push_back(std::move(action));
      return;
    }
  }
  action();
}

Event Event::pending() {
  return Event(std::make_shared<State>());
}

void Event::set() const {
  std::vector<std::function<void()>> actions;
  {
    std::lock_guard lock(state_->mutex);
    state_->done.store(true, std::memory_order_release);
    actions.swap(state_->actions);
  }
  state_->changed.notify_all();
  for (const auto& action : actions) action();
}

struct HostStream::Worker {
  struct Task {
    const char* label;
    std::function<void()> work;
  };

  Worker(const std::string& name, Trace* t) : trace(t), lane(t ? t->lane(name) : 0) {
    thread = NamedThread(name, [this] { run(); });
  }
  ~Worker() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
  }

  void push(Task task) {
    // Told under the lock: once the task is done the stream may be gone, and nothing of it may be touched.
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stop || !tasks.empty(); });
      if (tasks.empty()) return;  // stopped, and everything is done
      Task task = std::move(tasks.front());
      tasks.pop_front();
      idle = false;
      const bool skip = failure != nullptr && task.label != nullptr;  // events are set even after a failure
      lock.unlock();
      const auto begin = Clock::now();
      std::exception_ptr caught;
      try {
        if (!skip) task.work();
      } catch (...) {
        caught = std::current_exception();
      }
      task.work = nullptr;
      const auto end = Clock::now();
      if (task.label != nullptr) {
        busy_ns.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count());
        if (trace) trace->add(lane, task.label, begin, end);
      }
      lock.lock();
      if (caught && !failure) failure = caught;
      idle = tasks.empty();
      if (idle) drained.notify_all();
    }
  }

  Trace* trace;
  int lane;
  std::mutex mutex;
  std::condition_variable changed, drained;
  std::deque<Task> tasks;
  bool stop = false, idle = true;
  std::exception_ptr failure;
  std::atomic<std::int64_t> busy_ns{0};
  NamedThread thread;  // last: joined before the rest goes
};

HostStream::HostStream(std::string name, Mode mode, Trace* trace) : name_(std::move(name)) {
  if (mode == Mode::kThread) worker_ = std::make_unique<Worker>(name_, trace);
}

HostStream::~HostStream() = default;

void HostStream::enqueue(const char* label, std::function<void()> work) {
  if (worker_) {
    worker_->push({label, std::move(work)});
  } else {
    work();
  }
}

Event HostStream::record() {
  if (!worker_) return {};
  Event event = Event::pending();
  worker_->push({nullptr, [event] { event.set(); }});
  return event;
}

void HostStream::wait(const Event& event) {
  if (event.done()) return;
  ZG_ASSERT(worker_ != nullptr, "an inline stream would wait for ever");
  worker_->push({nullptr, [event] { event.wait(); }});
}

void HostStream::callback(std::function<void()> action) {
  if (worker_) {
    worker_->push({nullptr, std::move(action)});
  } else {
    action();
  }
}

void HostStream::synchronize() {
  if (!worker_) return;
  std::unique_lock lock(worker_->mutex);
  worker_->drained.wait(lock, [&] { return worker_->idle && worker_->tasks.empty(); });
  if (worker_->failure) std::rethrow_exception(std::exchange(worker_->failure, nullptr));
}

double HostStream::busy_seconds() const {
  return worker_ ? static_cast<double>(worker_->busy_ns.load()) * 1e-9 : 0.0;
}

}  // namespace zg
