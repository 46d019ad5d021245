// Volumes over real engines: contents, versions, checksums, space, shares and errors.
#include "ziggurat/io/volume.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <thread>

#include "support/count_allocations.hpp"
#include "support/memory_io.hpp"
#include "volume_support.hpp"

namespace zg::io::test {
namespace {

// ---- Versions

class Fixture {
 public:
  explicit Fixture(std::unique_ptr<Engine> e, const VolumeOptions& options = small_pieces())
      : engine(std::move(e)), volume(make_volume(*engine, options)) {}
  ExtentResult write(ExtentId id, int slot, std::int64_t version) {
    memory.fill(0, memory.bytes(), static_cast<std::uint64_t>(version));
    return volume->write_and_wait({.extent = id, .slot = slot, .data = memory.data(), .version = version});
  }
  // True when the slot holds what write() put there.
  bool holds(ExtentId id, int slot, std::int64_t version) {
    std::memset(memory.data(), 0, static_cast<std::size_t>(memory.bytes()));
    if (!volume->read_and_wait({.extent = id, .slot = slot, .data = memory.data()}).ok()) return false;
    expected.fill(0, expected.bytes(), static_cast<std::uint64_t>(version));
    return same_bytes(memory, expected, volume->transfer_bytes(id));
  }
  const std::unique_ptr<Engine> engine;
  const std::unique_ptr<Volume> volume;
  const Memory memory{4 * kMiB}, expected{4 * kMiB};
};

TEST(Volume, SlotsKeepTheirVersions) {
  Fixture f(ram_engine({kMiB, kMiB}));
  const ExtentId id = f.volume->create({.name = "state", .bytes = 5 * kGrain, .slots = 2});
  EXPECT_EQ(f.volume->newest_slot(id), -1);
  EXPECT_EQ(f.volume->transfer_bytes(id), 5 * kGrain);
  ASSERT_TRUE(f.write(id, 0, 7).ok());
  ASSERT_TRUE(f.write(id, 1, 8).ok());
  EXPECT_EQ(f.volume->newest_slot(id), 1);
  EXPECT_TRUE(f.holds(id, 0, 7));
  EXPECT_TRUE(f.holds(id, 1, 8));
  ASSERT_TRUE(f.write(id, 0, 9).ok());
  EXPECT_EQ(f.volume->newest_slot(id), 0);
  EXPECT_TRUE(f.holds(id, 1, 8));
  f.volume->invalidate(id, 0);
  EXPECT_EQ(f.volume->newest_slot(id), 1);
  EXPECT_EQ(f.volume->version(id, 0), -1);
  EXPECT_FALSE(f.holds(id, 0, 9));
}

TEST(Volume, PinnedSlotsAreLeftAlone) {
  Fixture f(ram_engine({kMiB, kMiB}));
  const ExtentId id = f.volume->create({.name = "state", .bytes = 5 * kGrain, .slots = 3});
  EXPECT_EQ(f.volume->slot_to_write(id), 0);
  ASSERT_TRUE(f.write(id, 0, 1).ok());
  EXPECT_EQ(f.volume->slot_to_write(id), 1);
  f.volume->pin(id, 0), f.volume->pin(id, 0);
  ASSERT_TRUE(f.write(id, 1, 2).ok());
  ASSERT_TRUE(f.write(id, 2, 3).ok());
  EXPECT_EQ(f.volume->slot_to_write(id), 1);  // the oldest that is not pinned
  f.volume->pin(id, 1);
  EXPECT_EQ(f.volume->slot_to_write(id), 2);
  f.volume->pin(id, 2);
  EXPECT_EQ(f.volume->slot_to_write(id), -1);
  f.volume->unpin(id, 0);
  EXPECT_EQ(f.volume->slot_to_write(id), -1);
  f.volume->unpin(id, 0);
  EXPECT_EQ(f.volume->slot_to_write(id), 0);
  EXPECT_DEATH((void)f.write(id, 1, 4), "is written, and pinned");
  EXPECT_DEATH(f.volume->invalidate(id, 1), "is invalidated, and pinned");
}

// Another volume over the same drives takes contents over where they lie, pinned or not; the rest is free.
TEST(Volume, ContentsAreAdopted) {
  const std::unique_ptr<Engine> engine = ram_engine({kMiB, kMiB, kMiB});
  const Memory memory(5 * kGrain), found(5 * kGrain);
  StoredSlot stored[2];
  {
    const std::unique_ptr<Volume> volume = make_volume(*engine, small_pieces());
    const ExtentId before = volume->create({.name = "other", .bytes = 3 * kGrain});
    const ExtentId id = volume->create({.name = "state", .bytes = 5 * kGrain, .slots = 2});
    volume->destroy(before);
    for (const int slot : {0, 1}) {
      memory.fill(0, memory.bytes(), static_cast<std::uint64_t>(slot));
      ASSERT_TRUE(
          volume->write_and_wait({.extent = id, .slot = slot, .data = memory.data(), .version = 4 + slot})
              .ok());
      stored[slot] = {volume->version(id, slot), volume->stored_pieces(id, slot), slot};
    }
  }
  const std::unique_ptr<Volume> volume = make_volume(*engine, small_pieces());
  for (const StoredSlot& slot : stored) volume->take(slot.pieces);
  EXPECT_EQ(used_bytes(*volume, 3), 10 * kGrain);
  EXPECT_THROW(volume->take(stored[0].pieces), Error);  // they are taken
  const ExtentId id =
      volume->create({.name = "state", .bytes = 5 * kGrain, .slots = 3, .adopted = {stored[0], stored[1]}});
  EXPECT_EQ(used_bytes(*volume, 3), 15 * kGrain);
  EXPECT_EQ(volume->newest_slot(id), 1);
  EXPECT_EQ(volume->version(id, 0), 4);
  EXPECT_EQ(volume->slot_to_write(id), 2);
  for (const int slot : {0, 1}) {
    ASSERT_TRUE(volume->read_and_wait({.extent = id, .slot = slot, .data = found.data()}).ok());
    memory.fill(0, memory.bytes(), static_cast<std::uint64_t>(slot));
    EXPECT_TRUE(same_bytes(memory, found, memory.bytes()));
  }
  // What is left holds nothing of theirs, and all of it can be had.
  const std::int64_t rest = 3 * kMiB - 15 * kGrain;
  const ExtentId all = volume->create({.name = "all", .bytes = rest});
  const Memory much(rest);
  ASSERT_TRUE(volume->write_and_wait({.extent = all, .data = much.data(), .version = 1}).ok());
  ASSERT_TRUE(volume->read_and_wait({.extent = id, .slot = 1, .data = found.data()}).ok());
  EXPECT_TRUE(same_bytes(memory, found, memory.bytes()));
  volume->destroy(all), volume->destroy(id);
  EXPECT_EQ(used_bytes(*volume, 3), 0);
  const StoredPiece wrong[] = {
      {3, 0, kGrain, 0}, {0, 100, kGrain, 0}, {0, kMiB, kGrain, 0}, {0, 0, 2 * kMiB, 0}};
  for (const StoredPiece& piece : wrong) EXPECT_THROW(volume->take({&piece, 1}), Error);
}

// Drive 0 fails from its fourth block on: slot 1 of `b` lies there, slot 0 on drive 1.
TEST(Volume, AFailedWriteEmptiesItsSlotAndNoOther) {
  Fixture f(ram_engine({kMiB, kMiB}, {.fail_after = 3}));
  const ExtentId a = f.volume->create({.name = "a", .bytes = kGrain});
  const ExtentId b = f.volume->create({.name = "b", .bytes = kGrain, .slots = 2});
  ASSERT_TRUE(f.write(a, 0, 1).ok());
  ASSERT_TRUE(f.write(b, 0, 1).ok());
  ASSERT_TRUE(f.write(b, 1, 2).ok());
  ASSERT_TRUE(f.holds(b, 1, 2));
  const ExtentResult result = f.write(b, 1, 3);
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.drive, 0);
  EXPECT_EQ(f.volume->version(b, 1), -1);
  EXPECT_EQ(f.volume->newest_slot(b), 0);
  EXPECT_TRUE(f.holds(b, 0, 1));
  EXPECT_EQ(f.volume->read_and_wait({.extent = b, .slot = 1, .data = f.memory.data()}).error, ENODATA);
}

TEST(Volume, AFailedReadLeavesTheContents) {
  Fixture f(ram_engine({kMiB}, {.seed = 3, .error_rate = 0.3}));
  const ExtentId id = f.volume->create({.name = "x", .bytes = kGrain});
  while (!f.write(id, 0, 4).ok()) {
  }
  int failed = 0;
  for (int i = 0; i < 50; ++i) failed += !f.holds(id, 0, 4);
  EXPECT_GT(failed, 0);
  EXPECT_LT(failed, 50);
  EXPECT_EQ(f.volume->version(id, 0), 4);
}

// ---- Errors

TEST(Volume, AFailedDriveIsNamedWithTheExtent) {
  Fixture f(ram_engine({kMiB, kMiB}, {.fail_after = 1}));
  f.volume->create({.name = "other", .bytes = 2 * kGrain});  // on drive 0
  const ExtentId id = f.volume->create({.name = "block.3.master", .bytes = 2 * kGrain});
  ASSERT_TRUE(f.write(id, 0, 1).ok());
  const ExtentResult result = f.volume->read_and_wait({.extent = id, .data = f.memory.data()});
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.drive, 1);
  EXPECT_EQ(result.offset, 0);
  const DriveReport drive = f.engine->report(1);
  const std::string name = drive.path.empty() ? drive.name : fmt::format("{} ({})", drive.name, drive.path);
  EXPECT_EQ(f.volume->explain(id, Op::kRead, result),
            fmt::format("reading block.3.master: piece of 32.0 KiB at 0 of {}: Input/output error (errno 5)",
                        name));
  EXPECT_EQ(
      f.volume->explain(id, Op::kWrite, {.error = EBADMSG, .drive = 1, .offset = 0}),
      fmt::format("writing block.3.master: piece of 32.0 KiB at 0 of {}: its checksum is wrong (the drive "
                  "returned other bytes than were written)",
                  name));
  EXPECT_EQ(f.volume->explain(id, Op::kRead, {.error = ENODATA}),
            "reading block.3.master: it has no contents");
}

