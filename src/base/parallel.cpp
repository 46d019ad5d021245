#include "ziggurat/base/parallel.hpp"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "ziggurat/base/error.hpp"

// oneTBB's library is not instrumented, so ThreadSanitizer cannot see that a loop's start happens before
// its chunks and these before its end: tell it.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#define ZG_TSAN_ACQUIRE(address) __tsan_acquire(address)
#define ZG_TSAN_RELEASE(address) __tsan_release(address)
#else
#define ZG_TSAN_ACQUIRE(address) (void)(address)
#define ZG_TSAN_RELEASE(address) (void)(address)
#endif

namespace zg {
namespace {
std::atomic<int> threads{0};
std::mutex control_mutex;
std::optional<tbb::global_control> control;
}  // namespace

void parallel_for(std::int64_t n, std::int64_t grain, FunctionRef<void(std::int64_t, std::int64_t)> body) {
  ZG_ASSERT_GE(grain, 1);
  const std::int64_t chunks = (n + grain - 1) / grain;
  if (chunks <= 1) {
    if (n > 0) body(0, n);
    return;
  }
  char begun = 0, ended = 0;
  ZG_TSAN_RELEASE(&begun);
  tbb::parallel_for(
      std::int64_t{0}, chunks,
      [&](std::int64_t i) {
        ZG_TSAN_ACQUIRE(&begun);
        body(i * grain, std::min(n, (i + 1) * grain));
        ZG_TSAN_RELEASE(&ended);
      },
      tbb::simple_partitioner());
  ZG_TSAN_ACQUIRE(&ended);
}

int parallelism() {
  const int set = threads.load(std::memory_order_relaxed);
  return set > 0 ? set : tbb::info::default_concurrency();
}

void set_parallelism(int count) {
  ZG_ASSERT_GE(count, 1);
  std::lock_guard lock(control_mutex);
  threads.store(count);
  control.emplace(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(count));
}

}  // namespace zg
