// The part of TensorStore that gives leases without a program, to any number of threads.

#include <algorithm>
#include <thread>
#include <utility>

#include "store/node.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

// Who has tried so often to get several at once, while others came and went, goes first.
constexpr int kPatientTries = 4;

std::size_t index(Tier tier) {
  return static_cast<std::size_t>(tier);
}

}  // namespace

Lease& Lease::operator=(Lease&& o) noexcept {
  if (this != &o) {
    release();
    store_ = std::exchange(o.store_, nullptr);
    node_ = std::exchange(o.node_, nullptr);
    segment_ = o.segment_;
    entry_ = std::exchange(o.entry_, nullptr);
    tier_ = o.tier_;
    writes_ = o.writes_;
    made_ = o.made_;
    data_ = std::exchange(o.data_, nullptr);
    bytes_ = std::exchange(o.bytes_, 0);
  }
  return *this;
}

void Lease::release() {
  if (store_ == nullptr) return;
  TensorStore* store = std::exchange(store_, nullptr);
  data_ = nullptr;
  if (node_ != nullptr) {
    store->end_use(*std::exchange(node_, nullptr));
  } else {
    store->end_lease(segment_, tier_, writes_, entry_);
  }
}

void Lease::release_after(Stream& stream, const Event& event) {
  if (store_ == nullptr) return;
  TensorStore* store = std::exchange(store_, nullptr);
  data_ = nullptr;
  if (Node* node = std::exchange(node_, nullptr)) {
    store->pass(*node, stream);
    event.on_done([store, node] { store->end_use(*node); });
    return;
  }
  store->pass(segment_, tier_, entry_, stream);
  event.on_done(
      [store, id = segment_, tier = tier_, writes = writes_] { store->end_passed(id, tier, writes); });
}

Pin& Pin::operator=(Pin&& o) noexcept {
  if (this != &o) {
    release();
    store_ = std::exchange(o.store_, nullptr);
    segment_ = o.segment_;
    tier_ = o.tier_;
  }
  return *this;
}

void Pin::release() {
  if (store_ != nullptr) std::exchange(store_, nullptr)->unpin(segment_, tier_);
}

// What the calling thread holds of this store.
TensorStore::Holder& TensorStore::holder() {
  struct Last {
    std::uint64_t store = 0;
    Holder* holder = nullptr;
  };
  thread_local Last last;
  if (last.store == identity_) return *last.holder;
  const std::thread::id thread = std::this_thread::get_id();
  std::lock_guard lock(holders_mutex_);
  const auto it =
      std::find_if(holders_.begin(), holders_.end(), [&](const auto& h) { return h->thread == thread; });
  Holder& found = it != holders_.end() ? **it : *holders_.emplace_back(std::make_unique<Holder>());
  found.thread = thread;
  last = {identity_, &found};
  return found;
}

// That this thread holds it. Before the word is counted up, so that nobody sees a lease that no thread has.
std::atomic<const Hot*>* TensorStore::note(const Hot& h) {
  Holder& mine = holder();
  const auto free_in = [&](std::size_t block, std::size_t from) -> Holder::Entry* {
    Holder::Entry* const entries = mine.blocks[block].load(std::memory_order_relaxed);
    const std::size_t size = Holder::size(block);
    for (std::size_t n = 0; n < size; ++n) {
      const std::size_t i = (from + n) % size;
      if (entries[i].load(std::memory_order_relaxed) != nullptr) continue;
      mine.block = block;
      mine.next = i + 1;
      entries[i].store(&h, std::memory_order_relaxed);
      return &entries[i];
    }
    return nullptr;
  };
  if (Holder::Entry* entry = free_in(mine.block, mine.next)) return entry;
  for (std::size_t block = 0;; ++block) {
    ZG_ASSERT_LT(block, Holder::kBlocks);
    if (mine.blocks[block].load(std::memory_order_relaxed) == nullptr) mine.add(block);
    if (Holder::Entry* entry = free_in(block, 0)) return entry;
  }
}

void TensorStore::note_off(std::atomic<const Hot*>* entry) {
  entry->store(nullptr, std::memory_order_relaxed);
}

// A lease on a copy of which the word has been counted up already.
void TensorStore::fill(Lease& lease, SegmentId id, Tier tier, Access access, std::atomic<const Hot*>* entry) {
  Hot& h = hot(id);
  lease.entry_ = entry;
  h.last_use.store(tick(), std::memory_order_relaxed);
  lease.store_ = this;
  lease.segment_ = id;
  lease.made_ = false;
  lease.tier_ = tier;
  lease.writes_ = access != Access::kRead;
  lease.data_ = h.memory[index(tier)];
  lease.bytes_ = h.bytes;
}

