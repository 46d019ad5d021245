// Work to be run later: a move-only std::function<void()> that stores small captures inline.
#pragma once
#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "ziggurat/base/error.hpp"

namespace zg {

// Owned by one thread at a time. Creating, moving and running a Task allocates nothing when its callable has
// at most kInline bytes and moves without throwing.
class Task {
 public:
  static constexpr std::size_t kInline = 64;
  template <class F>
  static constexpr bool fits =
      sizeof(F) <= kInline &&
      alignof(F) <= alignof(std::max_align_t) && std::is_nothrow_move_constructible_v<F>;

  Task() = default;
  Task(std::nullptr_t) {}
  template <class F>
  requires(!std::is_same_v<std::decay_t<F>, Task> && std::is_invocable_v<std::decay_t<F>&>) Task(F&& work) {
    using Work = std::decay_t<F>;
    if constexpr (fits<Work>) {
      new (storage_) Work(std::forward<F>(work));
      actions_ = &kActions<Work>;
    } else {
      auto boxed = [box = std::make_unique<Work>(std::forward<F>(work))] { (*box)(); };
      new (storage_) decltype(boxed)(std::move(boxed));
      actions_ = &kActions<decltype(boxed)>;
    }
  }
  Task(Task&& other) noexcept { take(other); }
  Task& operator=(Task&& other) noexcept {
    if (this == &other) return *this;
    drop();
    take(other);
    return *this;
  }
  ~Task() { drop(); }

  explicit operator bool() const { return actions_ != nullptr; }
  void operator()() {
    ZG_ASSERT(actions_ != nullptr, "a task without work is run");
    actions_->run(storage_);
  }

 private:
  struct Actions {
    void (*run)(void* work);
    void (*move)(void* to, void* from) noexcept;  // also destroys the one at `from`
    void (*end)(void* work) noexcept;
  };
  template <class Work>
  static constexpr Actions kActions = {
      [](void* work) { (*static_cast<Work*>(work))(); },
      [](void* to, void* from) noexcept {
        new (to) Work(std::move(*static_cast<Work*>(from)));
        static_cast<Work*>(from)->~Work();
      },
      [](void* work) noexcept { static_cast<Work*>(work)->~Work(); },
  };

  void take(Task& other) noexcept {
    actions_ = std::exchange(other.actions_, nullptr);
    if (actions_ != nullptr) actions_->move(storage_, other.storage_);
  }
  // Empties the task before its callable is destroyed, since the callable's destructor may use the task.
  void drop() noexcept {
    if (const Actions* actions = std::exchange(actions_, nullptr)) actions->end(storage_);
  }

  alignas(std::max_align_t) std::byte storage_[kInline];
  const Actions* actions_ = nullptr;
};

}  // namespace zg
