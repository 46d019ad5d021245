// Host memory: what bytes allow can be had, nothing passes the budget, the steady state is free, and the
// pages are what was asked for.
#include "ziggurat/device/memory.hpp"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "support/count_allocations.hpp"
#include "support/errors.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096, kUnit = 2 * kMiB;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // these make system calls and allocate where we do not
#else
constexpr bool kSanitized = false;
#endif

std::int64_t faults_of_this_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

bool huge_pages_are_on() {
  std::string text;
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/enabled");
  std::getline(in, text);
  return text.find("[always]") != std::string::npos || text.find("[madvise]") != std::string::npos;
}

// Two phases that want other sizes, each the whole budget, as a training step's do.
struct Phases {
  static constexpr std::int64_t kBudget = 24 * kMiB;
  std::unique_ptr<HostMemory> memory = make_host_memory({.name = "test", .budget = kBudget});
  std::vector<std::pair<char*, std::int64_t>> held = std::vector<std::pair<char*, std::int64_t>>(64);

  // Returns false when something was refused.
  bool phase(std::int64_t bytes) {
    std::size_t n = 0;
    for (std::int64_t left = kBudget; left >= bytes; left -= bytes, ++n) {
      held[n] = {static_cast<char*>(memory->allocate(bytes)), bytes};
      if (held[n].first == nullptr) return false;
      for (std::int64_t i = 0; i < bytes; i += kPage) held[n].first[i] = 1;
    }
    for (std::size_t i = 0; i < n; i += 2) memory->release(held[i].first, bytes);
    for (std::size_t i = 1; i < n; i += 2) memory->release(held[i].first, bytes);
    return true;
  }
  bool step() { return phase(3 * kMiB) && phase(8 * kMiB) && phase(5 * kMiB + kPage) && phase(512 * kKiB); }
};

TEST(HostMemory, TheSteadyStateNeitherFaultsNorAllocates) {
  if (kSanitized) GTEST_SKIP() << "sanitizers do";
  int hooks = 0;
  Phases phases;
  phases.memory->set_hooks({[&](void*, std::int64_t) { ++hooks; }, [&](void*, std::int64_t) { ++hooks; }});
  ASSERT_TRUE(phases.step() && phases.step());
  const int hooks_before = hooks;
  const std::int64_t allocations = allocations_of_this_thread(), faults = faults_of_this_thread();
  bool given = true;
  for (int i = 0; i < 10; ++i) given = phases.step() && given;
  EXPECT_EQ(faults_of_this_thread() - faults, 0);
  EXPECT_EQ(allocations_of_this_thread() - allocations, 0);
  EXPECT_TRUE(given);
  EXPECT_EQ(hooks, hooks_before);
  EXPECT_EQ(phases.memory->report().regathered, 0);
  phases.memory->set_hooks({});
}

// A process in the strict mode of seccomp is killed at its first system call but read, write and exit.
TEST(HostMemoryDeathTest, TheSteadyStateMakesNoSystemCall) {
  if (kSanitized) GTEST_SKIP() << "sanitizers do";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        Phases phases;
        if (!phases.step() || !phases.step()) _exit(3);
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) _exit(4);
        const bool given = phases.step() && phases.step();
        syscall(SYS_exit, given ? 0 : 5);
      },
      testing::ExitedWithCode(0), "");
}

// A budget, and whether the hooks keep the chunks.
class Fragmented : public testing::TestWithParam<std::tuple<std::int64_t, bool>> {};

