#include "ziggurat/store/store.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <utility>

#include "store/parts.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

StoreParts::StoreParts(const TensorStore::Options& o)
    : table(o.table != nullptr
                ? *o.table
                : TensorTable(o.io != nullptr ? o.io->drive_count() : 0, o.device->arena().granule())),
      options(o),
      residency(table, o.budgets, o.policy),
      leases(*this, residency, moves),
      waits(table, options, residency, leases, moves, counters,
            [this] {
              std::lock_guard lock(mutex);
              return report.state();
            }),
      prefetcher(table, options, residency, leases, moves, counters),
      report(*this),
      moves(table, Mover::rules(options), mover, *this),
      mover(table, options, leases.words(), mutex, moves, *this) {
  ZG_ASSERT_LE(o.budgets.device, o.device->arena().budget());
  ZG_ASSERT_LE(o.budgets.host, o.host->budget());
  ZG_ASSERT(!o.budgets.direct || o.device->is_host() || (o.io != nullptr && o.io->direct() != nullptr),
            "the drives do not reach the device");
  // If an arena charged more than Residency counts, it would refuse memory that was decided, and the
  // allocation would wait for ever.
  ZG_ASSERT_EQ(table.device_granule() % o.device->arena().granule(), 0);
  ZG_ASSERT_EQ(io::Engine::alignment() % o.host->granule(), 0);
  grow();
  for (SegmentId id = 0; o.adopted != nullptr && id < table.segment_count(); ++id) {
    if (o.adopted->count(table.segment_name(id)) > 0) residency.assume_content(id, Tier::kNvme);
  }
  residency.set_lease_probe(&leases);
}

StoreParts::~StoreParts() {
  Lock lock(mutex);
  closing = true;
  moves.close();
  leases.admit(false);
  prefetcher.keep(nullptr);
  waits.changed().wait(lock, [&] { return leases.passed() == 0 && moves.links_rest(); });
  for (SegmentId id = 0; id < table.segment_count(); ++id) {
    for (const ActionNode* n = moves.queue(id).first; n != nullptr; n = n->next) {
      ZG_ASSERT(!n->leased, "{} is still leased when its store ends", report.describe(*n));
    }
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      ZG_ASSERT((leases.words(id).word[index_of(tier)].load() & CopyWord::kLeases) == 0,
                "{} is still leased when its store ends", table.segment_name(id));
      ZG_ASSERT(!residency.copies().is_pinned(id, tier), "{} is still pinned when its store ends",
                table.segment_name(id));
    }
  }
}

// Makes every part fit for the segments that the table has.
void StoreParts::grow() {
  const std::int32_t count = table.segment_count();
  leases.grow(table);
  waits.grow(count);
  prefetcher.grow(count);
  counters.segments.grow(count);
  residency.grow();
  moves.grow(count);
  mover.grow(count);
}

// Only the first failure is kept and reported.
void StoreParts::fail(const Error& error) {
  if (failure) return;
  failure.emplace(error);
  leases.admit(false);
  moves.stop();
  waits.wake();
}

void StoreParts::throw_failure() const {
  if (failure) throw Error(*failure);
}

// Throws: the segment does not exist, or the tier is NVMe.
void StoreParts::refuse(SegmentId segment) const {
  if (segment < 0 || segment >= leases.segments())
    throw Error(Errc::kUsage, "acquire",
                fmt::format("there is no segment {}, but {} of them", segment, table.segment_count()),
                "take the numbers from the table of the store");
  throw Error(Errc::kUsage, "acquire", "nobody can see bytes on NVMe", "acquire at the device or the host");
}

// A move that was decided waits until the stream that uses its copy has ended that use; no link knows of the
// move before. Such a use ends by itself, so its moves are waited for. A lease that a thread holds may stay
// for ever, perhaps the caller's own.
void StoreParts::drain(Lock& lock) {
  waits.wait_until(
      lock, [this] { return failure || (moves.idle() && (leases.passed() == 0 || !moves.has_moves())); });
  throw_failure();
}

// Afterwards nothing moves, and nothing can start to while the lock is held.
void StoreParts::rest(Lock& lock) {
  waits.changed().wait(lock, [&] { return failure ? moves.links_rest() : moves.idle(); });
}

void StoreParts::unpin(SegmentId segment, Tier tier) {
  std::lock_guard lock(mutex);
  residency.unpin(segment, tier);
  waits.wake();
}

