#include "ziggurat/base/parallel.hpp"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/cpu_mask.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/thread.hpp"

// oneTBB's library is not instrumented, so ThreadSanitizer cannot see that a loop's start happens before its
// chunks, and that the chunks happen before its end. These macros tell it.
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

using Body = FunctionRef<void(std::int64_t, std::int64_t)>;

// The state of the calling thread.
struct ThreadState {
  bool inside = false;  // the thread works for a team; loops that it starts within a loop stay in that team
  CpuMask before;       // the thread's affinity before it joined the team
};
thread_local ThreadState here;

struct Inside {
  Inside() { here.inside = true; }
  ~Inside() { here.inside = before; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  const bool before = here.inside;
};

// Binds all threads that work in a team's arena, workers and callers alike, to the team's cores.
class Binder final : public tbb::task_scheduler_observer {
 public:
  Binder(tbb::task_arena& arena, const std::vector<int>& cpus)
      : tbb::task_scheduler_observer(arena), cores_(cpus) {
    observe(true);
  }
  // Waits until all threads have left, so that none stays bound. Workers leave when they find nothing to do.
  ~Binder() override {
    while (inside_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    observe(false);
  }

  void on_scheduler_entry(bool) override {
    inside_.fetch_add(1, std::memory_order_relaxed);
    int error = here.before.read();
    if (error == 0) error = cores_.apply();
    here.inside = true;
    if (error != 0 && !told_.exchange(true))
      log::warning("threads that compute are not bound to their cores: {}", errno_text(error));
  }
  void on_scheduler_exit(bool) override {
    here.inside = false;
    // If the earlier cores are no longer available, the thread keeps its binding.
    (void)here.before.apply();
    inside_.fetch_sub(1, std::memory_order_release);
  }

 private:
  const CpuMask cores_;
  std::atomic<int> inside_{0};
  std::atomic<bool> told_{false};
};

// The threads of one node.
struct Team {
  // A single team reserves one slot of its arena for callers, so that they need not wait for a worker's slot.
  // With several teams, a team may work on a loop without the loop's caller, so all slots are for workers.
  Team(const NodeCores& cores, bool bind, bool alone)
      : node(cores.node), threads(cores.threads), arena(threads, alone ? 1 : 0) {
    arena.initialize();
    if (bind) binder.emplace(arena, cores.compute);
  }

  const int node, threads;
  tbb::task_arena arena;
  std::optional<Binder> binder;
  std::mutex turn;  // held by the one thread that may work if threads == 1: TBB would admit two
};

struct Pool {
  // TBB's limit counts a caller and its workers. With several teams all threads may be workers while the
  // caller waits, hence the + 1; the slots of the arenas limit the threads.
  Pool(const CoreAssignment& cores, bool bind)
      : control(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(cores.threads()) + 1) {
    const auto computes = [](const NodeCores& node) { return node.threads > 0; };
    const bool alone = std::count_if(cores.nodes.begin(), cores.nodes.end(), computes) == 1;
    for (const NodeCores& node : cores.nodes) {
      if (!computes(node)) continue;
      const int index = static_cast<int>(teams.size());
      teams.push_back(std::make_unique<Team>(node, bind, alone));
      for (const auto* cpus : {&node.compute, &node.drives, &node.devices}) {
        for (const int cpu : *cpus) {
          if (static_cast<std::size_t>(cpu) >= team_of_cpu.size())
            team_of_cpu.resize(static_cast<std::size_t>(cpu) + 1, 0);
          team_of_cpu[static_cast<std::size_t>(cpu)] = index;
        }
      }
    }
  }