// Against the plainest model there is: a sum.
TEST_P(Fragmented, OnlyBytesDecide) {
  const std::uint64_t seed = test_seed(23);
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto [budget, keeps] = GetParam();
  std::map<char*, std::int64_t> hooked;
  std::set<char*> left;  // pages of chunks that are kept
  bool over = false;
  const auto memory = make_host_memory({.name = "test", .budget = budget});
  const auto unmapped = [&, kept = keeps](void* data, std::int64_t bytes) {
    EXPECT_TRUE(over || !kept) << "a chunk was reported as unmapped before the end";
    const auto it = hooked.find(static_cast<char*>(data));
    ASSERT_NE(it, hooked.end());
    EXPECT_EQ(it->second, bytes);
    hooked.erase(it);
  };
  memory->set_hooks({[&](void* data, std::int64_t bytes) {
                       EXPECT_TRUE(hooked.emplace(static_cast<char*>(data), bytes).second);
                     },
                     unmapped, keeps});
  struct Buffer {
    char* data;
    std::int64_t bytes;
    char mark;
  };
  std::vector<Buffer> held;
  const auto intact = [](const Buffer& b) {
    for (std::int64_t i = 0; i < b.bytes; i += kPage) {
      if (b.data[i] != b.mark) return false;
    }
    return b.data[b.bytes - 1] == b.mark;
  };
  std::int64_t in_use = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    if (random() % 2 == 0 || held.empty()) {
      // Many small ones and some that are a good part of the budget.
      const std::int64_t most = random() % 4 == 0 ? budget : budget / 12;
      const auto bytes = static_cast<std::int64_t>(
          1 + random() % static_cast<std::uint64_t>(std::max<std::int64_t>(1, most)));
      auto* data = static_cast<char*>(memory->allocate(bytes));
      ASSERT_EQ(data != nullptr, in_use + arena_charge(bytes) <= budget) << "at " << i;
      if (data == nullptr) {
        ++refused;
        continue;
      }
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(data) % kPage, 0u);
      const auto again = left.lower_bound(data);
      ASSERT_TRUE(again == left.end() || *again >= data + bytes) << "at " << i;
      in_use += arena_charge(bytes);
      held.push_back({data, bytes, static_cast<char>(1 + i % 100)});
      for (std::int64_t at = 0; at < bytes; at += kPage) data[at] = held.back().mark;
      data[bytes - 1] = held.back().mark;
    } else {
      std::swap(held[random() % held.size()], held.back());
      ASSERT_TRUE(intact(held.back())) << "at " << i;
      memory->release(held.back().data, held.back().bytes);
      in_use -= arena_charge(held.back().bytes);
      held.pop_back();
    }
    ASSERT_EQ(memory->in_use(), in_use);
    if (i % 100 != 0) continue;
    const HostMemoryReport report = memory->report();
    ASSERT_LE(report.taken, budget);
    ASSERT_LE(report.resident, report.taken) << "the kernel's count, at " << i;
    std::int64_t bytes = 0;
    for (const auto& [data, size] : hooked) {
      bytes += size;
      // Who holds a chunk, a driver say, would still reach pages that have gone.
      std::vector<unsigned char> there(static_cast<std::size_t>(size / kPage));
      ASSERT_EQ(mincore(data, static_cast<std::size_t>(size), there.data()), 0);
      for (std::size_t page = 0; page < there.size(); ++page) {
        if ((there[page] & 1) != 0) continue;
        ASSERT_TRUE(keeps) << "at " << i;
        left.insert(data + static_cast<std::int64_t>(page) * kPage);  // where they are now, no chunk reaches
      }
    }
    ASSERT_LE(bytes, budget);
    ASSERT_EQ(report.chunks, static_cast<std::int64_t>(hooked.size()));
  }
  EXPECT_EQ(left.empty(), !keeps);
  EXPECT_GT(refused, 0);
  EXPECT_GT(memory->report().regathered, 0) << "it was never fragmented";
  EXPECT_LE(memory->peak(), budget);
  for (const Buffer& b : held) {
    EXPECT_TRUE(intact(b));
    memory->release(b.data, b.bytes);
  }
  over = true;
  memory->set_hooks({});
  EXPECT_TRUE(hooked.empty());
}
INSTANTIATE_TEST_SUITE_P(Budgets, Fragmented,
                         testing::Combine(testing::Values(16 * kPage, 100 * kPage + 77, 3 * kMiB, 24 * kMiB,
                                                          37 * kMiB + 5 * kPage),
                                          testing::Bool()));

