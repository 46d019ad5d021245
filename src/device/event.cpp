// Events, and the pool that their states come from and go back to.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

// Threads: mutex guards `actions` until `done` is set under it; from then on they are the setter's.
struct Event::State {
  // Few actions wait for one event; their place is kept when the state is used again.
  State() { actions.reserve(2); }
  std::atomic<std::int64_t> references{1};
  std::atomic<bool> done{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Task> actions;
  DeviceMark* mark = nullptr;
  std::shared_ptr<EventPool::Free> pool;  // null: from the heap, or not in use
  State* next = nullptr;                  // of those not in use
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
    if (count == kMostKept) return false;
    ++count;
    state.next = std::exchange(first, &state);
    return true;
  }

  std::mutex mutex;
  Event::State* first = nullptr;  // the last given back, whose memory is warm
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
  state_->actions.clear();  // of one that was never set
  if (DeviceMark* const mark = std::exchange(state_->mark, nullptr)) mark->give_back();
  const std::shared_ptr<EventPool::Free> pool = std::exchange(state_->pool, nullptr);
  if (pool == nullptr || !pool->give(*state_)) delete state_;
}

void Event::attach(DeviceMark* mark) const {
  state_->mark = mark;
}

DeviceMark* Event::mark() const {
  return state_ != nullptr ? state_->mark : nullptr;
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
  const Event kept = *this;  // an action may drop the one that this is
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
