// What it costs to acquire and release a tensor that is there: without a program (reads, writes, several
// threads), in a step that is followed, and along a program; beside it pairs of lock and unlock.
//
//   bench_store_hot_path [--rounds 9] [--pairs 1000000]
//
// All in turns; medians. Times of a pair (acquire and release) are of the wall clock and of the thread's
// processor time: where others use the machine, too, the second is the one to look at, except between
// threads. Prints a table on stderr and one JSON line.
#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <shared_mutex>

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

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Cost {
  double wall_ns = 0, cpu_ns = 0, allocations = 0;  // of a pair
};

struct Case {
  std::string name;
  int threads = 1;
  // So many pairs by the thread of this number; returns how many it did.
  std::function<std::int64_t(int thread, std::int64_t pairs)> work;
  std::vector<double> wall, cpu, allocated;
};

// Per pair of one thread, all threads at once.
Cost measure(const Case& c, std::int64_t pairs) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<Cost> costs(static_cast<std::size_t>(c.threads));
  const auto body = [&](int thread) {
    ready.fetch_add(1);
    while (!go.load(std::memory_order_acquire)) {
    }
    const std::int64_t before = allocations.load();
    const double cpu = thread_seconds();
    const auto begin = Clock::now();
    const auto done = static_cast<double>(c.work(thread, pairs));
    costs[static_cast<std::size_t>(thread)] = {1e9 * seconds_between(begin, Clock::now()) / done,
                                               1e9 * (thread_seconds() - cpu) / done,
                                               static_cast<double>(allocations.load() - before) / done};
  };
  std::vector<std::thread> others;
  for (int t = 1; t < c.threads; ++t) others.emplace_back(body, t);
  while (ready.load() + 1 < c.threads) std::this_thread::yield();
  go.store(true, std::memory_order_release);
  body(0);
  for (std::thread& t : others) t.join();
  Cost mean;
  for (const Cost& cost : costs) {
    mean.wall_ns += cost.wall_ns / c.threads;
    mean.cpu_ns += cost.cpu_ns / c.threads;
    mean.allocations += cost.allocations / c.threads;
  }
  return mean;
}

// Makes the compiler take the data to be used.
void use(const Lease& lease) {
  asm volatile("" : : "r"(lease.data()) : "memory");
}

std::vector<Case> cases(Bed& bed, const Program& program) {
  TensorStore& store = *bed.store;
  static std::shared_mutex shared;
  static std::mutex exclusive;
  const auto lock_shared = [](int, std::int64_t pairs) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      shared.lock_shared();
      shared.unlock_shared();
    }
    return pairs;
  };
  const auto lock = [](int, std::int64_t pairs) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      exclusive.lock();
      exclusive.unlock();
    }
    return pairs;
  };
  // Each thread on a tensor of its own, `apart` from the others'.
  const auto same_again = [&store](Access access, int apart) {
    return [&store, access, apart](int thread, std::int64_t pairs) {
      const SegmentId id = thread * apart;
      for (std::int64_t i = 0; i < pairs; ++i) use(store.acquire(id, Tier::kHost, access));
      return pairs;
    };
  };
  const auto around = [&store](int, std::int64_t pairs) {
    SegmentId id = 0;
    for (std::int64_t i = 0; i < pairs; ++i) {
      use(store.acquire(id, Tier::kHost, Access::kRead));
      if (++id == kTensors) id = 0;
    }
    return pairs;
  };
  const auto step = [&store, around](int, std::int64_t pairs) {
    std::int64_t done = 0;
    for (; done < pairs; done += kStep) {
      store.step_begin();
      around(0, kStep);
      store.step_end();
    }
    return done;
  };
  const auto along = [&store, &program](int, std::int64_t pairs) {
    static std::vector<Lease> leases;
    std::int64_t done = 0;
    store.run(&program, &program);
    while (true) {
      for (std::int32_t op = 0; op < program.op_count(); ++op, ++done) {
        store.acquire_op(nullptr, leases);
        use(leases.front());
        leases.clear();
      }
      if (done >= pairs) break;
      store.run(&program, &program);
    }
    store.run(&program, nullptr);
    for (std::int32_t op = 0; op < program.op_count(); ++op, ++done) {
      store.acquire_op(nullptr, leases);
      leases.clear();
    }
    store.run(nullptr, nullptr);
    return done;
  };
  std::vector<Case> all;
  const auto add = [&](const std::string& name, int threads, auto&& work) {
    all.push_back({name, threads, work, {}, {}, {}});
  };
  add("std::mutex", 1, lock);
  add("std::shared_mutex, shared", 1, lock_shared);
  add("read", 1, same_again(Access::kRead, 1));
  add("write", 1, same_again(Access::kWrite, 1));
  add("read, 1024 tensors in turn", 1, around);
  add("read, in a step that is followed", 1, step);
  add("read, along a program", 1, along);
  add("std::mutex", 2, lock);
  add("std::shared_mutex, shared", 2, lock_shared);
  add("read, the same tensor", 2, same_again(Access::kRead, 0));
  add("read, different tensors", 2, same_again(Access::kRead, 1));
  add("write, different tensors", 2, same_again(Access::kWrite, 1));
  return all;
}

