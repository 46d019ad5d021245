#include "stress_user.hpp"

#include "ziggurat/base/units.hpp"

namespace zg::io::test {

void Tally::add(const Tally& o) {
  const auto sum = [&](auto... member) { ((this->*member += o.*member), ...); };
  sum(&Tally::created, &Tally::refused, &Tally::destroyed, &Tally::invalidated, &Tally::promoted,
      &Tally::inspected, &Tally::written, &Tally::read, &Tally::found_empty, &Tally::read_again,
      &Tally::bytes, &Tally::moved, &Tally::watched, &Tally::staged, &Tally::abandoned, &Tally::write_eio,
      &Tally::write_enospc, &Tally::read_eio, &Tally::bad_sum, &Tally::begun, &Tally::completed);
}

std::string Tally::text() const {
  return fmt::format(
      "{} created, {} refused, {} destroyed, {} invalidated, {} promoted, {} inspected\n"
      "{} written ({} of {} looked at moved, {} staged), {} abandoned, {} failed with EIO, {} with ENOSPC\n"
      "{} read, {} more from completions, {} empty, {} failed with EIO, {} with a wrong checksum\n"
      "{} transfers completed, {} moved",
      created, refused, destroyed, invalidated, promoted, inspected, written, moved, watched, staged,
      abandoned, write_eio, write_enospc, read, read_again, found_empty, read_eio, bad_sum, completed,
      format_bytes(bytes));
}

VolumeUser::VolumeUser(Volume& volume, StallWatch& watch, const Dangers& dangers, std::uint64_t seed,
                       int number)
    : volume_(volume),
      watch_(watch),
      dangers_(dangers),
      number_(number),
      dice_(seed, static_cast<std::uint64_t>(number)) {
  for (int i = 0; i < kInFlight; ++i) {
    operations_.push_back(std::make_unique<Operation>(memory_.at(i * GuardedMemory::room(kMost))));
    free_.push_back(operations_.back().get());
  }
}

Tally VolumeUser::tally() const {
  Tally t = tally_;
  t.read_again = read_again_.load();
  t.completed += completed_.load();
  return t;
}

void VolumeUser::step() {
  take_results(false);
  watch_.counter(0).fetch_add(1, std::memory_order_relaxed);
  if (look_after_failure()) return;
  if (!staged_.empty() && dice_.roll(2) == 0) return go_on(index_below(staged_.size()));
  const std::int64_t what = dice_.roll(64);
  if (extents_.empty() || (what < 3 && extents_.size() < kMostExtents)) return create();
  if (what < 5) return destroy();
  if (what < 7) return invalidate();
  if (what < 13) return promote();
  if (what < 15) return inspect();
  what < 36 ? write(what == 15) : read(what == 36);
}

// ---- operations on extents ----

void VolumeUser::create() {
  auto e = std::make_unique<Extent>();
  e->number = next_extent_++;
  e->name = fmt::format("user{}.extent{}", number_, e->number);
  e->bytes = dice_.log_uniform(16);
  e->slots.resize(static_cast<std::size_t>(1 + dice_.roll(2)));
  try {
    e->id = volume_.create({.name = e->name, .bytes = e->bytes, .slots = static_cast<int>(e->slots.size())});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::kIo);
    EXPECT_EQ(error.where(), e->name);
    ++tally_.refused;
    if (!extents_.empty()) destroy();
    return;
  }
  ++tally_.created;
  extents_.push_back(std::move(e));
}

void VolumeUser::destroy() {
  auto& e = extents_[index_below(extents_.size())];
  settle(*e);
  volume_.destroy(e->id);
  std::erase_if(looks_, [&](const Look& look) { return look.extent == e.get(); });
  std::swap(e, extents_.back());
  extents_.pop_back();
  ++tally_.destroyed;
}

void VolumeUser::invalidate() {
  Extent& e = any_extent();
  const int slot = any_slot(e);
  if (!slot_of(e, slot).is_idle()) settle(e);
  volume_.invalidate(e.id, slot);
  slot_of(e, slot).version = -1;
  ++tally_.invalidated;
}

// An operation that is likely to be under way.
void VolumeUser::promote() {
  Extent* e = &any_extent();
  for (int i = 0; i < 4 && e->under_way == 0; ++i) e = &any_extent();
  volume_.promote(e->id, any_slot(*e), static_cast<Priority>(dice_.roll(kPriorities)));
  ++tally_.promoted;
}

