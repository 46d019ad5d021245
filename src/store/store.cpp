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
    : core(o, *this, mover, *this),
      free(core, report),
      program(core, mover, report),
      report(*this),
      mover(core.table, core.options, core.segments, core.mutex, core.moves, *this) {
  grow();
  for (SegmentId id = 0; o.adopted != nullptr && id < core.table.segment_count(); ++id) {
    if (o.adopted->count(core.table.segment_name(id)) > 0) core.residency.assume_content(id, Tier::kNvme);
  }
  core.residency.set_lease_probe(&core.leases);
}

StoreParts::~StoreParts() {
  Lock lock(core.mutex);
  core.closing = true;
  core.moves.close();
  free.stop();
  core.changed.wait(lock, [&] { return core.leases.passed() == 0 && core.moves.links_rest(); });
  for (SegmentId id = 0; id < core.table.segment_count(); ++id) {
    for (const ActionNode* n = core.moves.queue(id).first; n != nullptr; n = n->next) {
      ZG_ASSERT(!n->leased, "{} is still leased when its store ends", report.describe(*n));
    }
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      ZG_ASSERT((core.word(id).word[index_of(tier)].load() & CopyWord::kLeases) == 0,
                "{} is still leased when its store ends", core.table.segment_name(id));
      ZG_ASSERT(!core.residency.copies().is_pinned(id, tier), "{} is still pinned when its store ends",
                core.table.segment_name(id));
    }
  }
}

void StoreParts::grow() {
  core.grow();
  mover.grow(core.table.segment_count());
}

// A move that was decided waits until the stream that uses its copy has ended that use; no link knows of the
// move before. Such a use ends by itself, so its moves are waited for. A lease that a thread holds may stay
// for ever, perhaps the caller's own.
void StoreParts::drain(Lock& lock) {
  free.waits().wait_until(lock, [this] {
    return core.failure || (core.moves.idle() && (core.leases.passed() == 0 || !core.moves.has_moves()));
  });
  core.throw_failure();
}

// Afterwards nothing moves, and nothing can start to while the lock is held.
void StoreParts::wait_idle(Lock& lock) {
  core.changed.wait(lock, [&] { return core.failure ? core.moves.links_rest() : core.moves.idle(); });
}

void StoreParts::evicting(const Action& action) {
  if (action.access == Access::kRead) {
    ++core.segments[action.segment].counts.evictions;
    ++core.counters.tiers[index_of(action.tier)].evictions;
  }
  free.evicting(action);
}

void StoreParts::finished(Action::Kind kind) {
  if (kind != Action::Kind::kAlloc) core.counters.progress.fetch_add(1, std::memory_order_relaxed);
  program.finished();
  free.finished(kind);
}

void StoreParts::no_memory(Tier tier, const Error& e) {
  core.fail(Error(e.code(), e.where(), e.message() + "; " + report.what_holds(tier), e.hint()));
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
  return parts_->core.table;
}

void TensorStore::run(const Program* program, const Program* next) {
  StoreParts& p = *parts_;
  StoreParts::Lock lock(p.core.mutex);
  p.core.throw_failure();
  const bool ran = p.program.runs();
  if (!ran && program == nullptr) return;
  if (!ran) p.free.close(lock);
  if (program != nullptr && p.core.options.record) p.recorder.ran(*program);
  p.program.run(program, next);
  if (program == nullptr) p.free.open();
}

void TensorStore::acquire(std::span<const AccessStep> accesses, std::vector<Lease>& out, Stream* consumer) {
  parts_->without_program("with a program, its operations are acquired").acquire(accesses, out, consumer);
}

void TensorStore::acquire_op(Stream* consumer, std::vector<Lease>& out) {
  out.clear();  // takes the mutex, where it ends leases
  StoreParts::Lock lock(parts_->core.mutex);
  parts_->program.acquire_op(lock, consumer, out);
}

