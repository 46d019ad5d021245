// Tensors with two versions on NVMe: a write-back goes beside the one before.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "store/programs.hpp"
#include "store/rig.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kBytes = 2 * kPage - 100;

TensorTable versioned(int count, int versions) {
  TensorTable table(1);
  for (int i = 0; i < count; ++i) {
    table.add({.name = fmt::format("t{}", i), .dtype = DType::kU8, .count = kBytes, .versions = versions});
  }
  return table;
}

std::unique_ptr<MemoryIo> memory(const TensorTable& table, const MemoryIo::Faults& faults = {}) {
  return std::make_unique<MemoryIo>(table.drives(), table.drive_bytes(), MemoryIo::Options{.faults = faults});
}

// Writes the segment, and demotes it to NVMe.
void write_back(TensorStore& store, SegmentId id, std::uint64_t content) {
  {
    const Lease lease = store.acquire(id, Tier::kHost, Access::kOverwrite);
    fill(lease.data(), lease.bytes(), id, content);
  }
  store.demote_all();
  store.drain();
}

bool version_holds(const TensorStore& store, SegmentId id, std::int64_t version, std::uint64_t content) {
  std::array<char, kBytes + 1> bytes{};
  bytes.back() = 7;
  store.read_version(id, version, bytes.data());
  EXPECT_EQ(bytes.back(), 7) << "more than the segment was read";
  return holds(bytes.data(), kBytes, id, content);
}

using Versions = std::vector<std::int64_t>;

TEST(StoreVersions, AWriteBackLeavesTheOneBeforeReadable) {
  const TensorTable table = versioned(2, 2);
  Rig rig(table, {0, 4 * kPage}, memory(table));
  const Deadline deadline(30, [&] { return rig.store->state(); });
  EXPECT_EQ(rig.store->versions(0), Versions{});
  for (std::int64_t n = 1; n <= 5; ++n) {
    write_back(*rig.store, 0, static_cast<std::uint64_t>(100 + n));
    EXPECT_EQ(rig.store->versions(0), n == 1 ? Versions{1} : (Versions{n, n - 1}));
    EXPECT_TRUE(version_holds(*rig.store, 0, n, static_cast<std::uint64_t>(100 + n)));
    if (n > 1) {
      EXPECT_TRUE(version_holds(*rig.store, 0, n - 1, static_cast<std::uint64_t>(100 + n - 1)));
    }
    // An ordinary read gives the newest version.
    const Lease lease = rig.store->acquire(0, Tier::kHost, Access::kRead);
    EXPECT_TRUE(holds(lease.data(), lease.bytes(), 0, static_cast<std::uint64_t>(100 + n)));
  }
  EXPECT_EQ(rig.store->versions(1), Versions{});
  for (const std::int64_t gone : {0, 3, 6}) {
    EXPECT_EQ(error_of([&] { (void)version_holds(*rig.store, 0, gone, 0); }).code(), Errc::kUsage);
  }
}

TEST(StoreVersions, FirstWritesAreThoseToPlacesThatHeldNothing) {
  for (const int versions : {1, 2}) {
    SCOPED_TRACE(versions);
    const TensorTable table = versioned(2, versions);
    Rig rig(table, {0, 4 * kPage}, memory(table));
    const Deadline deadline(30, [&] { return rig.store->state(); });
    EXPECT_EQ(rig.store->first_written_bytes(), 0);
    for (std::int64_t n = 1; n <= 4; ++n) {
      write_back(*rig.store, 0, static_cast<std::uint64_t>(n));
      EXPECT_EQ(rig.store->first_written_bytes(), std::min<std::int64_t>(n, versions) * 2 * kPage) << n;
    }
    write_back(*rig.store, 1, 9);
    EXPECT_EQ(rig.store->first_written_bytes(), (versions + 1) * 2 * kPage);
  }
}

