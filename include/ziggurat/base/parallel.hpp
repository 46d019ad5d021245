// Data-parallel loops over oneTBB on the cores that compute, cut up by sizes alone.
//
// Chunk i is [i * grain, min(n, (i + 1) * grain)) whatever the number of threads, so that sums made
// per chunk and added in order are the same bits on every machine. May be called from any thread, and
// from within a loop.
//
// Unless told otherwise a loop runs on its caller and a thread for each other core. With cores assigned, each
// NUMA node's threads stand in an arena of their own and keep to its cores; so does a caller that joins them,
// until its loop is done. A loop is shared out over the nodes, and who is done with a node's part helps with
// the others'. A loop within a loop stays on the node where it begins.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "ziggurat/base/cores.hpp"

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

// Memory that a loop walks through: element i of n works near byte i * bytes / n of it.
struct Near {
  const void* address = nullptr;
  std::int64_t bytes = 0;
};
// The same chunks, each on the node where its memory lies, as far as the system tells and it pays to ask
// (several nodes, kAskBytes or more). Nodes that hold none of it take no part.
void parallel_for(Near memory, std::int64_t n, std::int64_t grain,
                  FunctionRef<void(std::int64_t, std::int64_t)> body);
inline constexpr std::int64_t kAskBytes = 1 << 20;

// Threads that loops may use: the cores of this process, or what set_parallelism said.
int parallelism();
// Call either once, early, while no loop runs. At most so many threads work on loops at once, however many
// callers there are. (As many as there are cores, or more, unbound, limit nothing: then each caller works on
// its own loop, beside one thread less than that.)
void set_parallelism(int threads);
// As assigned. Empty, or why the system refuses to bind threads to their cores: then none is bound.
[[nodiscard]] std::string set_parallelism(const CoreAssignment& cores);

}  // namespace zg
