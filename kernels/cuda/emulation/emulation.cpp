// The scheduler of an emulated block: its threads are fibers that switch at barriers and collectives.
#include "kernels/cuda/emulation/emulation.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/fiber.hpp"

namespace zg::emulation {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr int kWarp = 32;
constexpr unsigned kMaxThreads = 1024;

std::atomic<std::uint64_t> g_seed{1};
std::atomic<std::uint64_t> g_switches{0};
std::atomic<std::size_t> g_most_shared{kMostShared};

enum class State { kReady, kAtBarrier, kAtCollective, kDone };

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes, group;
};

// A thread of a block.
struct Thread {
  std::unique_ptr<Fiber> fiber;
  Place place;
  int index = 0;  // index in its block
  State state = State::kDone;
  unsigned mask = 0;         // of the collective in which it waits
  std::size_t bytes = 0;     // bytes that it contributed to the collective
  std::vector<Copy> copies;  // pending, in the order of their groups
  std::size_t groups = 0;    // committed groups
};

// given: the contributions of a warp's lanes to a collective. seen: a copy, which all lanes may read when all
// have arrived.
struct Warp {
  alignas(16) unsigned char given[kWarp][kMaxGiven];
  alignas(16) unsigned char seen[kWarp][kMaxGiven];
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

struct Block {
  const char* name = "";
  const std::function<void()>* kernel = nullptr;
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  std::unique_ptr<void, Free>
      shared;  // of exactly the requested size, so that a sanitizer finds accesses beyond
  std::uint64_t random = 0, switches = 0;
  std::vector<bool> late;  // warps that run only when no other can

  std::uint64_t draw() {  // xorshift64*
    random ^= random >> 12;
    random ^= random << 25;
    random ^= random >> 27;
    return random * 0x2545F4914F6CDD1Dull;
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[draw() % i]);
  }
};

thread_local Block* t_block = nullptr;
thread_local Thread* t_thread = nullptr;
// Stacks are the expensive part of a fiber, so each host thread reuses its fibers from block to block.
thread_local std::vector<std::unique_ptr<Thread>> t_kept;

void stop(State state) {
  t_thread->state = state;
  t_thread->fiber->suspend();
}

// Makes a thread, which is reused by later blocks.
std::unique_ptr<Thread> make_thread() {
  auto made = std::make_unique<Thread>();
  made->fiber = std::make_unique<Fiber>(kStackBytes, [] {
    while (true) {
      (*t_block->kernel)();
      stop(State::kDone);
    }
  });
  return made;
}

[[noreturn]] void broken(const Thread& f, const std::string& what) {
  const Place& p = f.place;
  assertion_failed(t_block->name, 0, "the kernel keeps CUDA's rules",
                   fmt::format("{}: block ({}, {}, {}), thread ({}, {}, {})", what, p.block.x, p.block.y,
                               p.block.z, p.thread.x, p.thread.y, p.thread.z));
}

const char* text_of(State state) {
  switch (state) {
    case State::kReady:
      return "runs";
    case State::kAtBarrier:
      return "waits at a barrier";
    case State::kAtCollective:
      return "waits in a warp collective";
    case State::kDone:
      return "has ended";
  }
  return "?";
}

void carry_out(const Copy& copy) {
  copy.from == nullptr ? std::memset(copy.to, 0, copy.bytes) : std::memcpy(copy.to, copy.from, copy.bytes);
}