// Rounds of a program that writes to both segments, one at the device and one at the host. After each round
// what is dirty is written back, what is not costs nothing, and a version that is pinned outlives all later
// ones, of which there are two at a time.
TEST(StoreVersions, APinnedVersionStays) {
  const TensorTable table = versioned(2, 3);
  Rig rig(table, {2 * kPage, 2 * kPage}, memory(table));
  const Deadline deadline(30, [&] { return rig.store->state(); });
  Program program("round");
  program.add_op(std::vector<AccessStep>{{0, Tier::kHost, Access::kOverwrite, false}});
  program.add_op(std::vector<AccessStep>{{1, Tier::kDevice, Access::kOverwrite, false}});
  program.finish(2);
  Residency paper(table, rig.budgets);
  const SegmentId both[] = {0, 1};
  std::vector<PinnedVersion> pinned;
  for (std::uint64_t round = 1; round <= 6; ++round) {
    rig.store->run(&program, nullptr);
    std::vector<Lease> leases;
    for (std::int32_t op = 0; op < 2; ++op) {
      rig.store->acquire_op(nullptr, leases);
      work_on(*rig.device, {program.op(op)[0].tier, Access::kOverwrite, leases[0]},
              [&](void* data) { fill(data, kBytes, op, round); });
      leases.clear();
    }
    // A dry run foretells the bytes.
    std::vector<Action> ignored;
    paper.set_future(&program, nullptr);
    for (std::int32_t op = 0; op < 2; ++op) EXPECT_FALSE(paper.decide(0, op, ignored).has_value());
    const std::int64_t before = paper.copies().traffic().nvme_write();
    for (const SegmentId id : both) EXPECT_FALSE(paper.write_back(id, ignored).has_value());
    EXPECT_EQ(rig.store->write_back(both), paper.copies().traffic().nvme_write() - before);
    EXPECT_EQ(rig.store->write_back(both), 0) << "nothing is dirty";
    EXPECT_EQ(rig.store->traffic().nvme_write(), paper.copies().traffic().nvme_write());
    if (round == 2) pinned = rig.store->pin_versions(both);
    if (round == 2) {
      ASSERT_EQ(pinned.size(), 2u);
      EXPECT_EQ(rig.store->stored(pinned[1]).version, 2);
    }
    for (const SegmentId id : both) {
      EXPECT_TRUE(version_holds(*rig.store, id, static_cast<std::int64_t>(round), round));
      if (round >= 2) {
        EXPECT_TRUE(version_holds(*rig.store, id, 2, 2)) << round;
      }
    }
    rig.store->check();
  }
  EXPECT_EQ(rig.store->first_written_bytes(), 6 * 2 * kPage);
  rig.store->unpin_versions(pinned);
  rig.store->run(nullptr, nullptr);
  write_back(*rig.store, 0, 7);
  EXPECT_EQ(rig.store->versions(0), (Versions{7, 6, 5}));
}

// While a later program reads the segments, a thread waits for the versions that are being written, and pins
// them, not those before, which are whole.
TEST(StoreVersions, AVersionIsPinnedWhenItIsWritten) {
  const TensorTable table = versioned(2, 2);
  Rig rig(table, {0, 4 * kPage},
          std::make_unique<MemoryIo>(
              table.drives(), table.drive_bytes(),
              MemoryIo::Options{.max_delay = std::chrono::milliseconds(30), .faults = {}}));
  const Deadline deadline(30, [&] { return rig.store->state(); });
  const auto program_of = [](const char* name, Access access) {
    Program program(name);
    for (const SegmentId id : {0, 1})
      program.add_op(std::vector<AccessStep>{{id, Tier::kHost, access, false}});
    program.finish(2);
    return program;
  };
  const Program writes = program_of("writes", Access::kOverwrite), reads = program_of("reads", Access::kRead);
  const SegmentId both[] = {0, 1};
  std::vector<PinnedVersion> pinned;
  for (std::int64_t round = 1; round <= 8; ++round) {
    const auto run = [&](const Program& program) {
      rig.store->run(&program, nullptr);
      std::vector<Lease> leases;
      for (std::int32_t op = 0; op < 2; ++op) {
        rig.store->acquire_op(nullptr, leases);
        const auto content = static_cast<std::uint64_t>(round);
        if (&program == &writes) fill(leases[0].data(), kBytes, op, content);
        EXPECT_TRUE(holds(leases[0].data(), kBytes, op, content));
        leases.clear();
      }
    };
    run(writes);
    // Nothing could be written again while both versions are pinned.
    rig.store->unpin_versions(std::exchange(pinned, {}));
    EXPECT_EQ(rig.store->write_back(both), 2 * 2 * kPage);
    std::thread thread([&] { pinned = rig.store->pin_versions(both); });
    run(reads);
    thread.join();
    ASSERT_EQ(pinned.size(), 2u);
    for (const PinnedVersion& version : pinned) EXPECT_EQ(rig.store->stored(version).version, round);
  }
  rig.store->unpin_versions(pinned);
}