bool TensorStore::take_fast(Lease& lease, SegmentId segment, Tier tier, Access access) {
  Hot& h = hot(segment);
  auto& word = h.word[index(tier)];
  const bool reads = access == Access::kRead;
  const std::uint64_t needed = reads ? Hot::kOpen : Hot::kOpen | Hot::kSole;
  std::uint64_t w = word.load(std::memory_order_relaxed);
  if (failed_.load(std::memory_order_relaxed)) return false;
  const auto may_take = [&] {
    if ((w & (needed | Hot::kWaited)) != needed) return false;
    return reads ? Hot::writers(w) == 0 : (w & Hot::kLeases) == 0;
  };
  if (!may_take()) return false;
  auto* const entry = note(h);
  while (!word.compare_exchange_weak(w, w + (reads ? Hot::kReader : Hot::kWriter), std::memory_order_acq_rel,
                                     std::memory_order_relaxed)) {
    if (may_take()) continue;
    note_off(entry);
    return false;
  }
  h.hits[index(tier)].fetch_add(1, std::memory_order_relaxed);
  fill(lease, segment, tier, access, entry);
  return true;
}

Lease TensorStore::acquire(SegmentId segment, Tier tier, Access access, Stream* consumer) {
  check_access(segment, tier);
  Lease lease;
  if (!take_fast(lease, segment, tier, access)) {
    Lock lock(mutex_);
    if (program_ != nullptr) return acquire_in_program(lock, segment, tier, access, consumer);
    Waiter waiter(*this, {segment, tier, access, false}, consumer);
    while (!try_take(lock, waiter, lease)) wait(lock, waiter);
  }
  if (logging_.load(std::memory_order_relaxed)) log_access(segment, tier, access);
  return lease;
}

// Waits, while nothing is held, for the one that could not be had; then tries the others.
void TensorStore::acquire(std::span<const AccessStep> accesses, std::vector<Lease>& out, Stream* consumer) {
  out.clear();
  check_together(accesses);
  Lock lock(mutex_);
  ZG_ASSERT(program_ == nullptr, "with a program, its operations are acquired");
  const std::size_t n = accesses.size();
  std::size_t first = 0;
  int tries = 0;
  // Which could not be had; n: all were.
  const auto take_all = [&] {
    out.resize(n);
    for (std::size_t k = 0; k < n; ++k) {
      const std::size_t i = (first + k) % n;
      Waiter waiter(*this, accesses[i], consumer);
      waiter.gives_back = k + 1 < n;
      waiter.goes_first = goes_first_ == &tries;
      while (!try_take(lock, waiter, out[i])) {
        if (k > 0 && waiter.obstacle != Obstacle::kMoving) {
          if (waiter.obstacle != Obstacle::kRoom || others_can_release(waiter)) return i;
          // Once more in line, since only then are we told of what is released.
          if (waiter.in_line) throw_no_room(waiter, false);
        }
        wait(lock, waiter);
      }
    }
    return n;
  };
  const auto end_turn = [&] {
    if (goes_first_ == &tries) goes_first_ = nullptr, wake();
  };
  try {
    while ((first = take_all()) != n) {
      let_go(lock, out);
      if (++tries >= kPatientTries && goes_first_ == nullptr) goes_first_ = &tries;
    }
  } catch (...) {
    let_go(lock, out);
    end_turn();
    throw;
  }
  end_turn();
  lock.unlock();
  if (logging_.load(std::memory_order_relaxed)) {
    for (const AccessStep& a : accesses) log_access(a.segment, a.tier, a.access);
  }
}

// What had no content before has none again.
void TensorStore::let_go(Lock& lock, std::vector<Lease>& leases) {
  for (const Lease& lease : leases) {
    if (!lease || !lease.made_) continue;
    for (auto& word : hot(lease.segment_).word) word.fetch_and(~(Hot::kOpen | Hot::kSole));
    residency_.discard(lease.segment_, actions_);
  }
  add_actions(lock, Urgency::kDemand);
  lock.unlock();
  leases.clear();
  lock.lock();
}