TEST(HostMemory, PagesAreHugeWhereTheyMayBe) {
  if (!huge_pages_are_on()) GTEST_SKIP() << "this kernel gives no huge pages";
  constexpr std::int64_t kBudget = 32 * kMiB;
  for (const bool huge : {true, false}) {
    const auto memory = make_host_memory({.name = "test", .budget = kBudget, .huge_pages = huge});
    std::vector<void*> held;
    for (int i = 0; i < 32; ++i) held.push_back(memory->allocate(kMiB));
    const HostMemoryReport report = memory->report();
    EXPECT_EQ(report.taken, kBudget);
    EXPECT_EQ(report.resident, kBudget);
    // A fragmented machine may not have them all.
    EXPECT_GE(report.huge, huge ? kBudget / 2 : 0);
    EXPECT_LE(report.huge, huge ? kBudget : 0);
    for (void* data : held) memory->release(data, kMiB);
  }
}

// Each small page is a fault of the thread that takes it. On a busy machine one thread may be done before
// another has come.
TEST(HostMemory, ManyPagesAreTakenByManyThreads) {
  if (parallelism() == 1) GTEST_SKIP() << "there is one core";
  constexpr std::int64_t kBudget = 256 * kMiB;
  std::int64_t fewest = kBudget / kPage;
  for (int i = 0; i < 20 && fewest == kBudget / kPage; ++i) {
    const auto memory = make_host_memory({.name = "test", .budget = kBudget, .huge_pages = false});
    const std::int64_t before = faults_of_this_thread();
    void* const data = memory->allocate(kBudget);
    ASSERT_NE(data, nullptr);
    fewest = std::min(fewest, faults_of_this_thread() - before);
    EXPECT_EQ(memory->report().resident, kBudget) << "no page was left out";
    memory->release(data, kBudget);
  }
  EXPECT_LT(fewest, kBudget / kPage);
}

TEST(HostMemory, HooksSeeChunksNotBuffers) {
  std::map<char*, std::int64_t> chunks;
  const auto memory = make_host_memory({.name = "test", .budget = 256 * kMiB});
  memory->set_hooks({[&](void* data, std::int64_t bytes) { chunks[static_cast<char*>(data)] = bytes; },
                     [&](void* data, std::int64_t) { chunks.erase(static_cast<char*>(data)); }});
  std::vector<char*> held;
  for (int i = 0; i < 64; ++i) held.push_back(static_cast<char*>(memory->allocate(64 * kKiB)));
  EXPECT_EQ(chunks.size(), 1u);
  for (char* data : held) {
    const auto after = chunks.upper_bound(data);
    ASSERT_NE(after, chunks.begin());
    EXPECT_LE(data + 64 * kKiB, std::prev(after)->first + std::prev(after)->second);
    memory->release(data, 64 * kKiB);
  }
  memory->set_hooks({});
  EXPECT_TRUE(chunks.empty());
}

TEST(HostMemory, HooksSeeEveryChunkGoThatLosesPages) {
  std::vector<std::int64_t> gone;
  const auto memory = make_host_memory({.name = "test", .budget = 32 * kUnit});  // chunks of a unit
  memory->set_hooks({[](void*, std::int64_t) {}, [&](void*, std::int64_t bytes) { gone.push_back(bytes); }});
  std::vector<void*> held;
  for (int i = 0; i < 32; ++i) held.push_back(memory->allocate(kUnit));
  ASSERT_EQ(memory->report().chunks, 32);
  for (const std::size_t i : {8, 9, 10, 11, 20}) memory->release(held[i], kUnit);
  void* large = memory->allocate(5 * kUnit);  // of a hole of four chunks and one of one
  ASSERT_NE(large, nullptr);
  EXPECT_EQ(gone, std::vector<std::int64_t>(5, kUnit));
  memory->release(large, 5 * kUnit);
  for (std::size_t i = 0; i < 32; ++i) {
    if (i < 8 || (i > 11 && i != 20)) memory->release(held[i], kUnit);
  }
  memory->set_hooks({});
  EXPECT_EQ(gone.size(), 32u);
}

