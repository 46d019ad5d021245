// What it costs to acquire and release a tensor that is there: without a program (reads, writes, several
// threads), in a step that is followed, and along a program; beside it pairs of lock and unlock.
//
//   bench_store_hot_path [--benchmark_filter=REGEX] [--benchmark_repetitions=N]
//
// One iteration is a pair (acquire and release). Google Benchmark divides both times by the pairs of all
// threads: with several threads "time" is what the store as a whole needs for a pair, and "CPU" is the
// processor time of a pair. The counter s_per_pair is the wall clock of a pair as its thread sees it. Where
// others use the machine, too, the processor time is the one to look at, except between threads.
#include <atomic>
#include <cstdlib>
#include <new>
#include <shared_mutex>

#include "bench/micro.hpp"
#include "bench/store_support.hpp"

namespace {
std::atomic<std::int64_t> allocations{0};
}  // namespace

// Not inlined: GCC would take the pairs apart and warn that they do not match.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace zg::bench {
namespace {

constexpr int kTensors = 1024;
constexpr std::int64_t kBytes = 4096;
constexpr int kStep = 4 * kTensors;  // accesses of a step and of the program

// Makes the compiler take the data to be used.
void use(const Lease& lease) {
  benchmark::DoNotOptimize(lease.data());
}

// Registers `work`, each of whose iterations is a pair, for 1, 2, 4, ... threads.
template <class Work>
void add(const char* name, int most_threads, const Work& work) {
  const auto body = [work](benchmark::State& state) {
    const std::int64_t before = allocations.load();
    work(state);
    if (state.thread_index() == 0)
      state.counters["allocations"] = {static_cast<double>(allocations.load() - before),
                                       benchmark::Counter::kAvgIterations};
    using Flags = benchmark::Counter::Flags;
    const auto seconds = Flags::kIsIterationInvariantRate | Flags::kAvgThreads | Flags::kInvert;
    state.counters["s_per_pair"] = {1.0 / state.threads(), seconds};
  };
  benchmark::RegisterBenchmark(name, body)->UseRealTime()->ThreadRange(1, most_threads);
}

void add_all(TensorStore& store, const Program& program, std::shared_mutex& shared, std::mutex& exclusive) {
  const int cores = std::max(2, static_cast<int>(std::thread::hardware_concurrency()));
  add("mutex", cores, [&](benchmark::State& state) {
    for (auto _ : state) {
      exclusive.lock();
      exclusive.unlock();
    }
  });
  add("shared_mutex", cores, [&](benchmark::State& state) {
    for (auto _ : state) {
      shared.lock_shared();
      shared.unlock_shared();
    }
  });
  // Each thread on a tensor of its own, `apart` from the others'.
  const auto same_again = [&store](Access access, int apart) {
    return [&store, access, apart](benchmark::State& state) {
      const SegmentId id = state.thread_index() * apart;
      for (auto _ : state) use(store.acquire(id, Tier::kHost, access));
    };
  };
  add("read_same_tensor", cores, same_again(Access::kRead, 0));
  add("read_different_tensors", cores, same_again(Access::kRead, 1));
  add("write_different_tensors", cores, same_again(Access::kWrite, 1));
  const auto around = [&store](std::int64_t pairs) {
    for (std::int64_t i = 0; i < pairs; ++i)
      use(store.acquire(static_cast<SegmentId>(i % kTensors), Tier::kHost, Access::kRead));
  };
  add("read_in_turn", 1, [=](benchmark::State& state) {
    while (state.KeepRunningBatch(kStep)) around(kStep);
  });
  add("read_in_step", 1, [&store, around](benchmark::State& state) {
    while (state.KeepRunningBatch(kStep)) {
      store.step_begin();
      around(kStep);
      store.step_end();
    }
  });
  add("read_along_program", 1, [&](benchmark::State& state) {
    std::vector<Lease> leases;
    const auto pass = [&](const Program* next) {
      store.run(&program, next);
      for (std::int32_t op = 0; op < program.op_count(); ++op) {
        store.acquire_op(nullptr, leases);
        use(leases.front());
        leases.clear();
      }
    };
    while (state.KeepRunningBatch(kStep)) pass(&program);
    pass(nullptr);
    store.run(nullptr, nullptr);
  });
}

void verify(Bed& bed) {
  for (SegmentId id = 0; id < kTensors; ++id) {
    Bed::check(bed.store->acquire(id, Tier::kHost, Access::kRead), id);
    Bed::check(bed.store->acquire(id, Tier::kHost, Access::kWrite), id);
  }
}

void run() {
  Bed bed({.tensors = kTensors, .bytes = kBytes, .arenas = {.device = 1 << 20, .host = kTensors * kBytes}});
  bed.fill();
  Program program("program");
  for (int i = 0; i < kStep; ++i) {
    const AccessStep access{i % kTensors, Tier::kHost, Access::kRead, false};
    program.add_op({&access, 1});
  }
  program.finish(kTensors);
  std::shared_mutex shared;
  std::mutex exclusive;
  add_all(*bed.store, program, shared, exclusive);
  verify(bed);
  run_registered();
  verify(bed);
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  CLI::App app{"What it costs to acquire and release a tensor that is there"};
  return zg::bench::micro_main(argc, argv, app, zg::bench::run);
}
