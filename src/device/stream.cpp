#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {
namespace {

// The queue of a stream's work: a ring buffer that keeps its memory. The owner's mutex guards it.
class Ring {
 public:
  struct Item {
    // Null for an event or a callback, which is not timed, and runs even after a failure.
    const char* label = nullptr;
    Task work;
  };
  // More items mean that a caller never waits for the stream, which is a bug.
  static constexpr std::size_t kMaxItems = std::size_t{1} << 24;

  bool empty() const { return count_ == 0; }
  void push(Item item) {
    if (count_ == items_.size()) grow();
    items_[(first_ + count_++) % items_.size()] = std::move(item);
  }
  Item pop() {
    Item item = std::move(items_[first_]);
    first_ = (first_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  void grow() {
    ZG_ASSERT_LT(count_, kMaxItems);
    std::vector<Item> larger(items_.empty() ? 64 : 2 * items_.size());
    for (std::size_t i = 0; i < count_; ++i) larger[i] = std::move(items_[(first_ + i) % items_.size()]);
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<Item> items_;
  std::size_t first_ = 0, count_ = 0;
};

}  // namespace

struct HostStream::Worker {
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

  void push(const char* label, Task work) {
    // Notifies under the lock: once the task is done, the stream may be destroyed.
    std::lock_guard lock(mutex);
    tasks.push({label, std::move(work)});
    changed.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stop || !tasks.empty(); });
      if (tasks.empty()) return;  // stopped, and all work is done
      Ring::Item task = tasks.pop();
      idle = false;
      const auto begin = Clock::now();
      if (task.label != nullptr) working_since = begin;
      const bool skip = failure != nullptr && task.label != nullptr;
      lock.unlock();
      std::exception_ptr caught;
      try {
        if (!skip) task.work();
      } catch (...) {
        caught = std::current_exception();
      }
      task.work = nullptr;
      const auto end = Clock::now();
      if (task.label != nullptr && trace) trace->add(lane, task.label, begin, end);
      lock.lock();
      if (task.label != nullptr) {
        busy += end - begin;
        working_since.reset();
      }
      if (caught && !failure) failure = caught;
      idle = tasks.empty();
      if (idle) drained.notify_all();
    }
  }

  Trace* trace;
  int lane;
  std::mutex mutex;
  std::condition_variable changed, drained;
  Ring tasks;
  bool stop = false, idle = true;
  std::exception_ptr failure;
  Clock::duration busy{0};                         // time spent in operations that are done
  std::optional<Clock::time_point> working_since;  // start of the current operation
  EventPool events;
  NamedThread thread;  // last, so that it is joined before the other members are destroyed
};

HostStream::HostStream(std::string name, Mode mode, Trace* trace) : name_(std::move(name)) {
  if (mode == Mode::kThread) worker_ = std::make_unique<Worker>(name_, trace);
}

HostStream::~HostStream() = default;

void HostStream::enqueue(const char* label, Task work) {
  if (worker_) {
    worker_->push(label, std::move(work));
  } else {
    work();
  }
}

Event HostStream::record() {
  if (!worker_) return {};
  Event event = worker_->events.pending();
  worker_->push(nullptr, [event] { event.set(); });
  return event;
}

void HostStream::wait(const Event& event) {
  if (event.done()) return;
  ZG_ASSERT(worker_ != nullptr, "an inline stream would wait for ever");
  worker_->push(nullptr, [event] { event.wait(); });
}

void HostStream::callback(Task action) {
  if (worker_) {
    worker_->push(nullptr, std::move(action));
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
  if (!worker_) return 0;
  std::lock_guard lock(worker_->mutex);
  Clock::duration busy = worker_->busy;
  if (worker_->working_since) busy += Clock::now() - *worker_->working_since;
  return std::chrono::duration<double>(busy).count();
}

}  // namespace zg