void VolumeUser::inspect() {
  const Extent& e = any_extent();
  std::int64_t newest = -1, version = -1;
  bool writing = false;
  for (std::size_t s = 0; s < e.slots.size(); ++s) {
    const std::int64_t is = volume_.version(e.id, static_cast<int>(s));
    writing |= e.slots[s].writing;
    if (!e.slots[s].writing) {
      EXPECT_EQ(is, e.slots[s].version) << e.name;
    }
    if (e.slots[s].version > version) newest = static_cast<std::int64_t>(s);
    version = std::max(version, e.slots[s].version);
  }
  if (!writing) {
    EXPECT_EQ(volume_.newest_slot(e.id), newest) << e.name;
  }
  EXPECT_EQ(volume_.transfer_bytes(e.id), round_up(e.bytes, kPage));
  const SpaceReport space = volume_.space(dangers_.full_drive);
  EXPECT_LE(space.used, space.bytes);
  ++tally_.inspected;
}

void VolumeUser::write(bool waits) {
  Extent* e = &any_extent();
  int slot = any_slot(*e);
  for (int i = 0; i < 4 && !slot_of(*e, slot).is_idle(); ++i) {
    e = &any_extent();
    slot = any_slot(*e);
  }
  if (!slot_of(*e, slot).is_idle()) settle(*e);
  if (waits) {
    (void)move_and_wait(Op::kWrite, *e, slot);
  } else {
    begin(Op::kWrite, *e, slot,
          staged_.size() < kMostStaged && dice_.roll(3) == 0 ? Way::kStaged : Way::kWhole);
  }
}

void VolumeUser::read(bool waits) {
  Extent& e = any_extent();
  const int slot = any_slot(e);
  if (slot_of(e, slot).writing) settle(e);
  if (waits) {
    (void)move_and_wait(Op::kRead, e, slot);
  } else {
    begin(Op::kRead, e, slot);
  }
}

// A write failed: its slot must be empty, and the others as they were.
bool VolumeUser::look_after_failure() {
  while (!looks_.empty()) {
    const Look look = looks_.back();
    looks_.pop_back();
    if (slot_of(*look.extent, look.slot).writing) continue;
    begin(Op::kRead, *look.extent, look.slot);
    return true;
  }
  return false;
}

// ---- transfers ----

VolumeUser::Operation& VolumeUser::prepare(Op op, Extent& extent, int slot) {
  while (free_.empty()) take_results(true);
  Operation& o = *free_.back();
  free_.pop_back();
  Slot& s = slot_of(extent, slot);
  EXPECT_TRUE(op == Op::kRead ? !s.writing : s.is_idle()) << "the test itself is wrong";
  o.op = op;
  o.extent = &extent;
  o.slot = slot;
  o.priority = static_cast<Priority>(dice_.roll(kPriorities));
  o.again = false;
  o.ready = -1;
  o.abandoned = o.waited_for = false;
  o.told = 0;
  o.layout.clear();
  o.memory.place(dice_.roll(2) == 0 ? 0 : dice_.roll(kPage), extent.bytes);
  ++extent.under_way;
  ++tally_.begun;
  if (op == Op::kWrite) {
    o.version = ++version_;
    s.version = -1;
    s.writing = true;
    contents_of(o).fill(o.memory.data(), extent.bytes);
    if (dice_.roll(64) == 0) o.layout = volume_.describe_layout(extent.id, slot);
  } else {
    o.version = s.version;
    ++s.readers;
    o.memory.wipe();
    o.again = dice_.roll(16) == 0;
  }
  return o;
}

ExtentTransfer VolumeUser::transfer_of(Operation& o) {
  return {.extent = o.extent->id,
          .slot = o.slot,
          .data = o.memory.data(),
          .priority = o.priority,
          .version = o.op == Op::kWrite ? o.version : 0,
          .completion = this,
          .tag = o.tag,
          .ready = o.ready};
}

// Tags name their operation, and are never used twice: every one is followed by the one of a second reading.
void VolumeUser::begin(Op op, Extent& extent, int slot, Way way) {
  Operation& o = prepare(op, extent, slot);
  const auto index = static_cast<std::uint64_t>(
      std::find_if(operations_.begin(), operations_.end(), [&](const auto& p) { return p.get() == &o; }) -
      operations_.begin());
  o.tag = next_tag_ + index;
  next_tag_ += 2 * kInFlight;
  o.once.arm(o.tag);
  if (way == Way::kStaged) {
    o.memory.wipe();
    o.ready = 0;
    staged_.push_back(&o);
    ++tally_.staged;
  }
  op == Op::kRead ? volume_.read(transfer_of(o)) : volume_.write(transfer_of(o));
}

