// The table of extents. volume_transfers.cpp moves their bytes.
#include "io/volume.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

std::string name_of_drive(const Engine& engine, int drive) {
  const DriveReport report = engine.report(drive);
  return report.path.empty() ? report.name : fmt::format("{} ({})", report.name, report.path);
}

}  // namespace

StripedVolume::StripedVolume(Engine& engine, const VolumeOptions& options)
    : engine_(engine), verify_(options.verify), placement_(engine, options), sampler_(engine) {}

StripedVolume::~StripedVolume() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return under_way_ == staged_; });
  ZG_ASSERT(staged_ == 0, "{} staged writes were neither made ready nor abandoned", staged_);
}

StripedVolume::Extent& StripedVolume::at(ExtentId id) {
  ZG_ASSERT(id && id.index < extents_.size(), "extent {}.{} is none of this volume", id.index, id.generation);
  Extent& extent = extents_[id.index];
  ZG_ASSERT(extent.generation == id.generation && !extent.slots.empty(), "extent {}.{} was destroyed",
            id.index, id.generation);
  return extent;
}

StripedVolume::Slot& StripedVolume::at(ExtentId id, int slot) {
  Extent& extent = at(id);
  ZG_ASSERT(slot >= 0 && static_cast<std::size_t>(slot) < extent.slots.size(), "slot {} of {}, which has {}",
            slot, extent.name, extent.slots.size());
  return extent.slots[static_cast<std::size_t>(slot)];
}

void StripedVolume::take(std::span<const StoredPiece> places) {
  std::lock_guard lock(mutex_);
  for (const StoredPiece& p : places) {
    if (p.drive >= 0 && p.drive < engine_.drive_count() && placement_.take(p)) continue;
    throw Error(Errc::kUsage, "Volume::take",
                fmt::format("[{}, +{}) of drive {} is not free", p.offset, p.bytes, p.drive),
                "places of contents must not overlap, and must lie in their drive's file");
  }
}

// Everything that can throw is done before the table changes.
ExtentId StripedVolume::create(const ExtentSpec& spec) {
  ZG_ASSERT(spec.bytes > 0 && spec.slots > 0, "{}: {} slots of {} bytes", spec.name, spec.slots, spec.bytes);
  std::string name = spec.name;
  std::vector<Slot> slots(static_cast<std::size_t>(spec.slots));
  std::lock_guard lock(mutex_);
  if (free_extents_.empty()) {
    ZG_ASSERT(extents_.size() < kMaxExtents, "{} extents", extents_.size());
    if (free_extents_.capacity() <= extents_.size()) free_extents_.reserve(2 * extents_.size() + 1);
    extents_.emplace_back();
    free_extents_.push_back(static_cast<std::uint32_t>(extents_.size() - 1));
  }
  reserve(spec, slots);
  const std::uint32_t index = free_extents_.back();
  free_extents_.pop_back();
  Extent& extent = extents_[index];
  extent.name = std::move(name);
  extent.bytes = spec.bytes;
  extent.slots = std::move(slots);
  return {index, extent.generation};
}

// Reserves all slots, or none and throws.
void StripedVolume::reserve(const ExtentSpec& spec, std::vector<Slot>& slots) {
  const auto release_all = [&] {
    for (Slot& slot : slots) placement_.release(slot.pieces);
  };
  bool fits = true;
  const auto adopted = std::min(spec.adopted.size(), slots.size());
  try {
    for (std::size_t s = 0; s < adopted; ++s) slots[s].adopt(spec, spec.adopted[s]);
    for (auto s = static_cast<int>(adopted); fits && s < spec.slots; ++s)
      fits = placement_.reserve(spec.bytes, s, slots[static_cast<std::size_t>(s)].pieces);
  } catch (...) {
    release_all();
    throw;
  }
  if (fits) return;
  release_all();
  throw_no_room(spec);
}

// Fills the slot with contents that lie in the drives' files.
void StripedVolume::Slot::adopt(const ExtentSpec& spec, const StoredSlot& stored) {
  std::int64_t position = 0;
  for (const StoredPiece& p : stored.pieces) {
    pieces.push_back({p.drive, p.offset, p.bytes, position, p.checksum});
    position += p.bytes;
  }
  ZG_ASSERT(position == spec.bytes, "{} has {} bytes, {} are adopted", spec.name, spec.bytes, position);
  state = State::kFull;
  version = stored.version;
  pins = stored.pins;
}

void StripedVolume::throw_no_room(const ExtentSpec& spec) const {
  const std::int64_t each = round_up(spec.bytes, placement_.grain());
  std::string free;
  for (int d = 0; d < engine_.drive_count(); ++d) {
    free += fmt::format("{}{} of {} on {}", d == 0 ? "" : ", ", format_bytes(placement_.free_bytes(d)),
                        format_bytes(engine_.drive_bytes(d)), name_of_drive(engine_, d));
  }
  throw Error(Errc::kIo, spec.name,
              fmt::format("no room for {} slot(s) of {}, {} in all; free: {}", spec.slots, format_bytes(each),
                          format_bytes(each * spec.slots), free),
              "give the drives larger files, or keep less on them");
}

void StripedVolume::destroy(ExtentId id) {
  std::lock_guard lock(mutex_);
  Extent& extent = at(id);
  for (Slot& slot : extent.slots) {
    ZG_ASSERT(slot.operations == nullptr, "{} is destroyed while it is transferred", extent.name);
    placement_.release(slot.pieces);
  }
  extent.slots.clear();
  if (++extent.generation == 0) extent.generation = 1;
  free_extents_.push_back(id.index);
}