TEST(Volume, AnEmptySlotIsAResultOnAnotherThread) {
  Fixture f(ram_engine({kMiB}));
  const ExtentId id = f.volume->create({.name = "x", .bytes = kGrain});
  Results results;
  f.volume->read({.extent = id, .data = f.memory.data(), .completion = &results, .tag = 5});
  const ExtentResult result = results.wait_for(5);
  EXPECT_EQ(result.error, ENODATA);
  EXPECT_EQ(result.drive, -1);
  EXPECT_NE(results.thread(), std::this_thread::get_id());
  ASSERT_TRUE(f.write(id, 0, 1).ok());
  EXPECT_TRUE(f.holds(id, 0, 1));
}

// ENODATA and EBADMSG mean something of the volume's own, so the engine's are reported as another error.
TEST(Volume, ErrorsOfTheEngineAreNotTakenForTheVolumes) {
  for (const auto& [error, said] : {std::pair{ENODATA, "the file ends before it: was it cut short?"},
                                    std::pair{EBADMSG, "Bad message (errno 74)"}}) {
    for (const Op op : {Op::kRead, Op::kWrite}) {
      Fixture f(ram_engine({kMiB}, {.rules = {{.error = error, .op = op, .first_block = 1}}}));
      const ExtentId id = f.volume->create({.name = "x", .bytes = 2 * kGrain});
      ASSERT_TRUE(f.write(id, 0, 1).ok());
      const ExtentResult result = op == Op::kWrite
                                      ? f.write(id, 0, 2)
                                      : f.volume->read_and_wait({.extent = id, .data = f.memory.data()});
      EXPECT_EQ(result.error, EIO);
      EXPECT_EQ(result.cause, error);
      EXPECT_EQ(result.drive, 0);
      const std::string text = f.volume->explain(id, op, result);
      EXPECT_HAS(text, said);
      EXPECT_EQ(f.volume->version(id, 0), op == Op::kRead ? 1 : -1);
    }
  }
}