// Marks fibers whose collective is complete as ready; false if there are none.
bool complete_collectives(Block& b) {
  bool any = false;
  for (Thread* f : b.threads) {
    if (f->state != State::kAtCollective) continue;
    const std::size_t first = static_cast<std::size_t>(f->index) / kWarp * kWarp;
    bool all = true;
    for (std::size_t l = 0; l < kWarp && all; ++l) {
      if ((f->mask >> l & 1) == 0) continue;
      if (first + l >= b.threads.size())
        broken(*f, fmt::format("a collective names lane {}, which the block lacks", l));
      const Thread& other = *b.threads[first + l];
      if (other.state == State::kDone)
        broken(*f, fmt::format("a collective waits for lane {}, which has ended", l));
      all = other.state == State::kAtCollective;
      if (all && (other.mask != f->mask || other.bytes != f->bytes))
        broken(*f, fmt::format("lane {} came to another collective (masks {:#x} and {:#x}, {} and {} bytes)",
                               l, other.mask, f->mask, other.bytes, f->bytes));
    }
    if (!all) continue;
    any = true;
    Warp& w = b.warps[first / kWarp];
    const unsigned mask = f->mask;
    for (std::size_t l = 0; l < kWarp; ++l) {
      if ((mask >> l & 1) == 0) continue;
      std::memcpy(w.seen[l], w.given[l], f->bytes);
      b.threads[first + l]->state = State::kReady;
    }
  }
  return any;
}

bool complete_barrier(Block& b) {
  const auto waits = [](const Thread* f) { return f->state == State::kAtBarrier; };
  if (!std::all_of(b.threads.begin(), b.threads.end(), waits)) return false;
  for (Thread* f : b.threads) f->state = State::kReady;
  return true;
}

// Draws at random which warps are late until the next barrier; half of the time none is. So a warp may get a
// whole loop ahead of another if no barrier prevents it.
void draw_late(Block& b) {
  const std::uint64_t drawn = b.draw(), warps = b.draw();
  for (std::size_t w = 0; w < b.late.size(); ++w)
    b.late[w] = drawn >> 63 != 0 && (warps >> (w % 32 + 16) & 1) != 0;
}

// Runs every ready fiber of the late warps, or of the other warps, once; false if there are none.
bool run_ready(Block& b, const std::vector<Thread*>& order, bool late) {
  bool any = false;
  for (Thread* f : order) {
    if (f->state != State::kReady || b.late[static_cast<std::size_t>(f->index / kWarp)] != late) continue;
    any = true;
    t_thread = f;
    ++b.switches;
    f->fiber->resume();
  }
  return any;
}

void run_block(Block& b) {
  std::vector<Thread*> order = b.threads;
  draw_late(b);
  while (true) {
    b.shuffle(order);
    if (run_ready(b, order, false) || complete_collectives(b) || run_ready(b, order, true)) continue;
    const auto waits = [](const Thread* f) { return f->state != State::kDone; };
    const auto stuck_at = std::find_if(b.threads.begin(), b.threads.end(), waits);
    if (stuck_at == b.threads.end()) return;
    if (complete_barrier(b)) {
      draw_late(b);
      continue;
    }
    const Thread& stuck = **stuck_at;
    const auto other = std::find_if(b.threads.begin(), b.threads.end(),
                                    [&](const Thread* f) { return f->state != stuck.state; });
    broken(stuck, fmt::format("{} for ever, for thread {} of the block {}", text_of(stuck.state),
                              other == b.threads.end() ? 0 : (*other)->index,
                              other == b.threads.end() ? "waits too" : text_of((*other)->state)));
  }
}

}  // namespace

const Place& place() {
  return t_thread->place;
}

int lane() {
  return t_thread->index % kWarp;
}

void* dynamic_shared() {
  return t_block->shared.get();
}

void trap() {
  broken(*t_thread, "the kernel trapped");
}

void check_access(const void* address, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0)
    broken(*t_thread, fmt::format("an access of {} bytes at an address that is no multiple of it", bytes));
}

void barrier() {
  stop(State::kAtBarrier);
}

void require(bool kept, const char* rule) {
  if (!kept) broken(*t_thread, fmt::format("it must be that {}", rule));
}

void start_copy(void* to, const void* from, std::size_t bytes) {
  const Copy copy{to, from, bytes, t_thread->groups};
  t_block->draw() % 2 == 0 ? carry_out(copy) : t_thread->copies.push_back(copy);
}

void commit_copies() {
  ++t_thread->groups;
}

void wait_copies(std::size_t left) {
  Thread& f = *t_thread;
  std::size_t done = 0;
  while (done < f.copies.size() && f.copies[done].group + left < f.groups) carry_out(f.copies[done++]);
  f.copies.erase(f.copies.begin(), f.copies.begin() + static_cast<std::ptrdiff_t>(done));
}