void StoreParts::evicting(const Action& action) {
  if (action.access == Access::kRead) {
    ++counters.segments[action.segment].evictions;
    ++counters.tiers[index_of(action.tier)].evictions;
  }
  prefetcher.evicting(action);
}

void StoreParts::granted(const ActionNode& use) {
  if (&use == waits.awaited()) waits.changed().notify_all();
}

void StoreParts::changed(SegmentId segment) {
  leases.refresh(segment);
  waits.arrived(segment);
}

void StoreParts::finished(Action::Kind kind) {
  if (kind != Action::Kind::kAlloc) counters.progress.fetch_add(1, std::memory_order_relaxed);
  waits.done(closing || moves.idle());
  if (kind == Action::Kind::kCopy) prefetcher.follow();
}

void StoreParts::no_memory(Tier tier, const Error& e) {
  fail(Error(e.code(), e.where(), e.message() + "; " + report.what_holds(tier), e.hint()));
}

// Segments are charged in whole pages, so with a grain of one page no space is lost to rounding.
io::VolumeOptions store_volume(const std::vector<double>& drive_shares, bool verify) {
  return {.shares = drive_shares, .grain = io::Engine::alignment(), .verify = verify};
}

Arena::Hooks host_memory_hooks(const std::vector<Device*>& devices, io::Engine* io) {
  std::vector<Arena::Hooks> pins;
  for (Device* device : devices) {
    if (Arena::Hooks pin = device->host_hooks(); pin.mapped) pins.push_back(std::move(pin));
  }
  if (io == nullptr && pins.empty()) return {};
  const bool keeps = std::any_of(pins.begin(), pins.end(), [](const auto& pin) { return pin.keeps; });
  return {[io, pins](void* data, std::int64_t bytes) {
            for (const Arena::Hooks& pin : pins) pin.mapped(data, bytes);
            if (io != nullptr) io->register_memory(data, bytes);
          },
          [io, pins](void* data, std::int64_t bytes) {
            if (io != nullptr) io->unregister_memory(data);
            for (const Arena::Hooks& pin : pins) pin.unmapped(data, bytes);
          },
          keeps};
}

TensorStore::TensorStore(const Options& options) : parts_(std::make_unique<StoreParts>(options)) {}
TensorStore::~TensorStore() = default;

const TensorTable& TensorStore::table() const {
  return parts_->table;
}

TensorId TensorStore::add(const TensorSpec& spec) {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.mutex);
  p.throw_failure();
  ZG_ASSERT(p.program == nullptr, "tensors are added between programs");
  const TensorId id = p.table.add(spec);
  try {
    p.grow();
  } catch (const Error&) {
    if (NvmeCopies* nvme = p.mover.nvme()) nvme->destroy(p.table.tensor(id));
    p.table.remove(id);
    throw;
  }
  return id;
}

void TensorStore::remove(TensorId tensor) {
  StoreParts& p = *parts_;
  const Tensor& t = p.table.tensor(tensor);
  for (SegmentId id = t.first_segment; id < t.first_segment + t.segments; ++id) discard(id);
  drain();
  std::lock_guard lock(p.mutex);
  if (NvmeCopies* nvme = p.mover.nvme()) nvme->destroy(t);
  p.table.remove(tensor);
}

void TensorStore::discard(SegmentId segment) {
  StoreParts& p = *parts_;
  StoreParts::Lock lock(p.mutex);
  ZG_ASSERT(p.program == nullptr, "a program says itself what is dead");
  p.check_access(segment, Tier::kHost);
  Waiter waiter(p.waits, {segment, Tier::kHost, Access::kOverwrite, false}, nullptr);
  while (true) {
    p.throw_failure();
    if (p.moves.moves(segment)) {
      p.moves.demand(segment);
      p.hinder(waiter, Waiter::Obstacle::kMoving, segment);
    } else if (p.waits.in_the_way(waiter) || !p.leases.close_to_all(segment)) {
      p.hinder(waiter, Waiter::Obstacle::kLeases);
    } else {
      break;
    }
    p.waits.wait(lock, waiter);
  }
  p.residency.discard(segment, p.actions);
  p.moves.decided(p.actions, Urgency::kDemand);
}

void TensorStore::prefetch(SegmentId segment, Tier tier) {
  StoreParts& p = *parts_;
  p.check_access(segment, tier);
  std::lock_guard lock(p.mutex);
  p.throw_failure();
  if (p.program != nullptr || p.residency.copies().present(segment, tier) ||
      !p.residency.copies().has_content(segment))
    return;
  (void)p.prefetcher.fetch(segment, tier, -1);
}