// More of the bytes of a staged write, or its end.
void VolumeUser::go_on(std::size_t staged) {
  Operation& o = *staged_[staged];
  const std::int64_t bytes = o.extent->bytes, from = o.ready;
  const std::int64_t what = dice_.roll(32);
  o.ready = what < 8 ? bytes : std::min(bytes, from + 8 * dice_.roll(bytes / 16 + 2));
  o.abandoned = what == 8;
  if (o.abandoned) o.ready = from;
  contents_of(o).fill(o.memory.data(), o.ready, from);
  const bool ended = o.abandoned || o.ready == bytes;
  if (ended) staged_.erase(staged_.begin() + static_cast<std::ptrdiff_t>(staged));
  // Once it has ended, `o` is its completion's.
  const ExtentId id = o.extent->id;
  const int slot = o.slot;
  o.abandoned ? volume_.abandon(id, slot) : volume_.mark_ready(id, slot, o.ready);
}

// extent: null for all extents.
void VolumeUser::end_staged(const Extent* of) {
  for (std::size_t i = 0; i < staged_.size();) {
    const std::size_t before = staged_.size();
    if (of == nullptr || staged_[i]->extent == of) {
      go_on(i);
      if (staged_.size() < before) continue;
    } else {
      ++i;
    }
  }
}

ExtentResult VolumeUser::move_and_wait(Op op, Extent& extent, int slot) {
  Operation& o = prepare(op, extent, slot);
  o.again = false;
  o.waited_for = true;
  o.named = extent.id;
  o.result = op == Op::kRead ? volume_.read_and_wait(transfer_of(o)) : volume_.write_and_wait(transfer_of(o));
  ++tally_.completed;
  const ExtentResult result = o.result;
  absorb(o);
  return result;
}

void VolumeUser::on_extent(ExtentId extent, std::uint64_t tag, ExtentResult result) {
  Operation& o = *operations_[tag % kInFlight];
  if (!o.once.take(tag)) {
    ADD_FAILURE() << "a completion came twice, or for what nobody began: " << tag;
    return;
  }
  completed_.fetch_add(1, std::memory_order_relaxed);
  o.named = extent;
  o.result = result;
  if (o.again && result.ok()) {
    check(o);
    o.again = false;
    o.memory.wipe();
    o.told = 0;
    o.tag += kInFlight;
    read_again_.fetch_add(1, std::memory_order_relaxed);
    o.once.arm(o.tag);
    return volume_.read(transfer_of(o));
  }
  std::lock_guard lock(mutex_);
  done_.push_back(&o);
  changed_.notify_one();
}

void VolumeUser::on_piece(ExtentId extent, std::uint64_t tag, std::int64_t first, std::int64_t bytes) {
  Operation& o = *operations_[tag % kInFlight];
  EXPECT_TRUE(o.once.is_armed(tag) && o.op == Op::kRead) << "a piece of what is over, or was never begun";
  EXPECT_EQ(extent.index, o.extent->id.index);
  EXPECT_LE(first + bytes, o.extent->bytes);
  EXPECT_TRUE(contents_of(o).are(o.memory.data(), first + bytes, first))
      << "a wrong piece of " << o.extent->name << ": " << bytes << " bytes at " << first;
  o.told.fetch_add(bytes, std::memory_order_relaxed);
}

void VolumeUser::settle(Extent& extent) {
  end_staged(&extent);
  while (extent.under_way > 0) take_results(true);
}

void VolumeUser::take_results(bool wait) {
  {
    std::unique_lock lock(mutex_);
    if (wait) changed_.wait(lock, [&] { return !done_.empty(); });
    taken_.swap(done_);
  }
  for (Operation* o : taken_) absorb(*o);
  taken_.clear();
}

// Updates the model by the result of an operation.
void VolumeUser::absorb(Operation& o) {
  check(o);
  count(o);
  Slot& s = slot_of(*o.extent, o.slot);
  if (o.op == Op::kWrite) {
    s.writing = false;
    s.version = o.result.ok() ? o.version : -1;
    EXPECT_EQ(volume_.version(o.extent->id, o.slot), s.version) << o.extent->name;
    if (!o.layout.empty()) {
      ++tally_.watched;
      if (volume_.describe_layout(o.extent->id, o.slot) != o.layout) ++tally_.moved;
    }
    if (!o.result.ok()) {
      for (std::size_t i = 0; i < o.extent->slots.size(); ++i)
        looks_.push_back({o.extent, static_cast<int>(i)});
    }
  } else {
    --s.readers;
  }
  --o.extent->under_way;
  free_.push_back(&o);
}

