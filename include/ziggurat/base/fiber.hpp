// Runs a function on a stack of its own, by Boost.Context. The function may suspend itself anywhere, and its
// owner resumes it from there.
//
// The owner and the function take turns; they never run at the same time. Sanitizers are told of each change
// of stacks.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>

namespace zg {

class Fiber {
 public:
  // `function` begins with the first resume(). A guard page lies below the stack. Throws std::bad_alloc if
  // there is no memory for the stack.
  Fiber(std::size_t stack_bytes, std::function<void()> function);
  // Ends a suspended function: its suspend() throws, so that all objects on its stack are destroyed.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // For the owner: the function runs until it suspends itself or ends. Rethrows what it throws.
  void resume();
  bool ended() const;
  // For the function: switches to the owner, and returns when the owner resumes it. Throws if the fiber is
  // destroyed instead.
  void suspend();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