Pin TensorStore::pin(SegmentId segment, Tier tier) {
  StoreParts& p = *parts_;
  p.check_access(segment, tier);
  {
    std::lock_guard lock(p.mutex);
    p.throw_failure();
    p.residency.pin(segment, tier);
  }
  Pin pin;
  pin.store_ = &p;
  pin.segment_ = segment;
  pin.tier_ = tier;
  prefetch(segment, tier);
  return pin;
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

bool TensorStore::has_content(SegmentId segment) const {
  std::lock_guard lock(parts_->mutex);
  return parts_->residency.copies().has_content(segment);
}

std::vector<std::int64_t> TensorStore::versions(SegmentId segment) const {
  StoreParts& p = *parts_;
  p.check_access(segment, Tier::kHost);
  StoreParts::Lock lock(p.mutex);
  p.rest(lock);
  return p.mover.nvme() != nullptr ? p.mover.nvme()->versions(segment) : std::vector<std::int64_t>{};
}

void TensorStore::read_version(SegmentId segment, std::int64_t version, void* data) const {
  StoreParts& p = *parts_;
  p.check_access(segment, Tier::kHost);
  StoreParts::Lock lock(p.mutex);
  p.rest(lock);
  if (p.mover.nvme() == nullptr) throw NvmeCopies::no_version(p.table, segment, version);
  p.mover.nvme()->read(segment, version, data);
}

std::int64_t TensorStore::write_back(std::span<const SegmentId> segments) {
  StoreParts& p = *parts_;
  StoreParts::Lock lock(p.mutex);
  ZG_ASSERT(p.program != nullptr && p.next == nullptr && p.accessed == p.program->access_count(),
            "content is written back after a program that has ended");
  p.drain(lock);
  const std::int64_t before = p.residency.copies().traffic().nvme_write;
  for (const SegmentId id : segments) {
    const bool there = p.residency.copies().present(id, Tier::kNvme);
    if (const auto no_room = p.residency.write_back(id, p.actions)) {
      p.actions.clear();  // after a failure the decisions are unusable
      p.fail(Error(Errc::kMemory, "host tier",
                   fmt::format("finds no room for {} ({}) on its way to NVMe", p.table.segment_name(id),
                               format_bytes(no_room->needed)),
                   "raise this tier's budget"));
      p.throw_failure();
    }
    ZG_ASSERT(p.residency.copies().present(id, Tier::kNvme), "{} cannot be brought to NVMe",
              p.table.segment_name(id));
    p.mover.nvme()->expect(id, !there);
    p.moves.decided(p.actions, Urgency::kWriteBack);
  }
  return p.residency.copies().traffic().nvme_write - before;
}

std::vector<PinnedVersion> TensorStore::pin_versions(std::span<const SegmentId> segments) {
  // Segments of a running program may have moves all the time, and who waits for one of them is told of its
  // leases alone: so this looks again and again.
  constexpr std::chrono::microseconds kPause{500};
  StoreParts& p = *parts_;
  std::vector<PinnedVersion> pinned;
  for (const SegmentId id : segments) {
    for (;; std::this_thread::sleep_for(kPause)) {
      StoreParts::Lock lock(p.mutex);
      p.throw_failure();
      if (!p.mover.nvme()->has_expected(id)) continue;
      pinned.push_back({id, p.mover.nvme()->pin(id)});
      break;
    }
  }
  return pinned;
}

void TensorStore::hasten(std::span<const SegmentId> segments) {
  std::lock_guard lock(parts_->mutex);
  for (const SegmentId id : segments) parts_->moves.hurry_write_backs(id);
}

void TensorStore::unpin_versions(std::span<const PinnedVersion> versions) {
  std::lock_guard lock(parts_->mutex);
  for (const PinnedVersion& v : versions) parts_->mover.nvme()->unpin(v.segment, v.slot);
}

io::StoredSlot TensorStore::stored(const PinnedVersion& version) const {
  std::lock_guard lock(parts_->mutex);
  return parts_->mover.nvme()->stored(version.segment, version.slot);
}

void TensorStore::step_begin(std::string_view name) {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.mutex);
  p.throw_failure();
  ZG_ASSERT(p.program == nullptr, "steps are for who has no program");
  p.prefetcher.begin_step(std::string(name));
}