// All pages of all drives, by their first word (Memory::fill makes them differ).
struct Page {
  int drive = 0;
  std::int64_t offset = 0;
};
std::map<std::uint64_t, Page> pages_of(Engine& engine) {
  std::map<std::uint64_t, Page> pages;
  for (int d = 0; d < engine.drive_count(); ++d) {
    const Memory all(engine.drive_bytes(d));
    EXPECT_TRUE(engine.wait(engine.submit({.drive = d, .data = all.data(), .bytes = all.bytes()})).ok());
    for (std::int64_t at = 0; at < all.bytes(); at += kPage) {
      std::uint64_t word = 0;
      std::memcpy(&word, all.at(at), sizeof(word));
      pages[word] = {d, at};
    }
  }
  return pages;
}

TEST(Volume, AFlippedBitAnywhereIsFoundAtTheNextRead) {
  Fixture f(ram_engine({2 * kMiB, 2 * kMiB, 2 * kMiB}));
  // Holes of one grain, so that the extent lies in many pieces.
  std::vector<ExtentId> filling;
  for (int i = 0; i < 6 * 64; ++i) filling.push_back(f.volume->create({.name = "filling", .bytes = kGrain}));
  for (std::size_t i = 0; i < filling.size(); i += 2) f.volume->destroy(filling[i]);
  const std::int64_t bytes = 50 * kGrain;
  const ExtentId id = f.volume->create({.name = "x", .bytes = bytes});
  ASSERT_TRUE(f.write(id, 0, 99).ok());
  const std::map<std::uint64_t, Page> pages = pages_of(*f.engine);
  const NamedRandom random(printed_seed(), "bits");
  const Memory original(bytes), page(kPage);
  original.fill(0, bytes, 99);
  for (std::uint64_t n = 0; n < 400; ++n) {
    const auto bit = static_cast<std::int64_t>(random.below(n, static_cast<std::uint64_t>(bytes * 8)));
    const std::int64_t at = bit / 8 / kPage * kPage, inside = bit / 8 % kPage;
    std::uint64_t word = 0;
    std::memcpy(&word, original.at(at), sizeof(word));
    ASSERT_EQ(pages.count(word), 1u) << "the drives do not hold byte " << at;
    const Page where = pages.at(word);
    const auto put = [&](char mask) {
      std::memcpy(page.data(), original.at(at), kPage);
      *page.at(inside) = static_cast<char>(*page.at(inside) ^ mask);
      return f.engine->wait(f.engine->submit({.op = Op::kWrite,
                                              .drive = where.drive,
                                              .offset = where.offset,
                                              .data = page.data(),
                                              .bytes = kPage}));
    };
    ASSERT_TRUE(put(static_cast<char>(1 << bit % 8)).ok());
    const ExtentResult result = f.volume->read_and_wait({.extent = id, .data = f.memory.data()});
    ASSERT_EQ(result.error, EBADMSG) << "bit " << bit;
    EXPECT_EQ(result.drive, where.drive);
    EXPECT_LE(result.offset, where.offset);
    ASSERT_TRUE(put(0).ok());
    if (n % 50 == 0) {
      ASSERT_TRUE(f.holds(id, 0, 99));
    }
  }
}

