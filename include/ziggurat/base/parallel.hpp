// Data-parallel loops over oneTBB, on the compute cores.
//
// A loop is divided into chunks by its size alone: chunk i is [i * grain, min(n, (i + 1) * grain)) for any
// number of threads, so that sums made per chunk and added in order have the same bits on every machine.
// Loops may be started from any thread, and from within a loop.
//
// By default a loop runs on its caller and one thread for each other core. Once cores are assigned, each NUMA
// node has a TBB arena whose threads are bound to the node's cores; a caller that joins them is bound too,
// until its loop is done. A loop is then divided over the nodes, and threads that have finished their node's
// share help the other nodes. A loop within a loop stays on the node where it was started.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "ziggurat/base/cores.hpp"

namespace zg {

// A reference to a callable, which must live until the call returns.
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

// Calls body(begin, end) for each chunk of [0, n), in any order, and returns when all are done. grain >= 1.
// Rethrows an exception of `body`.
void parallel_for(std::int64_t n, std::int64_t grain, FunctionRef<void(std::int64_t, std::int64_t)> body);

// The memory that a loop goes through: iteration i of n works near byte i * bytes / n of it.
struct Near {
  const void* address = nullptr;
  std::int64_t bytes = 0;
};
// The same, but each chunk runs on the node where its memory lies; nodes that hold none of the memory take no
// part. The system is asked for that node only if it is worth the time: with several nodes, and for kAskBytes
// or more.
void parallel_for(Near memory, std::int64_t n, std::int64_t grain,
                  FunctionRef<void(std::int64_t, std::int64_t)> body);
inline constexpr std::int64_t kAskBytes = 1 << 20;

// The number of threads that loops may use, as set by set_parallelism(); by default one for each core of this
// process.
int parallelism();
// Limits the number of threads that work on loops at once, however many callers there are. Call one of the
// two overloads, once, at start-up, while no loop runs. Without effect on unbound threads if `threads` is at
// least the number of cores: each caller then works on its own loop together with up to `threads` - 1 others.
void set_parallelism(int threads);
// Uses the cores as assigned. Returns an empty text, or the reason why the system refuses to bind threads to
// their cores; then no thread is bound.
[[nodiscard]] std::string set_parallelism(const CoreAssignment& cores);

}  // namespace zg
