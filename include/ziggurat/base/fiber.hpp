// Runs a function on a stack of its own, by Boost.Context. The function may suspend itself anywhere, and its
// owner resumes it there.
//
// The owner and the function take turns on one thread at a time. Sanitizers are told of each change of
// stacks.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>

namespace zg {

class Fiber {
 public:
  // `function` begins with the first resume(). Throws std::bad_alloc where there is no memory for the stack,
  // below which a page is protected.
  Fiber(std::size_t stack_bytes, std::function<void()> function);
  // Ends a suspended function: suspend() throws, so that all that it has on its stack is destroyed.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // For the owner: the function runs until it suspends itself or ends. Rethrows what it throws.
  void resume();
  bool ended() const;
  // For the function: switches to the owner, and returns when the owner resumes it. Throws where the fiber is
  // destroyed instead.
  void suspend();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