const void* gather(unsigned mask, const void* value, std::size_t bytes) {
  ZG_ASSERT_LE(bytes, kMaxGiven);
  Thread& f = *t_thread;
  if ((mask >> lane() & 1) == 0)
    broken(f, fmt::format("a collective of mask {:#x} without the lane that calls it", mask));
  Warp& w = t_block->warps[static_cast<std::size_t>(f.index / kWarp)];
  std::memcpy(w.given[lane()], value, bytes);
  f.mask = mask;
  f.bytes = bytes;
  stop(State::kAtCollective);
  return w.seen;
}

std::uint64_t exchange(unsigned mask, std::uint64_t value, int from) {
  const void* all = gather(mask, &value, sizeof(value));
  if ((mask >> from & 1) == 0)
    broken(*t_thread, fmt::format("a shuffle from lane {}, which is not in its mask {:#x}", from, mask));
  std::memcpy(&value, static_cast<const unsigned char*>(all) + static_cast<std::size_t>(from) * kMaxGiven,
              sizeof(value));
  return value;
}

unsigned vote(unsigned mask, bool predicate) {
  const auto* all = static_cast<const unsigned char*>(gather(mask, &predicate, 1));
  unsigned bits = 0;
  for (unsigned l = 0; l < kWarp; ++l) {
    if ((mask >> l & 1) != 0 && all[l * kMaxGiven] != 0) bits |= 1u << l;
  }
  return bits;
}

void run(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes,
         const std::function<void()>& kernel) {
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  ZG_ASSERT(threads >= 1 && threads <= kMaxThreads, "{}: blocks of {} threads", name, threads);
  ZG_ASSERT(shared_bytes <= most_shared(), "{}: {} bytes of shared memory", name, shared_bytes);
  ZG_ASSERT(grid.y <= 65535 && grid.z <= 65535 && grid.x <= 0x7fffffffu, "{}: a grid of {} x {} x {}", name,
            grid.x, grid.y, grid.z);
  ZG_ASSERT(t_block == nullptr, "{} is launched within a kernel", name);
  Block b;
  b.name = name;
  b.kernel = &kernel;
  b.random = (g_seed.load() + 1) * 0x9E3779B97F4A7C15ull | 1;
  b.warps.resize((threads + kWarp - 1) / kWarp);
  b.late.resize(b.warps.size());
  if (shared_bytes > 0) {
    void* memory = nullptr;
    ZG_ASSERT_EQ(posix_memalign(&memory, 128, shared_bytes), 0);
    b.shared.reset(memory);
  }
  while (t_kept.size() < threads) t_kept.push_back(make_thread());
  std::vector<std::uint64_t> blocks(std::size_t{grid.x} * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), std::uint64_t{0});
  b.shuffle(blocks);
  t_block = &b;
  for (const std::uint64_t at : blocks) {
    b.threads.clear();
    for (std::size_t i = 0; i < threads; ++i) {
      Thread& f = *t_kept[i];
      const auto t = static_cast<unsigned>(i);
      f.index = static_cast<int>(i);
      f.place.thread = {t % block.x, t / block.x % block.y, t / block.x / block.y};
      f.place.block = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                       static_cast<unsigned>(at / grid.x / grid.y)};
      f.place.block_size = block;
      f.place.grid_size = grid;
      f.state = State::kReady;
      f.copies.clear();
      f.groups = 0;
      b.threads.push_back(&f);
    }
    if (shared_bytes > 0) std::memset(b.shared.get(), 0xff, shared_bytes);
    run_block(b);
  }
  t_block = nullptr;
  g_switches.store(b.switches);
}

void set_seed(std::uint64_t seed) {
  g_seed.store(seed);
}

std::size_t most_shared() {
  return g_most_shared.load();
}

void set_most_shared(std::size_t bytes) {
  g_most_shared.store(bytes);
}

std::uint64_t switches() {
  return g_switches.load();
}

}  // namespace zg::emulation
