#include "ziggurat/base/fiber.hpp"

#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <exception>
#include <utility>

#include "ziggurat/base/error.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace zg {
namespace {

namespace context = boost::context;

// A stack, as sanitizers know it. AddressSanitizer must be told of every switch between stacks, or it takes
// the frames of a fiber for accesses outside of the thread's stack; ThreadSanitizer likewise.
struct Stack {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  void* kept = nullptr;   // AddressSanitizer's own data, while another stack is in use
  void* shown = nullptr;  // ThreadSanitizer's name of it
};

// Announces a switch. returns: whether the fiber comes back to the stack `from`.
void begin_switch([[maybe_unused]] Stack& from, [[maybe_unused]] const Stack& to,
                  [[maybe_unused]] bool returns = true) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(returns ? &from.kept : nullptr, to.bottom, to.bytes);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(to.shown, 0);
#endif
}
// Completes a switch, on the new stack. `from` gets the place of the stack before.
void end_switch([[maybe_unused]] const Stack& here, [[maybe_unused]] Stack& from) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(here.kept, &from.bottom, &from.bytes);
#endif
}

// The outermost frame of a fiber never returns, so that AddressSanitizer would keep its red zones there in
// whatever gets the memory next.
struct Stacks : context::protected_fixedsize_stack {
  using context::protected_fixedsize_stack::protected_fixedsize_stack;
  void deallocate(context::stack_context& memory) noexcept {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(static_cast<char*>(memory.sp) - memory.size, memory.size);
#endif
    context::protected_fixedsize_stack::deallocate(memory);
  }
};

struct Cancelled {};

}  // namespace

struct Fiber::State {
  context::fiber self;    // where the function goes on
  context::fiber caller;  // where its owner does
  Stack stack, callers;
  std::function<void()> function;
  std::exception_ptr error;
  bool cancelled = false, ended = false;

  void run() {
    if (!cancelled) {
      try {
        function();
      } catch (const Cancelled&) {
      } catch (...) {
        error = std::current_exception();
      }
    }
    ended = true;
  }
  // Returns when the function is suspended or has ended.
  void go_on() {
    Stack here;
#ifdef __SANITIZE_THREAD__
    callers.shown = __tsan_get_current_fiber();
#endif
    begin_switch(here, stack);
    self = std::move(self).resume();
    end_switch(here, stack);
  }
};

Fiber::Fiber(std::size_t stack_bytes, std::function<void()> function) : state_(std::make_unique<State>()) {
  State* const s = state_.get();
  s->function = std::move(function);
  Stacks stacks(stack_bytes);
  const context::stack_context memory = stacks.allocate();
  s->stack.bottom = static_cast<char*>(memory.sp) - memory.size;
  s->stack.bytes = memory.size;
#ifdef __SANITIZE_THREAD__
  s->stack.shown = __tsan_create_fiber(0);
#endif
  s->self = context::fiber(std::allocator_arg, context::preallocated(memory.sp, memory.size, memory), stacks,
                           [s](context::fiber&& caller) {
                             s->caller = std::move(caller);
                             end_switch(s->stack, s->callers);
                             s->run();
                             begin_switch(s->stack, s->callers, false);
                             return std::move(s->caller);
                           });
}

Fiber::~Fiber() {
  state_->cancelled = true;
  if (!state_->ended) state_->go_on();
#ifdef __SANITIZE_THREAD__
  __tsan_destroy_fiber(state_->stack.shown);
#endif
}

void Fiber::resume() {
  ZG_ASSERT(!state_->ended, "a fiber that has ended cannot go on");
  state_->go_on();
  if (state_->error) std::rethrow_exception(std::exchange(state_->error, nullptr));
}

bool Fiber::ended() const {
  return state_->ended;
}

void Fiber::suspend() {
  State& s = *state_;
  begin_switch(s.stack, s.callers);
  s.caller = std::move(s.caller).resume();
  end_switch(s.stack, s.callers);
  if (s.cancelled) throw Cancelled{};
}

}  // namespace zg
