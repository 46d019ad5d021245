// Data-parallel loops over oneTBB, with a partition that depends on the sizes alone.
//
// Chunk i is [i * grain, min(n, (i + 1) * grain)) whatever the number of threads, so that sums made
// per chunk and added in order are the same bits on every machine. May be called from any thread, and
// from within a loop.
#pragma once
#include <cstdint>
#include <memory>
#include <type_traits>

namespace zg {

// A reference to a callable that outlives the call.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
      FunctionRef(F&& f)  // NOLINT: implicit on purpose
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(static_cast<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, static_cast<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

// body(begin, end) for each chunk; returns when all are done. grain >= 1.
void parallel_for(std::int64_t n, std::int64_t grain, FunctionRef<void(std::int64_t, std::int64_t)> body);

// Threads that loops may use: the cores of this process, or what set_parallelism said. Call it once,
// early, from main.
int parallelism();
void set_parallelism(int threads);

}  // namespace zg