// Drives take what a checkpoint writes as mere write-backs, until a thread waits for them. First writes are
// counted with the bytes, when they have ended.
TEST(StoreVersions, WhatAThreadWaitsForGoesFirst) {
  constexpr int kCount = 140;  // more than are under way at once
  const TensorTable table = versioned(kCount, 2);
  Rig rig(table, {0, kCount * 2 * kPage}, memory(table));
  const Deadline deadline(30, [&] { return rig.store->state(); });
  auto& drive = static_cast<MemoryIo&>(*rig.io);
  Program program("writes");
  std::vector<SegmentId> all;
  for (SegmentId id = 0; id < kCount; ++id) {
    program.add_op(std::vector<AccessStep>{{id, Tier::kHost, Access::kOverwrite, false}});
    all.push_back(id);
  }
  program.finish(kCount);
  for (int round = 1; round <= 3; ++round) {
    rig.store->run(&program, nullptr);
    std::vector<Lease> leases;
    for (SegmentId id = 0; id < kCount; ++id) {
      rig.store->acquire_op(nullptr, leases);
      fill(leases[0].data(), kBytes, id, static_cast<std::uint64_t>(round));
      leases.clear();
    }
    drive.hold(io::Op::kWrite);
    EXPECT_EQ(rig.store->write_back(all), kCount * 2 * kPage);
    EXPECT_EQ(rig.store->traffic().nvme_write(), (round - 1) * kCount * 2 * kPage);
    EXPECT_EQ(rig.store->first_written_bytes(), std::min(round - 1, 2) * kCount * 2 * kPage);
    EXPECT_EQ(drive.write_priority(), io::Priority::kWriteBack);
    const int before = drive.promoted();
    rig.store->hasten(all);
    EXPECT_GE(drive.promoted(), before + 100);
    EXPECT_LT(drive.promoted(), before + kCount);
    drive.let_go(io::Op::kWrite);
    const std::vector<PinnedVersion> pinned = rig.store->pin_versions(all);
    EXPECT_EQ(drive.write_priority(), io::Priority::kDemand);
    rig.store->drain();
    EXPECT_EQ(rig.store->traffic().nvme_write(), round * kCount * 2 * kPage);
    EXPECT_EQ(rig.store->first_written_bytes(), std::min(round, 2) * kCount * 2 * kPage);
    const int then = drive.promoted();
    rig.store->hasten(all);  // nothing is under way
    EXPECT_EQ(drive.promoted(), then);
    rig.store->unpin_versions(pinned);
  }
}

TEST(StoreVersions, AWriteThatFailsLeavesTheOneBefore) {
  for (const int versions : {1, 2}) {
    SCOPED_TRACE(versions);
    const TensorTable table = versioned(1, versions);
    Rig rig(table, {0, 4 * kPage}, memory(table, {.fail_write = 2}));
    const Deadline deadline(30, [&] { return rig.store->state(); });
    write_back(*rig.store, 0, 1);
    write_back(*rig.store, 0, 2);
    EXPECT_THROW(write_back(*rig.store, 0, 3), Error);
    EXPECT_THROW((void)rig.store->acquire(0, Tier::kHost, Access::kRead), Error) << "failed for good";
    if (versions == 1) {
      EXPECT_EQ(rig.store->versions(0), Versions{}) << "written over the only copy";
    } else {
      EXPECT_EQ(rig.store->versions(0), Versions{2});
      EXPECT_TRUE(version_holds(*rig.store, 0, 2, 2));
    }
  }
}