// What can never be had together must not be tried for ever.
void TensorStore::check_together(std::span<const AccessStep> accesses) const {
  std::array<std::int64_t, 2> bytes{};
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    const AccessStep& a = accesses[i];
    check_access(a.segment, a.tier);
    const auto same = [&](const AccessStep& b) { return b.segment == a.segment; };
    if (std::any_of(accesses.begin(), accesses.begin() + static_cast<std::ptrdiff_t>(i), same))
      throw Error(Errc::kUsage, table_.segment_name(a.segment), "is named twice in one acquire",
                  "name each segment once");
    bytes[index(a.tier)] += table_.segment(a.segment).charge_at(a.tier);
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (bytes[index(tier)] <= residency_.budget(tier)) continue;
    throw Error(
        Errc::kMemory, name_of(tier) + std::string(" tier"),
        fmt::format("no room for {} segments ({}) at once: they pass the budget of {}", accesses.size(),
                    format_bytes(bytes[index(tier)]), format_bytes(residency_.budget(tier))),
        "acquire fewer at once, or raise this tier's budget");
  }
}

void TensorStore::check_access(SegmentId segment, Tier tier) const {
  if (segment < 0 || segment >= segment_count_)
    throw Error(Errc::kUsage, "acquire",
                fmt::format("there is no segment {}, but {} of them", segment, segment_count_),
                "take the numbers from the table of the store");
  if (tier == Tier::kNvme)
    throw Error(Errc::kUsage, "acquire", "nobody can see bytes on NVMe", "acquire at the device or the host");
}

bool TensorStore::close_for_write(SegmentId segment) {
  for (auto& word : hot(segment).word) {
    std::uint64_t w = word.load();
    do {
      if ((w & Hot::kLeases) != 0) {
        refresh(segment);
        return false;
      }
    } while (!word.compare_exchange_weak(w, w & ~(Hot::kOpen | Hot::kSole)));
  }
  return true;
}

// A copy may be made while others read, not while they write. What cleared the flag must refresh() it.
bool TensorStore::close_to_writers(SegmentId segment) {
  for (auto& word : hot(segment).word) {
    std::uint64_t w = word.load();
    do {
      if (Hot::writers(w) > 0) {
        refresh(segment);
        return false;
      }
    } while (!word.compare_exchange_weak(w, w & ~Hot::kSole));
  }
  return true;
}