std::int64_t StripedVolume::version(ExtentId id, int slot) const {
  std::lock_guard lock(mutex_);
  return at(id, slot).version;
}

int StripedVolume::newest_slot(ExtentId id) const {
  std::lock_guard lock(mutex_);
  const std::vector<Slot>& slots = at(id).slots;
  const auto best = std::max_element(slots.begin(), slots.end(),
                                     [](const Slot& a, const Slot& b) { return a.version < b.version; });
  return best->version < 0 ? -1 : static_cast<int>(best - slots.begin());
}

void StripedVolume::invalidate(ExtentId id, int slot) {
  std::lock_guard lock(mutex_);
  Slot& s = at(id, slot);
  ZG_ASSERT(s.operations == nullptr, "slot {} of {} is invalidated while it is transferred", slot,
            at(id).name);
  ZG_ASSERT(s.pins == 0, "slot {} of {} is invalidated, and pinned", slot, at(id).name);
  s.state = State::kEmpty;
  s.version = -1;
}

int StripedVolume::slot_to_write(ExtentId id) const {
  std::lock_guard lock(mutex_);
  const std::vector<Slot>& slots = at(id).slots;
  int best = -1;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].pins > 0) continue;
    if (best < 0 || slots[i].version < slots[static_cast<std::size_t>(best)].version)
      best = static_cast<int>(i);
  }
  return best;
}

void StripedVolume::pin(ExtentId id, int slot) {
  std::lock_guard lock(mutex_);
  Slot& s = at(id, slot);
  ZG_ASSERT(s.state == State::kFull, "slot {} of {} has no contents to pin", slot, at(id).name);
  ++s.pins;
}

void StripedVolume::unpin(ExtentId id, int slot) {
  std::lock_guard lock(mutex_);
  Slot& s = at(id, slot);
  ZG_ASSERT(s.pins > 0, "slot {} of {} is not pinned", slot, at(id).name);
  --s.pins;
}

std::vector<StoredPiece> StripedVolume::stored_pieces(ExtentId id, int slot) const {
  std::lock_guard lock(mutex_);
  const Slot& s = at(id, slot);
  ZG_ASSERT(s.state == State::kFull, "slot {} of {} has no contents", slot, at(id).name);
  std::vector<StoredPiece> all;
  for (const Piece& p : s.pieces) all.push_back({p.drive, p.offset, p.bytes, p.checksum});
  return all;
}

std::int64_t StripedVolume::transfer_bytes(ExtentId id) const {
  std::lock_guard lock(mutex_);
  return round_up(at(id).bytes, Engine::alignment());
}

SpaceReport StripedVolume::space(int drive) const {
  ZG_ASSERT(drive >= 0 && drive < engine_.drive_count(), "drive {} of {}", drive, engine_.drive_count());
  std::lock_guard lock(mutex_);
  return {.bytes = engine_.drive_bytes(drive),
          .used = placement_.used_bytes(drive),
          .largest = placement_.largest_bytes(drive),
          .share = placement_.shares().shares()[static_cast<std::size_t>(drive)],
          .shares_are_learned = placement_.shares().learned()};
}

std::string StripedVolume::explain(ExtentId id, Op op, const ExtentResult& result) const {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    const Extent& extent = at(id);
    text = fmt::format("{} {}: ", op == Op::kRead ? "reading" : "writing", extent.name);
    for (const Slot& slot : extent.slots) {
      for (const Piece& p : slot.pieces) {
        if (p.drive == result.drive && p.offset == result.offset)
          text += fmt::format("piece of {} ", format_bytes(p.bytes));
      }
    }
  }
  if (result.drive >= 0)
    text += fmt::format("at {} of {}: ", result.offset, name_of_drive(engine_, result.drive));
  if (result.ok()) return text + "done";
  if (result.error == ENODATA) return text + "it has no contents";
  if (result.error == EBADMSG)
    return text + "its checksum is wrong (the drive returned other bytes than were written)";
  if (result.error == ECANCELED) return text + "it was abandoned";
  if (result.cause == ENODATA) return text + "the file ends before it: was it cut short?";
  return text + errno_text(result.cause != 0 ? result.cause : result.error);
}

std::string StripedVolume::describe_layout(ExtentId id, int slot) const {
  std::lock_guard lock(mutex_);
  std::string text;
  const std::vector<Piece>& pieces = at(id, slot).pieces;
  for (std::size_t i = 0; i < pieces.size();) {
    const Piece& first = pieces[i];
    std::int64_t end = first.offset + first.bytes;
    for (++i; i < pieces.size() && pieces[i].drive == first.drive && pieces[i].offset == end; ++i)
      end += pieces[i].bytes;
    text += fmt::format("{}{} [{}, {})", text.empty() ? "" : " ", engine_.report(first.drive).name,
                        first.offset, end);
  }
  return text;
}

std::unique_ptr<Volume> make_volume(Engine& engine, const VolumeOptions& options) {
  // A device has room for the checksum of a piece of the usual size.
  if (engine.direct() != nullptr && options.verify && options.grain > kMaxPieceBytes) {
    throw Error(Errc::kUsage, "VolumeOptions::grain", fmt::format("is {} bytes", options.grain),
                fmt::format("at most {} where checksums are made of a device's memory", kMaxPieceBytes));
  }
  return std::make_unique<StripedVolume>(engine, options);
}

}  // namespace zg::io