void VolumeUser::count(const Operation& o) {
  Tally& t = tally_;
  const bool write = o.op == Op::kWrite;
  switch (o.result.error) {
    case 0:
      ++(write ? t.written : t.read);
      t.bytes += o.extent->bytes;
      break;
    case ECANCELED:
      ++t.abandoned;
      break;
    case ENODATA:
      ++t.found_empty;
      break;
    case EBADMSG:
      ++t.bad_sum;
      break;
    case ENOSPC:
      ++t.write_enospc;
      break;
    default:
      ++(write ? t.write_eio : t.read_eio);
  }
}

// ---- what must hold ----

Contents VolumeUser::contents_of(const Operation& o) const {
  const auto user = static_cast<std::uint64_t>(number_ * 2 + o.slot) << 56;
  return Contents(user ^ o.extent->number << 28 ^ static_cast<std::uint64_t>(o.version));
}

void VolumeUser::check(const Operation& o) const {
  const Extent& e = *o.extent;
  EXPECT_TRUE(o.named.index == e.id.index && o.named.generation == e.id.generation)
      << e.name << ": the completion is for another extent";
  EXPECT_TRUE(o.memory.guards_hold()) << e.name << ": bytes beside it were changed";
  if (o.op == Op::kWrite) {
    EXPECT_TRUE(contents_of(o).are(o.memory.data(), o.abandoned ? o.ready : e.bytes))
        << e.name << ": a write changed its source";
  } else if (o.result.ok()) {
    EXPECT_EQ(o.told, o.waited_for ? 0 : e.bytes) << e.name << ": bytes that were told";
    EXPECT_GE(o.version, 0) << e.name << ": bytes were read from a slot that has none";
    EXPECT_TRUE(contents_of(o).are(o.memory.data(), e.bytes))
        << "wrong bytes of " << e.name << " (" << e.bytes << " bytes), slot " << o.slot << ", version "
        << o.version << ", at " << volume_.describe_layout(e.id, o.slot);
  }
  if (!o.result.ok()) check_failure(o);
}

void VolumeUser::check_failure(const Operation& o) const {
  const Extent& e = *o.extent;
  const ExtentResult& r = o.result;
  const std::string text = volume_.explain(e.id, o.op, r);
  if (r.error == ECANCELED) {
    EXPECT_TRUE(o.abandoned && r.drive < 0) << text;
    return;
  }
  EXPECT_EQ(text.find(fmt::format("{} {}: ", o.op == Op::kRead ? "reading" : "writing", e.name)), 0) << text;
  EXPECT_EQ(r.error == ENODATA, o.op == Op::kRead && o.version < 0) << text;
  if (r.error == ENODATA) {
    EXPECT_EQ(r.drive, -1);
    return;
  }
  EXPECT_NE(text.find("piece of "), text.npos) << text;
  EXPECT_NE(text.find(fmt::format("at {} of nvme{} (/mnt/{}): ", r.offset, r.drive, r.drive)), text.npos)
      << text;
  const bool checksum = r.error == EBADMSG;
  EXPECT_NE(text.find(checksum ? "checksum is wrong" : fmt::format("(errno {})", r.error)), text.npos)
      << text;
  if (checksum) {
    EXPECT_TRUE(dangers_.lies && o.op == Op::kRead) << text;
  } else if (r.error == ENOSPC) {
    EXPECT_TRUE(o.op == Op::kWrite && r.drive == dangers_.full_drive && r.offset < dangers_.full_to &&
                r.offset + round_up(e.bytes, kPage) > dangers_.full_from)
        << text;
  } else {
    EXPECT_EQ(r.error, EIO) << text;
  }
}

// ---- the end ----

void VolumeUser::end() {
  end_staged(nullptr);
  while (free_.size() < operations_.size()) take_results(true);
  for (auto& e : extents_) {
    for (std::size_t s = 0; s < e->slots.size(); ++s) read_to_the_end(*e, static_cast<int>(s));
  }
  while (!extents_.empty()) destroy();
}

// A failure to read is passing, unless what lies there is not what was written.
void VolumeUser::read_to_the_end(Extent& extent, int slot) {
  for (int i = 0; i < kMostTries; ++i) {
    const ExtentResult result = move_and_wait(Op::kRead, extent, slot);
    watch_.counter(0).fetch_add(1, std::memory_order_relaxed);
    if (result.ok() || result.error == ENODATA || testing::Test::HasFailure()) return;
  }
  EXPECT_TRUE(dangers_.lies) << extent.name << " can no more be read, though no fault lasts";
}

}  // namespace zg::io::test