TEST(Volume, WithoutVerificationBytesComeAsTheyAre) {
  VolumeOptions options = small_pieces();
  options.verify = false;
  Fixture f(ram_engine({kMiB}), options);
  const ExtentId id = f.volume->create({.name = "x", .bytes = kGrain});
  ASSERT_TRUE(f.write(id, 0, 1).ok());
  const Memory zeros(kPage);
  ASSERT_TRUE(
      f.engine->wait(f.engine->submit({.op = Op::kWrite, .data = zeros.data(), .bytes = kPage})).ok());
  EXPECT_TRUE(f.volume->read_and_wait({.extent = id, .data = f.memory.data()}).ok());
}

TEST(Volume, OddSizesAndAddresses) {
  Fixture f(ram_engine({kMiB, kMiB}));
  std::vector<std::pair<ExtentId, std::int64_t>> extents;
  for (const std::int64_t bytes :
       {std::int64_t{1}, kPage - 1, kPage + 1, kGrain - 1, kGrain + 1, 7 * kGrain + 123})
    extents.emplace_back(f.volume->create({.name = "odd", .bytes = bytes}), bytes);
  const Memory in(kMiB), out(kMiB);
  for (const std::int64_t shift : {0, 1, 8}) {
    for (std::size_t i = 0; i < extents.size(); ++i) {
      in.fill(0, in.bytes(), 10 + i);
      ASSERT_TRUE(f.volume->write_and_wait({.extent = extents[i].first, .data = in.at(shift)}).ok());
    }
    for (std::size_t i = 0; i < extents.size(); ++i) {
      const auto [id, bytes] = extents[i];
      std::memset(out.data(), 0x5A, static_cast<std::size_t>(out.bytes()));
      ASSERT_TRUE(f.volume->read_and_wait({.extent = id, .data = out.at(shift)}).ok());
      in.fill(0, in.bytes(), 10 + i);
      EXPECT_EQ(std::memcmp(in.at(shift), out.at(shift), static_cast<std::size_t>(bytes)), 0) << bytes;
      EXPECT_EQ(*out.at(shift + bytes), 0x5A) << "bytes behind the extent were changed";
      EXPECT_EQ(f.volume->transfer_bytes(id), round_up(bytes, kPage));
    }
  }
}