// Takes the lease, or says in the waiter what stands against it, having begun what can be begun.
bool TensorStore::try_take(Lock& lock, Waiter& w, Lease& lease) {
  const SegmentId id = w.step.segment;
  const Tier tier = w.step.tier;
  const bool keeps = w.gives_back && w.step.access == Access::kOverwrite && residency_.has_content(id);
  const Access access = keeps ? Access::kWrite : w.step.access;
  SegmentState& s = at(id);
  Hot& h = hot(id);
  const std::size_t t = index(tier);
  const bool reads = access == Access::kRead;
  const auto hindered = [&](Obstacle obstacle, SegmentId moving = -1) {
    w.obstacle = obstacle;
    w.moving = moving;
    w.seen = changes_;
    return false;
  };
  throw_failure();
  if (w.taken) {
    if ((h.word[t].load() & Hot::kOpen) == 0) return hindered(Obstacle::kMoving, id);
    w.taken = false;
    fill(lease, id, tier, access, w.entry);
    lease.made_ = w.made;
    ++s.counts.misses;
    ++tiers_[t].misses;
    return true;
  }
  if (in_the_way(w)) return hindered(Obstacle::kLeases);
  const auto ready = [&] { return residency_.present(id, tier) && (reads || residency_.sole(id, tier)); };
  if (!ready()) {
    if (std::exchange(w.decided, false)) --s.intents[t];
    if (s.first != nullptr) {
      demand(id);
      return hindered(Obstacle::kMoving, id);
    }
    if (table_.tensor(table_.segment(id).tensor).removed)
      throw Error(Errc::kUsage, table_.segment_name(id), "is accessed, and was removed",
                  "take the numbers from the table of the store");
    if (access != Access::kOverwrite && !residency_.has_content(id))
      throw Error(Errc::kUsage, table_.segment_name(id), "is read, and has no content",
                  "write it first (Access::kOverwrite)");
    if (is_behind(w)) return hindered(Obstacle::kLine);
    if (!(reads ? close_to_writers(id) : close_for_write(id))) return hindered(Obstacle::kLeases);
    const bool fresh = access == Access::kOverwrite && !residency_.present(id, tier);
    h.last_use.store(tick(), std::memory_order_relaxed);
    w.made = !residency_.has_content(id);
    const auto failure = residency_.decide_free({id, tier, access, false}, actions_);
    const bool writes_back = std::any_of(actions_.begin(), actions_.end(), [](const Action& a) {
      return a.kind == Action::Kind::kCopy && a.tier == Tier::kNvme;
    });
    if (fresh && !failure) {
      // While it is closed: nobody else may see what it holds before it is written.
      w.entry = note(h);
      h.word[t].fetch_add(Hot::kWriter);
      w.taken = true;
    }
    add_actions(lock, Urgency::kDemand);
    if (failure) {
      if (writes_back && options_.write_ahead) write_ahead(lock);
      refresh(id);
      if (failure->busy >= 0) {
        demand(failure->busy);
        return hindered(Obstacle::kMoving, failure->busy);
      }
      if (!kept_.empty()) {
        keep(nullptr);
        return try_take(lock, w, lease);
      }
      w.room = *failure;
      return hindered(Obstacle::kRoom);
    }
    used(id);
    w.missed = true;
    w.decided = true;
    ++s.intents[t];  // which keeps write_ahead() off it
    if (writes_back && options_.write_ahead) write_ahead(lock);
    throw_failure();
    if (w.taken) return try_take(lock, w, lease);
  }
  std::uint64_t word = h.word[t].load();
  const std::uint64_t needed = reads ? Hot::kOpen : Hot::kOpen | Hot::kSole;
  do {
    if ((word & needed) != needed) {
      demand(id);
      return hindered(Obstacle::kMoving, id);
    }
    // A fast one may have come in between.
    if ((word & Hot::kLeases) != 0 && in_the_way(w)) return hindered(Obstacle::kLeases);
  } while (!h.word[t].compare_exchange_weak(word, word + (reads ? Hot::kReader : Hot::kWriter)));
  fill(lease, id, tier, access, note(h));
  used(id);
  if (w.missed) {
    ++s.counts.misses;
    ++tiers_[t].misses;
  } else {
    h.hits[t].fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

void TensorStore::end_lease(SegmentId id, Tier tier, bool writes, std::atomic<const Hot*>* entry) {
  const std::uint64_t before = hot(id).word[index(tier)].fetch_sub(writes ? Hot::kWriter : Hot::kReader);
  // Held until those who wait are told, so that none of them takes it for lost.
  const auto clear = [this, entry] { note_off(entry); };
  // The waiter counts itself before it looks at the leases for the last time, and we look for it after the
  // lease has ended: one of us sees the other.
  if ((before & Hot::kWaited) == 0 && room_waiters_.load() == 0) {
    clear();
    return;
  }
  std::lock_guard lock(mutex_);
  clear();
  wake();
}

void TensorStore::pass(SegmentId id, Tier tier, std::atomic<const Hot*>* entry, Stream& stream) {
  std::lock_guard lock(mutex_);
  note_off(entry);
  SegmentState& s = at(id);
  const bool first = s.passed[0] + s.passed[1] == 0;
  s.passed_to = first || s.passed_to == &stream ? &stream : nullptr;
  ++s.passed[index(tier)];
  ++passed_;
  if (s.lease_waiters > 0) wake();  // one for the same stream may go on
}

void TensorStore::end_passed(SegmentId id, Tier tier, bool writes) {
  std::lock_guard lock(mutex_);
  --at(id).passed[index(tier)];
  --passed_;
  hot(id).word[index(tier)].fetch_sub(writes ? Hot::kWriter : Hot::kReader);
  wake();
}

bool TensorStore::held(SegmentId segment, Tier tier) const {
  const std::size_t t = index(tier);
  return (hot(segment).word[t].load() & Hot::kLeases) != 0 || at(segment).intents[t] > 0;
}

Gate::Closed TensorStore::close(SegmentId segment, Tier tier) {
  const std::size_t t = index(tier);
  if (held(segment, tier)) return Closed::kHeld;
  if (at(segment).first != nullptr) return Closed::kMoving;
  std::uint64_t w = hot(segment).word[t].load();
  do {
    if ((w & Hot::kLeases) != 0) return Closed::kHeld;
  } while (!hot(segment).word[t].compare_exchange_weak(w, w & ~(Hot::kOpen | Hot::kSole)));
  return Closed::kYes;
}

std::uint64_t TensorStore::last_use(SegmentId segment, Tier) const {
  return hot(segment).last_use.load(std::memory_order_relaxed);
}

}  // namespace zg