void TensorStore::step_end() {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.mutex);
  const Program* const record = p.prefetcher.end_step();
  if (p.options.record && record != nullptr) p.recorder.ran(*record);
}

void TensorStore::expect(const Program& program) {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.mutex);
  ZG_ASSERT(p.program == nullptr, "steps are for who has no program");
  for (std::int32_t i = 0; i < program.access_count(); ++i)
    p.check_access(program.access(i).segment, program.access(i).tier);
  p.prefetcher.expect(program);
}

void TensorStore::expect(const AccessTrace& trace) {
  const TensorTable &theirs = trace.table, &ours = table();
  const auto refuse = [](const std::string& what) {
    throw Error(Errc::kUsage, "access trace", what,
                "expect a trace of the same tensors, added in the same order");
  };
  if (theirs.tensor_count() > ours.tensor_count())
    refuse(fmt::format("has {} tensors, the store has {}", theirs.tensor_count(), ours.tensor_count()));
  for (TensorId id = 0; id < theirs.tensor_count(); ++id) {
    const TensorSpec &a = theirs.tensor(id).spec, &b = ours.tensor(id).spec;
    if (a.name != b.name || a.dtype != b.dtype || a.count != b.count ||
        a.segment_elements != b.segment_elements)
      refuse(fmt::format("tensor {} is \"{}\" of {} {}, in the store it is \"{}\" of {} {}", id, a.name,
                         a.count, name_of(a.dtype), b.name, b.count, name_of(b.dtype)));
  }
  for (const Program& program : trace.programs) expect(program);
}

AccessTrace TensorStore::access_trace() const {
  const StoreParts& p = *parts_;
  std::lock_guard lock(p.mutex);
  return {p.table, p.options.budgets, p.recorder.programs(), p.recorder.sequence()};
}

void TensorStore::demote_all() {
  StoreParts& p = *parts_;
  StoreParts::Lock lock(p.mutex);
  ZG_ASSERT(p.program == nullptr, "a program says itself what moves");
  p.drain(lock);  // segments with unfinished moves could not be demoted
  p.residency.demote_all(p.actions);
  p.moves.decided(p.actions, Urgency::kWriteBack);
  p.prefetcher.expect_again();
  p.prefetcher.rest();
}

void TensorStore::drain() {
  StoreParts::Lock lock(parts_->mutex);
  parts_->drain(lock);
}

Traffic TensorStore::traffic() const {
  std::lock_guard lock(parts_->mutex);
  return parts_->report.traffic();
}

std::int64_t TensorStore::first_written_bytes() const {
  std::lock_guard lock(parts_->mutex);
  const NvmeCopies* const nvme = parts_->mover.nvme();
  return nvme != nullptr ? nvme->first_written_bytes() : 0;
}

double TensorStore::waited_seconds() const {
  std::lock_guard lock(parts_->mutex);
  const auto& waited_for = parts_->counters.waited_for;
  return std::accumulate(waited_for.begin(), waited_for.end(), 0.0);
}

void TensorStore::observe_waits(WaitObserver* observer) {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.mutex);
  ZG_ASSERT(p.program == nullptr || observer == nullptr, "{} runs", p.program->name());
  p.waits.observe(observer);
}

StoreStatistics TensorStore::statistics() const {
  std::lock_guard lock(parts_->mutex);
  return parts_->report.statistics();
}

TensorStatistics TensorStore::statistics(TensorId tensor) const {
  std::lock_guard lock(parts_->mutex);
  return parts_->report.statistics(tensor);
}

std::vector<SegmentReport> TensorStore::report(TensorId tensor) const {
  std::lock_guard lock(parts_->mutex);
  return parts_->report.segments(tensor);
}

std::string TensorStore::explain(TensorId tensor) const {
  std::lock_guard lock(parts_->mutex);
  return parts_->report.explain(tensor);
}

std::string TensorStore::state() const {
  std::lock_guard lock(parts_->mutex);
  return parts_->report.state();
}

void TensorStore::check() const {
  std::lock_guard lock(parts_->mutex);
  parts_->report.check();
}

std::uint64_t TensorStore::progress() const {
  return parts_->counters.progress.load(std::memory_order_relaxed);
}

int TensorStore::waiting() const {
  return parts_->counters.waiting.load(std::memory_order_relaxed);
}

}  // namespace zg
