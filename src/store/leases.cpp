// LeaseTable, and the fast paths of acquire and release, which need no lock. They are in one file so that the
// compiler can inline them.
#include "store/leases.hpp"

#include <algorithm>
#include <utility>

#include "store/move_graph.hpp"
#include "store/parts.hpp"

namespace zg {
namespace {

// A number for each store of the process: a thread caches its Holder in the store that it used last.
std::uint64_t next_identity() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

// Clears the flags, unless the word counts leases of the kinds in the mask `leases`.
bool clear_unless(std::atomic<std::uint64_t>& word, std::uint64_t flags, std::uint64_t leases) {
  std::uint64_t w = word.load();
  do {
    if ((w & leases) != 0) return false;
  } while (!word.compare_exchange_weak(w, w & ~flags));
  return true;
}

}  // namespace

LeaseTable::LeaseTable(StoreParts& store, const SegmentStates& states, const Residency& residency,
                       const MoveGraph& moves)
    : store_(store), states_(states), identity_(next_identity()), residency_(residency), moves_(moves) {}

void LeaseTable::grow(const TensorTable& table) {
  for (; segments_ < table.segment_count(); ++segments_)
    words(segments_).bytes = table.segment(segments_).bytes;
}

LeaseTable::Holder& LeaseTable::holder() {
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

LeaseTable::Entry* LeaseTable::note(CopyWord& h) {
  Holder& mine = holder();
  const auto free_in = [&](std::size_t block, std::size_t from) -> Entry* {
    Entry* const entries = mine.blocks[block].load(std::memory_order_relaxed);
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
  if (Entry* entry = free_in(mine.block, mine.next)) return entry;
  for (std::size_t block = 0;; ++block) {
    ZG_ASSERT_LT(block, Holder::kBlocks);
    if (mine.blocks[block].load(std::memory_order_relaxed) == nullptr) mine.add(block);
    if (Entry* entry = free_in(block, 0)) return entry;
  }
}

void LeaseTable::fill(Lease& lease, SegmentId id, Tier tier, Access access, Entry* entry) {
  CopyWord& h = words(id);
  h.last_use.store(tick(), std::memory_order_relaxed);
  lease.store_ = &store_;
  lease.segment_ = id;
  lease.entry_ = entry;
  lease.tier_ = tier;
  lease.writes_ = access != Access::kRead;
  lease.made_ = false;
  lease.data_ = h.memory[index_of(tier)];
  lease.bytes_ = h.bytes;
}

void LeaseTable::fill(Lease& lease, ActionNode& use) {
  const CopyWord& h = words(use.action.segment);
  lease.store_ = &store_;
  lease.node_ = &use;
  lease.data_ = h.memory[index_of(use.action.tier)];
  lease.bytes_ = h.bytes;
}

bool LeaseTable::take_at_once(Lease& lease, SegmentId segment, Tier tier, Access access) {
  CopyWord& h = words(segment);
  auto& word = h.word[index_of(tier)];
  const bool reads = access == Access::kRead;
  const std::uint64_t flags = needed(access);
  std::uint64_t w = word.load(std::memory_order_relaxed);
  if (!admits()) return false;
  const auto may_take = [&] {
    if ((w & (flags | CopyWord::kWaited)) != flags) return false;
    return reads ? CopyWord::writers(w) == 0 : (w & CopyWord::kLeases) == 0;
  };
  if (!may_take()) return false;
  Entry* const entry = note(h);
  while (!word.compare_exchange_weak(w, w + unit(access), std::memory_order_acq_rel,
                                     std::memory_order_relaxed)) {
    if (may_take()) continue;
    note_off(entry);
    return false;
  }
  h.hits[index_of(tier)].fetch_add(1, std::memory_order_relaxed);
  fill(lease, segment, tier, access, entry);
  return true;
}

bool LeaseTable::count_off(const Lease& lease) {
  CopyWord& h = *lease.entry_->load(std::memory_order_relaxed);
  const std::uint64_t one = lease.writes_ ? CopyWord::kWriter : CopyWord::kReader;
  return (h.word[index_of(lease.tier_)].fetch_sub(one) & CopyWord::kWaited) != 0;
}

Lease TensorStore::acquire(SegmentId segment, Tier tier, Access access, Stream* consumer) {
  StoreParts& p = *parts_;
  p.core.check_access(segment, tier);
  Lease lease;
  const AccessStep step{segment, tier, access, false};
  if (!p.core.leases.take_at_once(lease, segment, tier, access)) {
    if (p.program.runs()) {
      StoreParts::Lock lock(p.core.mutex);
      p.program.acquire(lock, {&step, 1}, consumer, &lease);
      return lease;
    }
    p.free.acquire(lease, step, consumer);
  }
  if (p.free.prefetcher().follows_step()) p.free.log_access(step);
  return lease;
}

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
  StoreParts& store = *std::exchange(store_, nullptr);
  data_ = nullptr;
  if (node_ != nullptr) return store.program.end_use(*std::exchange(node_, nullptr));
  // A thread that is about to wait first announces itself (kWaited, room_waiters_) and then looks at the
  // leases once more. A release first ends the lease and then looks for such a thread. So at least one of the
  // two sees the other, and no wakeup is lost.
  if (!LeaseTable::count_off(*this) && !store.free.waits().anybody_wants_room())
    return LeaseTable::note_off(entry_);
  std::lock_guard lock(store.core.mutex);
  LeaseTable::note_off(entry_);
  store.free.waits().wake();
}

void Lease::release_after(Stream& stream, const Event& event) {
  if (store_ == nullptr) return;
  StoreParts* const store = std::exchange(store_, nullptr);
  data_ = nullptr;
  if (ActionNode* const node = std::exchange(node_, nullptr)) {
    store->program.pass_use(*node, stream, event);
    event.on_done([store, node] { store->program.end_use(*node); });
    return;
  }
  {
    std::lock_guard lock(store->core.mutex);
    store->core.leases.pass(*this, stream);
    store->free.waits().look_again(segment_);  // an acquire for the same stream need not wait any more
  }
  event.on_done([store, id = segment_, tier = tier_, writes = writes_] {
    std::lock_guard lock(store->core.mutex);
    store->core.leases.end_passed(id, tier, writes);
    store->free.waits().wake();
  });
}

void LeaseTable::refresh(SegmentId segment) {
  CopyWord& h = words(segment);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const std::size_t t = index_of(tier);
    std::uint64_t flags = 0;
    if (admits() && residency_.copies().present(segment, tier) && h.memory[t] != nullptr) {
      bool idle = true, readable = true;
      for (const ActionNode* n = moves_.queue(segment).first; n != nullptr; n = n->next) {
        if (n->state == ActionNode::State::kDone) continue;
        idle = false;
        readable = readable && !writes(n->action, tier);
      }
      if (readable) flags |= CopyWord::kOpen;
      if (idle && residency_.copies().sole(segment, tier)) flags |= CopyWord::kSole;
    }
    auto& word = h.word[t];
    std::uint64_t w = word.load();
    while (!word.compare_exchange_weak(w, (w & ~(CopyWord::kOpen | CopyWord::kSole)) | flags)) {
    }
  }
}

bool LeaseTable::close_to_all(SegmentId segment) {
  for (auto& word : words(segment).word) {
    if (clear_unless(word, CopyWord::kOpen | CopyWord::kSole, CopyWord::kLeases)) continue;
    refresh(segment);
    return false;
  }
  return true;
}

bool LeaseTable::close_to_writers(SegmentId segment) {
  for (auto& word : words(segment).word) {
    if (clear_unless(word, CopyWord::kSole, CopyWord::kWriters)) continue;
    refresh(segment);
    return false;
  }
  return true;
}

void LeaseTable::set_waited(SegmentId segment, bool waited) {
  for (auto& word : words(segment).word) {
    waited ? word.fetch_or(CopyWord::kWaited) : word.fetch_and(~CopyWord::kWaited);
  }
}

void LeaseTable::pass(const Lease& lease, Stream& stream) {
  note_off(lease.entry_);
  Claims& c = claims(lease.segment_);
  const bool first = c.passed[0] + c.passed[1] == 0;
  c.passed_to = first || c.passed_to == &stream ? &stream : nullptr;
  ++c.passed[index_of(lease.tier_)];
  ++passed_;
}

void LeaseTable::end_passed(SegmentId segment, Tier tier, bool writes) {
  --claims(segment).passed[index_of(tier)];
  --passed_;
  words(segment).word[index_of(tier)].fetch_sub(writes ? CopyWord::kWriter : CopyWord::kReader);
}

bool LeaseTable::held(SegmentId segment, Tier tier) const {
  const std::size_t t = index_of(tier);
  return (words(segment).word[t].load() & CopyWord::kLeases) != 0 || claims(segment).intents[t] > 0;
}

LeaseProbe::Closed LeaseTable::close(SegmentId segment, Tier tier) {
  if (held(segment, tier)) return Closed::kHeld;
  if (moves_.moves(segment)) return Closed::kMoving;
  auto& word = words(segment).word[index_of(tier)];
  return clear_unless(word, CopyWord::kOpen | CopyWord::kSole, CopyWord::kLeases) ? Closed::kYes
                                                                                  : Closed::kHeld;
}

std::uint64_t LeaseTable::last_use(SegmentId segment, Tier) const {
  return words(segment).last_use.load(std::memory_order_relaxed);
}

}  // namespace zg