TEST(HostMemory, HooksThatKeepChunksSeeThemGoAtTheEndAlone) {
  std::vector<std::int64_t> gone;
  const auto memory = make_host_memory({.name = "test", .budget = 32 * kUnit});  // chunks of a unit
  memory->set_hooks(
      {[](void*, std::int64_t) {}, [&](void*, std::int64_t bytes) { gone.push_back(bytes); }, true});
  std::vector<void*> held;
  for (int i = 0; i < 32; ++i) held.push_back(memory->allocate(kUnit));
  ASSERT_EQ(memory->report().chunks, 32);
  const HostMemoryReport before = memory->report();
  for (const std::size_t i : {8, 9, 10, 11, 20}) memory->release(held[i], kUnit);
  void* large = memory->allocate(5 * kUnit);  // of a hole of four chunks and one of one
  ASSERT_NE(large, nullptr);
  EXPECT_TRUE(gone.empty()) << "a driver may wait for all that it does, before it lets memory go";
  const HostMemoryReport report = memory->report();
  EXPECT_EQ(report.chunks, 32);
  EXPECT_EQ(report.resident, before.resident);
  EXPECT_EQ(report.huge, before.huge) << "a huge page that moves stays one";
  EXPECT_EQ(report.regathered_bytes, 5 * kUnit);
  // Where pages have left nothing comes again, and what they came to is memory as any other.
  memory->release(large, 5 * kUnit);
  for (const std::size_t i : {8, 9, 10, 11, 20}) {
    held[i] = memory->allocate(kUnit);
    EXPECT_GE(held[i], large);
    EXPECT_LT(held[i], static_cast<char*>(large) + 5 * kUnit);
  }
  EXPECT_EQ(memory->report().regathered, 1);
  for (void* data : held) memory->release(data, kUnit);
  memory->set_hooks({});
  EXPECT_EQ(gone, std::vector<std::int64_t>(32, kUnit));
}

TEST(HostMemory, WhatIsAtHandTakesNothingFromTheSystem) {
  int mapped = 0;
  const auto memory = make_host_memory({.name = "test", .budget = 32 * kUnit});  // chunks of a unit
  memory->set_hooks({[&](void*, std::int64_t) { ++mapped; }, [](void*, std::int64_t) {}});
  EXPECT_EQ(memory->allocate_at_hand(kPage), nullptr) << "nothing was taken yet";
  void* const first = memory->allocate(kPage);
  const std::int64_t taken = memory->report().taken;
  ASSERT_EQ(taken, kUnit);
  void* const rest = memory->allocate_at_hand(kUnit - kPage);  // of the same chunk
  ASSERT_NE(rest, nullptr);
  EXPECT_EQ(memory->in_use(), kUnit);
  EXPECT_EQ(memory->allocate_at_hand(kPage), nullptr) << "the chunk is used up";
  EXPECT_EQ(memory->report().taken, taken);
  EXPECT_EQ(mapped, 1);
  memory->release(first, kPage);
  void* const again = memory->allocate_at_hand(kPage);
  EXPECT_EQ(again, first);
  memory->release(again, kPage);
  memory->release(rest, kUnit - kPage);
  memory->set_hooks({});
}