// ---- Space

TEST(Volume, SpaceIsAccountedForInGrains) {
  Fixture f(ram_engine({kMiB, kMiB + kPage}));  // a part of a grain is of no use
  EXPECT_EQ(f.volume->space(1).bytes, kMiB + kPage);
  EXPECT_EQ(f.volume->space(1).largest, kMiB);
  const ExtentId one = f.volume->create({.name = "one", .bytes = kGrain + kPage, .slots = 2});
  EXPECT_EQ(used_bytes(*f.volume, 2), 4 * kGrain);
  const ExtentId all = f.volume->create({.name = "all", .bytes = 2 * kMiB - 4 * kGrain});
  EXPECT_EQ(used_bytes(*f.volume, 2), 2 * kMiB);
  EXPECT_EQ(f.volume->space(0).largest, 0);
  const Error e = error_of([&] { f.volume->create({.name = "more", .bytes = kPage}); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_HAS(e.message(), "no room for 1 slot(s) of 16.0 KiB");
  EXPECT_HAS(e.message(), "0 B of 1.0 MiB");
  f.volume->destroy(one);
  EXPECT_EQ(used_bytes(*f.volume, 2), 2 * kMiB - 4 * kGrain);
  // Not all slots fit: none is kept.
  EXPECT_THROW(f.volume->create({.name = "three", .bytes = 2 * kGrain, .slots = 3}), Error);
  EXPECT_EQ(used_bytes(*f.volume, 2), 2 * kMiB - 4 * kGrain);
  f.volume->destroy(all);
  EXPECT_EQ(used_bytes(*f.volume, 2), 0);
  EXPECT_EQ(f.volume->space(0).largest, kMiB);
}

// Small and large extents, each written as often: bytes by shares, counted where they arrive.
TEST(Volume, UnevenSharesHoldInTheLongRun) {
  VolumeOptions options = small_pieces();
  options.shares = {1, 1, 2, 4};
  options.adapt = false;
  constexpr std::int64_t kEach = 128 * kMiB;
  Fixture f(ram_engine({kEach, kEach, kEach, kEach}), options);
  const NamedRandom random(printed_seed(), "sizes");
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const auto grains = static_cast<std::int64_t>(1 + random.below(i, i % 2 == 0 ? 3 : 20));
    const ExtentId id = f.volume->create({.name = "x", .bytes = grains * kGrain});
    for (int n = 0; n < 2; ++n)
      ASSERT_TRUE(f.volume->write_and_wait({.extent = id, .data = f.memory.data()}).ok());
  }
  std::vector<double> written;
  for (int d = 0; d < 4; ++d) written.push_back(static_cast<double>(f.engine->counters(d).write_bytes));
  const double all = std::accumulate(written.begin(), written.end(), 0.0);
  const double expected[] = {0.125, 0.125, 0.25, 0.5};
  for (int d = 0; d < 4; ++d) {
    EXPECT_NEAR(written[static_cast<std::size_t>(d)] / all, expected[d], 0.01) << "drive " << d;
    EXPECT_NEAR(f.volume->space(d).share, expected[d], 1e-9);
    EXPECT_FALSE(f.volume->space(d).shares_are_learned);
  }
}

TEST(Volume, AFullDriveLeavesItsShareToTheOthers) {
  VolumeOptions options = small_pieces();
  options.shares = {1, 1, 6};
  Fixture f(ram_engine({kMiB, kMiB, 4 * kGrain}), options);
  std::vector<ExtentId> extents;
  for (int i = 0; i < 12; ++i) {
    extents.push_back(f.volume->create({.name = "x", .bytes = 11 * kGrain}));
    ASSERT_TRUE(f.write(extents.back(), 0, 100 + i).ok());
  }
  EXPECT_EQ(f.volume->space(2).used, 4 * kGrain);
  EXPECT_EQ(used_bytes(*f.volume, 3), 2 * kMiB + 4 * kGrain);  // to the last grain
  for (int i = 0; i < 12; ++i) EXPECT_TRUE(f.holds(extents[static_cast<std::size_t>(i)], 0, 100 + i));
}

TEST(Volume, OptionsThatMakeNoSenseAreRefused) {
  const auto engine = ram_engine({kMiB, kMiB});
  const auto refused = [&](const VolumeOptions& options) {
    const auto e = zg::test::thrown_by([&] { return make_volume(*engine, options); });
    return e && e->code() == Errc::kUsage;
  };
  EXPECT_TRUE(refused({.shares = {1}}));
  EXPECT_TRUE(refused({.shares = {1, -1}}));
  EXPECT_TRUE(refused({.shares = {0, 0}}));
  EXPECT_TRUE(refused({.shares = {1, NAN}}));
  EXPECT_TRUE(refused({.grain = 5000}));
  EXPECT_TRUE(refused({.grain = 0}));
  EXPECT_TRUE(refused({.stripe = 0}));
  EXPECT_FALSE(refused({.shares = {0, 1}}));
}

// ---- Transfers under way

TEST(Volume, TheDestructorWaitsForTransfersAndTheirCompletions) {
  Results results;
  const Memory memory(8 * kGrain);
  auto engine = ram_engine({kMiB, kMiB}, {}, {.latency_seconds = 0.02});
  auto volume = make_volume(*engine, small_pieces());
  for (std::uint64_t i = 0; i < 4; ++i) {
    const ExtentId id = volume->create({.name = "x", .bytes = 8 * kGrain});
    volume->write({.extent = id, .data = memory.data(), .completion = &results, .tag = i});
  }
  volume.reset();
  EXPECT_EQ(results.count(), 4u);
}

// Writes and reads in turn, each begun by the completion of the one before.
class Chain final : public ExtentCompletion {
 public:
  Chain(Volume& volume, ExtentId id, const Memory& memory) : volume_(volume), id_(id), memory_(memory) {}
  void on_extent(ExtentId id, std::uint64_t tag, ExtentResult result) override {
    EXPECT_EQ(id.index, id_.index);
    EXPECT_TRUE(result.ok()) << tag;
    ++completed_;
    if (tag < kLinks) next(tag + 1);
  }
  void next(std::uint64_t tag) {
    const ExtentTransfer t{.extent = id_, .data = memory_.data(), .completion = this, .tag = tag};
    tag % 2 == 0 ? volume_.write(t) : volume_.read(t);
  }
  static constexpr std::uint64_t kLinks = 400;
  std::uint64_t completed() const { return completed_; }

 private:
  Volume& volume_;
  const ExtentId id_;
  const Memory& memory_;
  std::uint64_t completed_ = 0;
};

TEST(Volume, CompletionsMayBeginTransfersAndTheDestructorWaitsForTheseToo) {
  const Memory memory(8 * kGrain);
  auto engine = ram_engine({kMiB, kMiB});
  auto volume = make_volume(*engine, small_pieces());
  Chain chain(*volume, volume->create({.name = "x", .bytes = 8 * kGrain}), memory);
  chain.next(0);
  volume.reset();
  EXPECT_EQ(chain.completed(), Chain::kLinks + 1);
}

TEST(Volume, APromotedTransferOvertakes) {
  Results results;
  auto engine = ram_engine({8 * kMiB}, {}, {.bytes_per_second = 50e6});
  auto volume = make_volume(*engine, small_pieces());
  const Memory memory(kMiB);
  std::vector<ExtentId> ids;
  for (std::uint64_t i = 0; i < 6; ++i) {
    ids.push_back(volume->create({.name = "x", .bytes = kMiB}));
    volume->write({.extent = ids[i],
                   .data = memory.data(),
                   .priority = Priority::kWriteBack,
                   .completion = &results,
                   .tag = i});
  }
  volume->promote(ids[5], 0, Priority::kDemand);
  EXPECT_TRUE(results.wait_for(5).ok());
  EXPECT_LT(results.count(), 4u);
  volume.reset();
  EXPECT_EQ(results.count(), 6u);
}

TEST(Volume, SharesAreLearnedFromTheDrives) {
  EngineOptions options;
  options.backend = Backend::kRam;
  options.block_size = 64 * kKiB;
  std::vector<DriveOptions> drives;
  for (const double speed : {20e6, 80e6}) {
    drives.push_back({.bytes = 32 * kMiB});
    drives.back().ram = RamModel{.bytes_per_second = speed};
  }
  Fixture f(make_engine(options, drives));
  const ExtentId id = f.volume->create({.name = "x", .bytes = 2 * kMiB});
  EXPECT_FALSE(f.volume->space(0).shares_are_learned);
  for (int i = 0; i < 12; ++i) ASSERT_TRUE(f.write(id, 0, i).ok());
  EXPECT_TRUE(f.volume->space(0).shares_are_learned);
  EXPECT_GT(f.volume->space(1).share, 0.6);
  EXPECT_GT(f.volume->space(1).used, f.volume->space(0).used);
  EXPECT_TRUE(f.holds(id, 0, 11));
}

// ---- Memory

// One drive, whose share is learned, and two with given ones: extents stay where they are.
TEST(Volume, SteadyReadsAndWritesAllocateNothing) {
  EngineOptions options;
  options.backend = Backend::kRam;
  options.block_size = 64 * kKiB;
  VolumeOptions placed = small_pieces();
  std::vector<DriveOptions> drives;
  for (const char* path : {"/mnt/a path of some length", "/mnt/another one"}) {
    drives.push_back({.path = path, .bytes = 8 * kMiB});
    placed.shares.push_back(1);
    placed.adapt = drives.size() == 1;
    Fixture f(make_engine(options, drives), placed);
    const ExtentId id = f.volume->create({.name = "x", .bytes = kMiB, .slots = 2});
    std::int64_t transfers = 0, good = 0;
    // Many samples of the drives are taken in that time.
    const auto use = [&](double seconds) {
      for (const auto begin = Clock::now(); seconds_between(begin, Clock::now()) < seconds; ++transfers) {
        const ExtentTransfer t{
            .extent = id, .slot = static_cast<int>(transfers / 2 % 2), .data = f.memory.data(), .version = 1};
        good += (transfers % 2 == 0 ? f.volume->write_and_wait(t) : f.volume->read_and_wait(t)).ok();
      }
    };
    use(0.15);
    const std::int64_t before = zg::test::allocations_of_all_threads();
    use(0.3);
    const std::int64_t after = zg::test::allocations_of_all_threads();
    EXPECT_EQ(after, before) << drives.size() << " drives";
    EXPECT_EQ(good, transfers);
  }
}

// A write that moves its extent, of many pieces, to the drive where room has come free; its n-th allocation
// fails.
class OutOfMemory {
 public:
  bool refused = false, cut_off = false;
  OutOfMemory() { prepare(); }
  // False when it has fewer allocations.
  bool write(std::int64_t n) {
    zg::test::fail_allocation(n);
    bool begun = true;
    try {
      volume->write({.extent = id, .data = memory.data(), .version = 1, .completion = &results, .tag = 1});
    } catch (const std::bad_alloc&) {
      begun = false;
    }
    const bool failed = zg::test::allocation_failed();
    if (!begun) {
      EXPECT_EQ(results.count(), 0u);
      EXPECT_EQ(volume->version(id, 0), -1);
      refused = true;
    } else if (const ExtentResult result = results.wait_for(1); !result.ok()) {
      EXPECT_EQ(result.error, ENOMEM);
      EXPECT_HAS(volume->explain(id, Op::kWrite, result), "writing x: piece of 16.0 KiB");
      cut_off = true;
    } else {
      EXPECT_EQ(volume->version(id, 0), 1);
    }
    EXPECT_EQ(used_bytes(*volume, 2), 192 * kGrain - 64 * kGrain + kPieces * kGrain);
    return failed;
  }
  // Whatever came of it, the slot can be used, and nobody else's space is touched.
  void check() {
    memory.fill(0, memory.bytes(), 5);
    ASSERT_TRUE(volume->write_and_wait({.extent = id, .data = memory.data()}).ok());
    const Memory back(memory.bytes());
    ASSERT_TRUE(volume->read_and_wait({.extent = id, .data = back.data()}).ok());
    EXPECT_TRUE(same_bytes(back, memory, kPieces * kGrain));
    for (const ExtentId other : filling) volume->destroy(other);
    volume->destroy(id);
    EXPECT_EQ(used_bytes(*volume, 2), 0);
    for (int d = 0; d < 2; ++d) EXPECT_EQ(volume->space(d).largest, 128 * kGrain);
  }

 private:
  void prepare() {
    engine = std::make_unique<zg::test::MemoryIo>(2, 128 * kGrain, zg::test::MemoryIo::Options{});
    volume = make_volume(*engine, small_pieces());
    std::vector<ExtentId> on[2];
    for (int i = 0; i < 256; ++i) {
      const ExtentId e = volume->create({.name = "filling", .bytes = kGrain});
      on[volume->describe_layout(e, 0).rfind("memory1", 0) == 0].push_back(e);
    }
    filling.clear();
    const auto make_holes = [&](int drive) {
      for (std::size_t i = 0; i < on[drive].size(); ++i) {
        if (i % 2 == 0) {
          volume->destroy(on[drive][i]);
        } else {
          filling.push_back(on[drive][i]);
        }
      }
    };
    make_holes(1);
    id = volume->create({.name = "x", .bytes = kPieces * kGrain});
    EXPECT_HAS_NOT(volume->describe_layout(id, 0), "memory0");
    make_holes(0);
  }

  static constexpr std::int64_t kPieces = 40;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Volume> volume;
  std::vector<ExtentId> filling;
  ExtentId id;
  Results results;
  const Memory memory{kPieces * kGrain};
};

TEST(Volume, WhereMemoryRunsOutASlotStaysUsable) {
  int refused = 0, cut_off = 0;
  bool failed = true;
  for (std::int64_t n = 0; failed; ++n) {
    OutOfMemory test;
    failed = test.write(n);
    test.check();
    refused += test.refused;
    cut_off += test.cut_off;
    if (HasFailure()) FAIL() << "allocation " << n;
  }
  // Before anything was begun, and between its parts.
  EXPECT_GT(refused, 3);
  EXPECT_GT(cut_off, 1);
}

// A wait that can never end is a bug, and aborts.
class Waits final : public ExtentCompletion {
 public:
  Waits(Volume& volume, char* data) : volume_(volume), data_(data) {}
  void on_extent(ExtentId id, std::uint64_t tag, ExtentResult) override {
    const ExtentTransfer t{.extent = id, .data = data_};
    (void)(tag == 0 ? volume_.read_and_wait(t) : volume_.write_and_wait(t));
  }

 private:
  Volume& volume_;
  char* const data_;
};

TEST(VolumeDeathTest, WaitingInACompletionIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto wait = [](std::uint64_t tag) {
    Fixture f(ram_engine({kMiB}));
    Waits completion(*f.volume, f.memory.data());
    const ExtentId id = f.volume->create({.name = "x", .bytes = kGrain});
    f.volume->write({.extent = id, .data = f.memory.data(), .completion = &completion, .tag = tag});
    std::this_thread::sleep_for(std::chrono::seconds(30));
  };
  EXPECT_DEATH(wait(0), "read_and_wait\\(\\) in a completion waits for itself");
  EXPECT_DEATH(wait(1), "write_and_wait\\(\\) in a completion waits for itself");
}

TEST(VolumeDeathTest, WhatMustNotOverlapIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Results results;
  const Memory memory(kGrain);
  const auto open = [&](auto&& use) {
    auto engine = ram_engine({kMiB}, {}, {.latency_seconds = 1});
    auto volume = make_volume(*engine, small_pieces());
    const ExtentId id = volume->create({.name = "x", .bytes = kGrain});
    use(*volume, ExtentTransfer{.extent = id, .data = memory.data(), .completion = &results});
  };
  EXPECT_DEATH(open([](Volume& v, const ExtentTransfer& t) {
                 v.write(t);
                 v.destroy(t.extent);
               }),
               "x is destroyed while it is transferred");
  EXPECT_DEATH(open([](Volume& v, const ExtentTransfer& t) {
                 v.write(t);
                 v.read(t);
               }),
               "slot 0 of x is written while it is transferred");
  EXPECT_DEATH(open([](Volume& v, const ExtentTransfer& t) {
                 v.destroy(t.extent);
                 v.read(t);
               }),
               "was destroyed");
}

}  // namespace
}  // namespace zg::io::test
