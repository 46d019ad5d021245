// Events, and the pool that their states are taken from and returned to.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

// Threads: the mutex guards `actions` until `done` is set, which happens under the mutex. After that, only
// the thread that set it uses `actions`.
struct Event::State {
  // An event seldom has more than two actions. Their memory is kept when the state is reused.
  State() { actions.reserve(2); }
  std::atomic<std::int64_t> references{1};
  std::atomic<bool> done{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Task> actions;
  DeviceEvent* device_event = nullptr;
  std::shared_ptr<EventPool::Free> pool;  // null: allocated without a pool, or unused
  State* next = nullptr;                  // in the list of unused states
};

struct EventPool::Free {
  ~Free() {
    while (first != nullptr) delete std::exchange(first, first->next);
  }
  Event::State* take() {
    std::lock_guard lock(mutex);
    if (first == nullptr) return nullptr;
    --count;
    return std::exchange(first, first->next);
  }
  bool give(Event::State& state) {
    std::lock_guard lock(mutex);
    if (count == kMaxKept) return false;
    ++count;
    state.next = std::exchange(first, &state);
    return true;
  }

  std::mutex mutex;
  Event::State* first = nullptr;  // the state returned last, whose memory is in cache
  std::size_t count = 0;
};

EventPool::EventPool() : free_(std::make_shared<Free>()) {}

Event EventPool::pending() {
  Event::State* state = free_->take();
  if (state == nullptr) {
    state = new Event::State;
  } else {
    state->references.store(1, std::memory_order_relaxed);
    state->done.store(false, std::memory_order_relaxed);
  }
  state->pool = free_;
  return Event(state);
}

Event Event::pending() {
  return Event(new State);
}

Event::Event(const Event& other) noexcept : state_(other.state_) {
  if (state_ != nullptr) state_->references.fetch_add(1, std::memory_order_relaxed);
}

Event::~Event() {
  if (state_ == nullptr || state_->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  state_->actions.clear();  // drops actions of an event that was never set
  if (DeviceEvent* const device_event = std::exchange(state_->device_event, nullptr))
    device_event->give_back();
  const std::shared_ptr<EventPool::Free> pool = std::exchange(state_->pool, nullptr);
  if (pool == nullptr || !pool->give(*state_)) delete state_;
}

void Event::attach(DeviceEvent* device_event) const {
  state_->device_event = device_event;
}

DeviceEvent* Event::device_event() const {
  return state_ != nullptr ? state_->device_event : nullptr;
}

bool Event::done() const {
  return state_ == nullptr || state_->done.load(std::memory_order_acquire);
}

void Event::wait() const {
  if (done()) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done.load(std::memory_order_acquire); });
}

void Event::on_done(Task action) const {
  if (!done()) {
    std::lock_guard lock(state_->mutex);
    if (!state_->done.load(std::memory_order_acquire)) {
      state_->actions.push_back(std::move(action));
      return;
    }
  }
  action();
}

void Event::set() const {
  const Event kept = *this;  // an action may destroy *this
  State& state = *kept.state_;
  {
    std::lock_guard lock(state.mutex);
    state.done.store(true, std::memory_order_release);
  }
  state.changed.notify_all();
  for (Task& action : state.actions) action();
  state.actions.clear();
}

}  // namespace zg