  // A worker that was woken for a loop may arrive after the loop has ended without it.
  ~Pool() {
    while (called.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

  // The team on whose cores the calling thread runs now; the first team if it runs elsewhere.
  int team_here() const {
    const int cpu = sched_getcpu();
    return cpu >= 0 && static_cast<std::size_t>(cpu) < team_of_cpu.size()
               ? team_of_cpu[static_cast<std::size_t>(cpu)]
               : 0;
  }
  int team_of_node(int node) const {
    for (std::size_t t = 0; t < teams.size(); ++t) {
      if (teams[t]->node == node) return static_cast<int>(t);
    }
    return -1;
  }

  tbb::global_control control;
  std::vector<std::unique_ptr<Team>> teams;
  std::vector<int> team_of_cpu;
  std::atomic<int> called{0};  // calls to teams that have not been answered yet
};

std::mutex setting_mutex;
std::atomic<int> thread_count{0};            // as set; 0: not set
std::optional<tbb::global_control> control;  // the limit where there is no pool
std::unique_ptr<Pool> pool_owner;            // owns `pool`
std::atomic<Pool*> pool{nullptr};            // null: each caller uses an arena of its own

std::int64_t chunk_count(std::int64_t n, std::int64_t grain) {
  return (n + grain - 1) / grain;
}

void run_chunks(std::int64_t n, std::int64_t grain, Body body) {
  char begun = 0, ended = 0;
  ZG_TSAN_RELEASE(&begun);
  tbb::parallel_for(
      std::int64_t{0}, chunk_count(n, grain),
      [&](std::int64_t i) {
        ZG_TSAN_ACQUIRE(&begun);
        body(i * grain, std::min(n, (i + 1) * grain));
        ZG_TSAN_RELEASE(&ended);
      },
      tbb::simple_partitioner());
  ZG_TSAN_ACQUIRE(&ended);
}

// Executes `run` on the calling thread, or on a worker instead while all slots of the arena are taken.
template <class F>
void execute_in(tbb::task_arena& arena, const F& run) {
  char begun = 0, ended = 0;
  ZG_TSAN_RELEASE(&begun);
  arena.execute([&] {
    ZG_TSAN_ACQUIRE(&begun);
    run();
    ZG_TSAN_RELEASE(&ended);
  });
  ZG_TSAN_ACQUIRE(&ended);
}

// How many addresses of a loop's memory the system is asked about, to learn their nodes. Contiguous memory
// mostly lies on one node, and each address costs a quarter of a microsecond.
constexpr std::size_t kPlaces = 8;

// Isolated: a thread that waits for the last chunks of its loop takes no chunks of another loop, which may be
// long.
void run_isolated(std::int64_t n, std::int64_t grain, Body body) {
  tbb::this_task_arena::isolate([&] { run_chunks(n, grain, body); });
}

// Runs a loop on the only team.
void run_in(Team& team, std::int64_t n, std::int64_t grain, Body body) {
  std::unique_lock turn(team.turn, std::defer_lock);
  if (team.threads == 1) turn.lock();
  execute_in(team.arena, [&] {
    const Inside inside;  // so that a loop within this loop does not wait for the turn
    run_isolated(n, grain, body);
  });
}

// A loop over several teams. Its chunks are divided into parts. Each part belongs to one team, and other
// teams may help with it. The loop is done when its chunks are done, even if some team has not started yet. A
// team that starts later finds nothing to do, but it accesses the loop, so the loop's memory lives until the
// last team has come.
class SharedLoop {
 public:
  struct Drop {
    void operator()(SharedLoop* loop) const {
      if (loop->users_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete loop;
    }
  };
  using Use = std::unique_ptr<SharedLoop, Drop>;

  SharedLoop(Pool& threads, std::int64_t n, std::int64_t grain, Body body)
      : pool_(threads),
        n_(n),
        grain_(grain),
        body_(body),
        part_(std::max(threads.teams.size(), kPlaces)),
        left_(chunk_count(n, grain)) {}

  // Adds the part from the end of the previous one up to chunk `end`.
  void add_part(std::int64_t end, int team) {
    const std::int64_t begin = parts_ == 0 ? 0 : part_[static_cast<std::size_t>(parts_ - 1)].end;
    if (end <= begin) return;
    Part& part = part_.at(static_cast<std::size_t>(parts_++));
    part.next.store(begin, std::memory_order_relaxed);
    part.end = end;
    part.team = team;
  }
  // Wakes all teams that have a part, works in the team `own`, and waits for the others. Called after all
  // parts were added.
  void run(int own) {
    ZG_TSAN_RELEASE(this);
    for (std::size_t t = 0; t < pool_.teams.size(); ++t) {
      const int team = static_cast<int>(t);
      if (team == own || !has_part_of(team)) continue;
      users_.fetch_add(1, std::memory_order_relaxed);
      pool_.called.fetch_add(1, std::memory_order_relaxed);
      pool_.teams[t]->arena.enqueue([loop = this, team] { loop->answer_call(team); });
    }
    if (has_part_of(own)) execute_in(pool_.teams[static_cast<std::size_t>(own)]->arena, [&] { work(own); });
    wait();
  }

 private:
  struct alignas(64) Part {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
    int team = 0;
  };

  bool has_part_of(int team) const {
    return std::any_of(part_.begin(), part_.begin() + parts_, [&](const Part& p) { return p.team == team; });
  }
  // Run by a worker of the team that was called.
  void answer_call(int team) {
    ZG_TSAN_ACQUIRE(this);
    const Use use(this);
    work(team);
    pool_.called.fetch_sub(1, std::memory_order_release);
  }
  // Works with as many threads of the team as are available.
  void work(int team) {
    Team& workers = *pool_.teams[static_cast<std::size_t>(team)];
    std::unique_lock turn(workers.turn, std::defer_lock);
    if (workers.threads == 1) turn.lock();
    tbb::this_task_arena::isolate([&] {
      tbb::parallel_for(
          0, workers.threads, [this, team](int) { take_all(team); }, tbb::simple_partitioner());
    });
  }
  void take_all(int team) {
    ZG_TSAN_ACQUIRE(this);
    for (const bool own : {true, false}) {
      for (int p = 0; p < parts_; ++p) {
        Part& part = part_[static_cast<std::size_t>(p)];
        if ((part.team == team) == own) take_from(part);
      }
    }
  }
  void wait() {
    for (std::int64_t left = left_.load(std::memory_order_acquire); left > 0;
         left = left_.load(std::memory_order_acquire))
      left_.wait(left, std::memory_order_acquire);
    if (failed_.load(std::memory_order_relaxed)) std::rethrow_exception(failure_);
  }
  void take_from(Part& part) {
    std::int64_t done = 0;
    for (std::int64_t i; (i = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end; ++done) {
      if (failed_.load(std::memory_order_relaxed)) continue;
      try {
        body_(i * grain_, std::min(n_, (i + 1) * grain_));
      } catch (...) {
        if (!claimed_.exchange(true)) {
          failure_ = std::current_exception();
          failed_.store(true, std::memory_order_relaxed);  // wait() sees both by the release of left_
        }
      }
    }
    if (done > 0 && left_.fetch_sub(done, std::memory_order_acq_rel) == done) left_.notify_all();
  }

  Pool& pool_;
  const std::int64_t n_, grain_;
  const Body body_;
  std::vector<Part> part_;  // the first parts_ entries are used
  int parts_ = 0;
  std::atomic<int> users_{1};
  alignas(64) std::atomic<std::int64_t> left_;  // chunks that are not done yet
  std::atomic<bool> claimed_{false}, failed_{false};
  std::exception_ptr failure_;
};

// Divides the chunks in proportion to the teams' threads.
void divide(const Pool& p, SharedLoop& loop, std::int64_t chunks) {
  std::int64_t all = 0, sum = 0;
  for (const auto& team : p.teams) all += team->threads;
  for (std::size_t t = 0; t < p.teams.size(); ++t) {
    sum += p.teams[t]->threads;
    loop.add_part(chunks * sum / all, static_cast<int>(t));
  }
}

// For kPlaces addresses of the memory, finds the team of the node on which each lies; -1 if unknown. Returns
// false if all are unknown.
bool find_teams(const Pool& p, Near memory, std::array<int, kPlaces>& teams) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.address);
  std::array<void*, kPlaces> pages{};
  std::array<int, kPlaces> nodes{};
  for (std::size_t i = 0; i < kPlaces; ++i) {
    const std::uintptr_t at = begin + static_cast<std::uintptr_t>(memory.bytes) * (2 * i + 1) / (2 * kPlaces);
    pages[i] = reinterpret_cast<void*>(at / page * page);  // NOLINT: an address, for the system alone
  }
  if (syscall(SYS_move_pages, 0, kPlaces, pages.data(), nullptr, nodes.data(), 0) != 0) return false;
  for (std::size_t i = 0; i < kPlaces; ++i) teams[i] = p.team_of_node(nodes[i]);
  return std::any_of(teams.begin(), teams.end(), [](int team) { return team >= 0; });
}

bool divide_near(const Pool& p, SharedLoop& loop, std::int64_t chunks, Near memory) {
  std::array<int, kPlaces> teams{};
  if (memory.bytes < kAskBytes || !find_teams(p, memory, teams)) return false;
  // An address whose team is unknown gets the team of the address before it, or else the first known team.
  int team = *std::find_if(teams.begin(), teams.end(), [](int t) { return t >= 0; });
  for (std::size_t i = 0; i < kPlaces; ++i) {
    if (teams[i] >= 0) team = teams[i];
    loop.add_part(chunks * static_cast<std::int64_t>(i + 1) / static_cast<std::int64_t>(kPlaces), team);
  }
  return true;
}

void run_shared(Pool& p, Near memory, std::int64_t n, std::int64_t grain, Body body) {
  const SharedLoop::Use loop(new SharedLoop(p, n, grain, body));
  const std::int64_t chunks = chunk_count(n, grain);
  if (!divide_near(p, *loop, chunks, memory)) divide(p, *loop, chunks);
  loop->run(p.team_here());
}

void use_pool(std::unique_ptr<Pool> next) {
  pool.store(next.get(), std::memory_order_release);
  pool_owner = std::move(next);
}

// Runs a loop in which `threads` threads wait for each other, for at most 50 ms: so TBB starts that many.
void meet(int threads) {
  std::atomic<int> there{0};
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  run_chunks(threads, 1, [&](std::int64_t, std::int64_t) {
    there.fetch_add(1);
    while (there.load() < threads && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  });
}

// oneTBB starts its threads with the first loops, and ends the process if the system refuses a thread. So its
// threads are started here, right after a test that the system grants as many. oneTBB keeps them.
void start_workers(int threads) {
  static int started = 1;  // guarded by setting_mutex; the caller of a loop is one
  if (threads <= started) return;
  try_threads("zg-compute", threads - started);
  started = threads;
  const Pool* const p = pool.load();
  if (p == nullptr) return meet(threads);
  for (const auto& team : p->teams) team->arena.execute([&] { meet(team->threads); });
}

// Why the system refuses to bind threads to these cores; empty if it allows it. Tries it on a temporary
// thread, whose binding ends with it.
std::string why_not_bound(const CoreAssignment& cores) {
  std::string why;
  NamedThread("zg-bind", [&] {
    for (const NodeCores& node : cores.nodes) {
      const int error = node.threads > 0 ? bind_this_thread(node.compute) : 0;
      if (error != 0 && why.empty())
        why = fmt::format("cores {}: {}", format_cpu_list(node.compute), errno_text(error));
    }
  }).join();
  return why;
}

}  // namespace

void parallel_for(std::int64_t n, std::int64_t grain, Body body) {
  parallel_for(Near{}, n, grain, body);
}

void parallel_for(Near memory, std::int64_t n, std::int64_t grain, Body body) {
  ZG_ASSERT_GE(grain, 1);
  if (chunk_count(n, grain) <= 1) {
    if (n > 0) body(0, n);
    return;
  }
  Pool* const p = pool.load(std::memory_order_acquire);
  if (p == nullptr) {
    run_chunks(n, grain, body);
  } else if (here.inside) {
    run_isolated(n, grain, body);
  } else if (p->teams.size() == 1) {
    run_in(*p->teams.front(), n, grain, body);
  } else {
    run_shared(*p, memory, n, grain, body);
  }
}

int parallelism() {
  const int set = thread_count.load(std::memory_order_relaxed);
  return set > 0 ? set : tbb::info::default_concurrency();
}

void set_parallelism(int count) {
  ZG_ASSERT_GE(count, 1);
  CoreAssignment one;
  one.nodes.push_back({.node = 0, .compute = usable_cores(), .threads = count});
  (void)set_parallelism(one);  // nothing is bound
}

std::string set_parallelism(const CoreAssignment& cores) {
  std::lock_guard lock(setting_mutex);
  const std::string why_not = cores.bind ? why_not_bound(cores) : std::string();
  thread_count.store(cores.threads());
  use_pool(nullptr);
  control.reset();
  if (cores.bind && why_not.empty()) {
    use_pool(std::make_unique<Pool>(cores, true));
  } else if (cores.threads() < tbb::info::default_concurrency()) {
    CoreAssignment one;
    one.nodes.push_back({.node = 0, .threads = cores.threads()});
    use_pool(std::make_unique<Pool>(one, false));
  } else {
    control.emplace(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(cores.threads()));
  }
  start_workers(cores.threads());
  return why_not;
}

}  // namespace zg