// A version is compared with its checksum. A wrong one leaves the other version as it is.
TEST(StoreVersions, ADamagedVersionIsToldAndTheOtherIsWhole) {
  const TensorTable table = versioned(1, 2);
  Rig rig(table, {0, 4 * kPage}, memory(table, {.flip_read = 0}));
  const Deadline deadline(30, [&] { return rig.store->state(); });
  write_back(*rig.store, 0, 1);
  write_back(*rig.store, 0, 2);
  const Error e = error_of([&] { (void)version_holds(*rig.store, 0, 2, 2); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_HAS(e.what(), "checksum");
  EXPECT_TRUE(version_holds(*rig.store, 0, 1, 1));
}

// Written while it is still on its way down from the device.
TEST(StoreVersions, HoldAlongAProgramAndInPieces) {
  constexpr std::int64_t kLarge = 3 * io::kMaxPieceBytes + 5000;
  TensorTable table(1);
  for (int i = 0; i < 3; ++i)
    table.add({.name = fmt::format("t{}", i), .dtype = DType::kU8, .count = kLarge, .versions = 2});
  const std::int64_t charge = table.segment(0).charge;
  Rig rig(table, {charge, 2 * charge}, memory(table));
  const Deadline deadline(60, [&] { return rig.store->state(); });
  Program program("p");
  for (SegmentId id = 0; id < 3; ++id)
    program.add_op(std::vector<AccessStep>{{id, Tier::kDevice, Access::kOverwrite, false}});
  for (SegmentId id = 0; id < 3; ++id)
    program.add_op(std::vector<AccessStep>{{id, Tier::kDevice, Access::kWrite, false}});
  program.finish(3);
  WorkStream stream(*rig.device);
  std::vector<Lease> leases;
  for (std::uint64_t round = 0; round < 3; ++round) {
    rig.store->run(&program, nullptr);
    for (std::uint64_t op = 0; op < 6; ++op) {
      rig.store->acquire_op(stream.get(), leases);
      const auto id = static_cast<SegmentId>(op % 3);
      const AccessStep& access = program.op(static_cast<std::int32_t>(op))[0];
      stream.enqueue({access, leases[0]}, [id, op, round](void* data) {
        if (op >= 3) {
          EXPECT_TRUE(holds(data, kLarge, id, 10 * round)) << id;
        }
        fill(data, kLarge, id, 10 * round + op / 3);
      });
      stream.release(leases[0]);
    }
  }
  stream.synchronize();
  rig.store->run(nullptr, nullptr);
  rig.store->drain();
  rig.store->demote_all();
  rig.store->drain();
  for (SegmentId id = 0; id < 3; ++id) {
    const Versions versions = rig.store->versions(id);
    ASSERT_EQ(versions.size(), 2u);
    EXPECT_EQ(versions[0], versions[1] + 1);
    std::vector<char> bytes(static_cast<std::size_t>(kLarge));
    rig.store->read_version(id, versions[0], bytes.data());
    EXPECT_TRUE(holds(bytes.data(), kLarge, id, 21));
    // Not every content was written back; what was is whole.
    rig.store->read_version(id, versions[1], bytes.data());
    int found = 0;
    for (const std::uint64_t before : {0, 1, 10, 11, 20})
      found += holds(bytes.data(), kLarge, id, before) ? 1 : 0;
    EXPECT_EQ(found, 1) << id;
  }
}

TEST(StoreVersions, AreCountedInTheSpaceOfTheDrives) {
  TensorTable table(2);
  const TensorId one = table.add({.name = "one", .dtype = DType::kU8, .count = 3 * kPage});
  const TensorId two = table.add({.name = "two", .dtype = DType::kU8, .count = 5 * kPage, .versions = 2});
  table.add({.name = "host", .dtype = DType::kU8, .count = kPage, .lowest = Tier::kHost, .versions = 2});
  EXPECT_EQ(table.nvme_bytes(), 13 * kPage);
  EXPECT_EQ(table.drive_bytes(), 7 * kPage);
  EXPECT_EQ(table.total_charge(Tier::kHost), 9 * kPage);
  table.remove(two);
  EXPECT_EQ(table.nvme_bytes(), 3 * kPage);
  table.remove(one);
  EXPECT_EQ(table.nvme_bytes(), 0);
  for (const int versions : {-1, 0, 65}) {
    EXPECT_THROW(table.add({.name = "more", .count = 1, .versions = versions}), Error) << versions;
  }
}

}  // namespace
}  // namespace zg::test