TensorId TensorStore::add(const TensorSpec& spec) {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.core.mutex);
  p.core.throw_failure();
  ZG_ASSERT(!p.program.runs(), "tensors are added between programs");
  const TensorId id = p.core.table.add(spec);
  try {
    p.grow();
  } catch (const Error&) {
    if (NvmeCopies* nvme = p.mover.nvme()) nvme->destroy(p.core.table.tensor(id));
    p.core.table.remove(id);
    throw;
  }
  return id;
}

void TensorStore::remove(TensorId tensor) {
  StoreParts& p = *parts_;
  const Tensor& t = p.core.table.tensor(tensor);
  for (SegmentId id = t.first_segment; id < t.first_segment + t.segments; ++id) discard(id);
  drain();
  std::lock_guard lock(p.core.mutex);
  if (NvmeCopies* nvme = p.mover.nvme()) nvme->destroy(t);
  p.core.table.remove(tensor);
}

void TensorStore::discard(SegmentId segment) {
  parts_->core.check_access(segment, Tier::kHost);
  parts_->without_program("a program says itself what is dead").discard(segment);
}

void TensorStore::prefetch(SegmentId segment, Tier tier) {
  parts_->core.check_access(segment, tier);
  if (!parts_->program.runs()) parts_->free.prefetch(segment, tier);
}

Pin TensorStore::pin(SegmentId segment, Tier tier) {
  parts_->core.check_access(segment, tier);
  parts_->free.pin(segment, tier);
  Pin pin;
  pin.store_ = parts_.get();
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
  if (store_ != nullptr) std::exchange(store_, nullptr)->free.unpin(segment_, tier_);
}

bool TensorStore::has_content(SegmentId segment) const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->core.residency.copies().has_content(segment);
}

std::vector<std::int64_t> TensorStore::versions(SegmentId segment) const {
  StoreParts& p = *parts_;
  p.core.check_access(segment, Tier::kHost);
  StoreParts::Lock lock(p.core.mutex);
  p.wait_idle(lock);
  return p.mover.nvme() != nullptr ? p.mover.nvme()->versions(segment) : std::vector<std::int64_t>{};
}

void TensorStore::read_version(SegmentId segment, std::int64_t version, void* data) const {
  StoreParts& p = *parts_;
  p.core.check_access(segment, Tier::kHost);
  StoreParts::Lock lock(p.core.mutex);
  p.wait_idle(lock);
  if (p.mover.nvme() == nullptr) throw NvmeCopies::no_version(p.core.table, segment, version);
  p.mover.nvme()->read(segment, version, data);
}

std::int64_t TensorStore::write_back(std::span<const SegmentId> segments) {
  StoreParts& p = *parts_;
  StoreParts::Lock lock(p.core.mutex);
  ZG_ASSERT(p.program.ended(), "content is written back after a program that has ended");
  p.drain(lock);
  const std::int64_t before = p.core.residency.copies().traffic().nvme_write();
  for (const SegmentId id : segments) {
    const bool there = p.core.residency.copies().present(id, Tier::kNvme);
    if (const auto no_room = p.core.residency.write_back(id, p.core.actions)) {
      p.core.actions.clear();  // after a failure the decisions are unusable
      p.core.fail(Error(Errc::kMemory, "host tier",
                        fmt::format("finds no room for {} ({}) on its way to NVMe",
                                    p.core.table.segment_name(id), format_bytes(no_room->needed)),
                        "raise this tier's budget"));
      p.core.throw_failure();
    }
    ZG_ASSERT(p.core.residency.copies().present(id, Tier::kNvme), "{} cannot be brought to NVMe",
              p.core.table.segment_name(id));
    p.mover.nvme()->expect(id, !there);
    p.core.moves.decided(p.core.actions, Urgency::kWriteBack);
  }
  return p.core.residency.copies().traffic().nvme_write() - before;
}