// Drives register memory on threads that may be waiting, under a lock of the store, for just this arena.
TEST(HostMemory, HooksMayWaitForThreadsThatUseTheArena) {
  const auto memory = make_host_memory({.name = "test", .budget = 32 * kUnit});
  std::atomic<int> mapped{0}, unmapped{0}, stuck{0};
  // Left behind where it hangs: its end would wait for the arena.
  const auto use_arena = [&] {
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> is_done = done->get_future();
    std::thread([&arena = *memory, done] {
      void* const data = arena.allocate_at_hand(kPage);
      if (data != nullptr) arena.release(data, kPage);
      (void)arena.in_use();
      done->set_value();
    }).detach();
    if (is_done.wait_for(std::chrono::seconds(20)) != std::future_status::ready) ++stuck;
  };
  memory->set_hooks({[&](void*, std::int64_t) { ++mapped, use_arena(); },
                     [&](void*, std::int64_t) { ++unmapped, use_arena(); }});
  std::vector<void*> held;
  for (int i = 0; i < 32 && stuck == 0; ++i) held.push_back(memory->allocate(kUnit));
  ASSERT_EQ(stuck, 0);
  EXPECT_EQ(mapped, 32);
  for (const std::size_t i : {8, 9, 20}) memory->release(held[i], kUnit);
  void* const large = memory->allocate(3 * kUnit);  // of holes that are too small
  ASSERT_NE(large, nullptr);
  EXPECT_EQ(unmapped, 3);
  EXPECT_EQ(stuck, 0);
  memory->release(large, 3 * kUnit);
  for (std::size_t i = 0; i < 32; ++i) {
    if (i != 8 && i != 9 && i != 20) memory->release(held[i], kUnit);
  }
  memory->set_hooks({});
  EXPECT_EQ(unmapped, 32);
  EXPECT_EQ(stuck, 0);
}

TEST(HostMemory, IsLockedIfAsked) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers turn mlock into nothing";
#endif
  constexpr std::int64_t kBudget = 4 * kUnit;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  if (geteuid() != 0 && limit.rlim_cur < 2 * static_cast<rlim_t>(kBudget))
    GTEST_SKIP() << "the memlock limit is too low";
  for (const bool keeps : {false, true}) {
    const auto memory = make_host_memory({.name = "test", .budget = kBudget, .pinned = true});
    memory->set_hooks({[](void*, std::int64_t) {}, [](void*, std::int64_t) {}, keeps});
    void* a = memory->allocate(kUnit);
    void* b = memory->allocate(kUnit);
    void* c = memory->allocate(2 * kUnit);
    EXPECT_EQ(memory->report().locked, kBudget);
    memory->release(a, kUnit);
    memory->release(c, 2 * kUnit);
    void* d = memory->allocate(2 * kUnit + kPage);  // fits no hole
    ASSERT_NE(d, nullptr);
    EXPECT_EQ(memory->report().regathered, 1);
    EXPECT_EQ(memory->report().locked, kBudget);
    EXPECT_EQ(memory->report().resident, kBudget);
    memory->release(d, 2 * kUnit + kPage);
    memory->release(b, kUnit);
  }
}

// Pages that cannot be moved are lost to nobody: the arena goes on with what its budget has.
TEST(HostMemory, AMoveThatTheSystemRefusesLeavesTheArenaInOrder) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need addresses themselves";
  constexpr std::int64_t kBudget = 8 * kUnit;
  const auto memory = make_host_memory({.name = "host memory", .budget = kBudget});
  memory->set_hooks({[](void*, std::int64_t) {}, [](void*, std::int64_t) {}, true});
  std::vector<void*> held;
  for (int i = 0; i < 8; ++i) held.push_back(memory->allocate(kUnit));
  for (const std::size_t i : {1, 3, 5}) memory->release(held[i], kUnit);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &none), 0);
  const Error error = error_of([&] { (void)memory->allocate(2 * kUnit); });
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  EXPECT_EQ(error.code(), Errc::kMemory);
  EXPECT_HAS(error.what(),
             "host memory: the system refused to move pages of host memory: Cannot allocate memory");
  EXPECT_HAS(error.hint(), "vm.max_map_count");
  EXPECT_EQ(memory->in_use(), 5 * kUnit);
  void* const again = memory->allocate(3 * kUnit);
  ASSERT_NE(again, nullptr);
  std::memset(again, 1, 3 * kUnit);
  const HostMemoryReport report = memory->report();
  EXPECT_EQ(report.taken, kBudget);
  EXPECT_EQ(report.resident, kBudget);
  EXPECT_EQ(memory->allocate(1), nullptr);
  memory->release(again, 3 * kUnit);
  for (const std::size_t i : {0, 2, 4, 6, 7}) memory->release(held[i], kUnit);
  memory->set_hooks({});
}