void verify(Bed& bed) {
  for (SegmentId id = 0; id < kTensors; ++id) {
    Bed::check(bed.store->acquire(id, Tier::kHost, Access::kRead), id);
    Bed::check(bed.store->acquire(id, Tier::kHost, Access::kWrite), id);
  }
}

void run(int rounds, std::int64_t pairs) {
  Bed bed({.tensors = kTensors, .bytes = kBytes, .arenas = {.device = 1 << 20, .host = kTensors * kBytes}});
  bed.fill();
  Program program("program");
  for (int i = 0; i < kStep; ++i) {
    const AccessStep access{i % kTensors, Tier::kHost, Access::kRead, false};
    program.add_op({&access, 1});
  }
  program.finish(kTensors);
  std::vector<Case> all = cases(bed, program);
  verify(bed);
  for (Case& c : all) (void)measure(c, pairs / 10);
  for (int r = 0; r < rounds; ++r) {
    for (Case& c : all) {
      const Cost cost = measure(c, pairs);
      c.wall.push_back(cost.wall_ns);
      c.cpu.push_back(cost.cpu_ns);
      c.allocated.push_back(cost.allocations);
    }
  }
  verify(bed);
  nlohmann::json json = {
      {"bench", "store_hot_path"}, {"rounds", rounds}, {"pairs", pairs}, {"tensors", kTensors}};
  json.update(provenance());
  std::fprintf(stderr, "%-34s %8s %10s %8s %10s %12s\n", "acquire and release", "threads", "wall, ns", "MAD",
               "CPU, ns", "allocations");
  for (const Case& c : all) {
    std::fprintf(stderr, "%-34s %8d %10.1f %8.1f %10.1f %12.4f\n", c.name.c_str(), c.threads, median(c.wall),
                 mad(c.wall), median(c.cpu), median(c.allocated));
    json["results"].push_back({{"name", c.name},
                               {"threads", c.threads},
                               {"wall_ns", median(c.wall)},
                               {"wall_mad_ns", mad(c.wall)},
                               {"cpu_ns", median(c.cpu)},
                               {"allocations", median(c.allocated)}});
  }
  std::printf("%s\n", json.dump().c_str());
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  int rounds = 9;
  std::int64_t pairs = 1'000'000;
  CLI::App app{"What it costs to acquire and release a tensor that is there"};
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--pairs", pairs)->check(CLI::Range(1000, 1'000'000'000));
  CLI11_PARSE(app, argc, argv);
  try {
    zg::bench::run(rounds, pairs);
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_store_hot_path: %s\n", e.what());
    return e.exit_code();
  }
}