std::vector<PinnedVersion> TensorStore::pin_versions(std::span<const SegmentId> segments) {
  // Segments of a running program may have moves all the time, and who waits for one of them is told of its
  // leases alone: so this looks again and again.
  constexpr std::chrono::microseconds kPause{500};
  StoreParts& p = *parts_;
  std::vector<PinnedVersion> pinned;
  for (const SegmentId id : segments) {
    for (;; std::this_thread::sleep_for(kPause)) {
      StoreParts::Lock lock(p.core.mutex);
      p.core.throw_failure();
      if (!p.mover.nvme()->has_expected(id)) continue;
      pinned.push_back({id, p.mover.nvme()->pin(id)});
      break;
    }
  }
  return pinned;
}

void TensorStore::hasten(std::span<const SegmentId> segments) {
  std::lock_guard lock(parts_->core.mutex);
  for (const SegmentId id : segments) parts_->core.moves.hurry_write_backs(id);
}

void TensorStore::unpin_versions(std::span<const PinnedVersion> versions) {
  std::lock_guard lock(parts_->core.mutex);
  for (const PinnedVersion& v : versions) parts_->mover.nvme()->unpin(v.segment, v.slot);
}

io::StoredSlot TensorStore::stored(const PinnedVersion& version) const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->mover.nvme()->stored(version.segment, version.slot);
}

void TensorStore::step_begin(std::string_view name) {
  FreeFront& free = parts_->without_program("steps are for who has no program");
  std::lock_guard lock(parts_->core.mutex);
  parts_->core.throw_failure();
  free.prefetcher().begin_step(std::string(name));
}

void TensorStore::step_end() {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.core.mutex);
  const Program* const record = p.free.prefetcher().end_step();
  if (p.core.options.record && record != nullptr) p.recorder.ran(*record);
}

void TensorStore::expect(const Program& program) {
  parts_->without_program("steps are for who has no program").expect(program);
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
  std::lock_guard lock(p.core.mutex);
  return {p.core.table, p.core.options.budgets, p.recorder.programs(), p.recorder.sequence()};
}

void TensorStore::demote_all() {
  FreeFront& free = parts_->without_program("a program says itself what moves");
  StoreParts::Lock lock(parts_->core.mutex);
  parts_->drain(lock);
  free.demote_all();
}

void TensorStore::drain() {
  StoreParts::Lock lock(parts_->core.mutex);
  parts_->drain(lock);
}

LinkBytes TensorStore::traffic() const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->core.moves.bytes();
}

std::int64_t TensorStore::first_written_bytes() const {
  std::lock_guard lock(parts_->core.mutex);
  const NvmeCopies* const nvme = parts_->mover.nvme();
  return nvme != nullptr ? nvme->first_written_bytes() : 0;
}

double TensorStore::waited_seconds() const {
  std::lock_guard lock(parts_->core.mutex);
  const auto& waited_for = parts_->core.counters.waited_for;
  return std::accumulate(waited_for.begin(), waited_for.end(), 0.0);
}

void TensorStore::observe_waits(WaitObserver* observer) {
  StoreParts& p = *parts_;
  std::lock_guard lock(p.core.mutex);
  ZG_ASSERT(!p.program.runs() || observer == nullptr, "{} runs", p.program.program()->name());
  p.program.observe(observer);
}

StoreStatistics TensorStore::statistics() const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->report.statistics();
}

TensorStatistics TensorStore::statistics(TensorId tensor) const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->report.statistics(tensor);
}

std::vector<SegmentReport> TensorStore::report(TensorId tensor) const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->report.segments(tensor);
}

std::string TensorStore::explain(TensorId tensor) const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->report.explain(tensor);
}

std::string TensorStore::state() const {
  std::lock_guard lock(parts_->core.mutex);
  return parts_->report.state();
}

void TensorStore::check() const {
  std::lock_guard lock(parts_->core.mutex);
  parts_->report.check();
}

std::uint64_t TensorStore::progress() const {
  return parts_->core.counters.progress.load(std::memory_order_relaxed);
}

int TensorStore::waiting() const {
  return parts_->core.counters.waiting.load(std::memory_order_relaxed);
}

}  // namespace zg