// An allocation that the system refuses half-way leaves the arena as it was.
void lock_too_much() {
  const MemoryLimits blind;
  const rlimit little{256 * 1024, 256 * 1024};
  if (setuid(65534) != 0 || setrlimit(RLIMIT_MEMLOCK, &little) != 0) _exit(77);
  const auto memory =
      make_host_memory({.name = "host memory", .budget = 8 * kMiB, .pinned = true, .limits = &blind});
  for (int i = 0; i < 2; ++i) {
    try {
      (void)memory->allocate(kMiB);
      _exit(3);
    } catch (const Error& e) {
      if (e.code() != Errc::kMemory || e.hint().find("ulimit -l") == std::string::npos) _exit(4);
    }
    if (memory->in_use() != 0 || memory->report().taken != 0 || memory->report().resident != 0) _exit(5);
  }
  _exit(0);
}
TEST(HostMemoryDeathTest, ARefusedLockIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers turn mlock into nothing";
#endif
  if (geteuid() != 0) GTEST_SKIP() << "must give up the right to lock";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(lock_too_much(), testing::ExitedWithCode(0), "");
}

TEST(HostMemory, ANodeIsPreferred) {
  const auto memory =
      make_host_memory({.name = "test", .budget = 4 * kUnit, .shares = {{0, 3 * kUnit}, {-1, kUnit}}});
  void* a = memory->allocate(3 * kUnit);
  void* b = memory->allocate(kUnit);
  const auto policy_at = [](void* data, unsigned long& nodes) {
    int mode = -1;
    nodes = 0;
    unsigned long mask[64] = {};
    if (syscall(SYS_get_mempolicy, &mode, mask, 8 * sizeof(mask), data, MPOL_F_ADDR) != 0) return -1;
    nodes = mask[0];
    return mode;
  };
  unsigned long nodes = 0;
  const int mode = policy_at(a, nodes);
  if (mode >= 0) {
    EXPECT_EQ(mode, MPOL_PREFERRED);
    EXPECT_EQ(nodes, 1u);
    EXPECT_EQ(policy_at(b, nodes), MPOL_DEFAULT) << "the next share's";
  }
  // The shares give way where bytes fit and no share has them in a row.
  memory->release(a, 3 * kUnit);
  memory->release(b, kUnit);
  void* all = memory->allocate(4 * kUnit);
  EXPECT_NE(all, nullptr);
  EXPECT_EQ(memory->report().taken, 4 * kUnit);
  memory->release(all, 4 * kUnit);
}

TEST(HostMemory, IsRefusedBeforeAnythingIsTaken) {
  MemoryLimits limits;
  limits.cgroup = {"/sys/fs/cgroup/run/memory.max", kGiB, kGiB / 2};
  const Error e =
      error_of([&] { (void)make_host_memory({.name = "tiers.host", .budget = kGiB, .limits = &limits}); });
  EXPECT_EQ(e.where(), "tiers.host");
  EXPECT_HAS(e.message(), "/sys/fs/cgroup/run/memory.max");
  limits = {};
  limits.nodes = {{0, 10 * kMiB}, {1, 20 * kMiB}};
  const HostMemoryOptions near{
      .name = "t", .budget = 15 * kMiB, .shares = {{0, 15 * kMiB}}, .limits = &limits};
  EXPECT_THROW(make_host_memory(near), Error);
  EXPECT_THROW(make_host_arena("t", std::int64_t{1} << 60), Error) << "by the machine's own limits";
}

}  // namespace
}  // namespace zg::test
