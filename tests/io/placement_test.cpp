// Where extents lie, and when they move: space and shares, without a byte transferred.
#include "io/placement.hpp"

#include <vector>

#include "volume_support.hpp"

namespace zg::io::test {
namespace {

// Places every extent of `bytes` as its next write would. Returns how many have moved.
int rewrite(ExtentPlacement& placement, std::vector<std::vector<Piece>>& extents, std::int64_t bytes) {
  int moved = 0;
  for (auto& pieces : extents) moved += placement.move(bytes, 0, pieces);
  return moved;
}

// No drive holds more than its share, but for what is not worth a move.
void expect_loads(const ExtentPlacement& placement, int drives, double tolerance) {
  std::int64_t all = 0;
  for (int d = 0; d < drives; ++d) all += placement.used_bytes(d);
  for (int d = 0; d < drives; ++d) {
    const double share = placement.shares().shares()[static_cast<std::size_t>(d)];
    EXPECT_LE(static_cast<double>(placement.used_bytes(d)),
              share * (1 + tolerance) * static_cast<double>(all) + 1.2e6)
        << "drive " << d;
  }
}

TEST(Placement, ExtentsMoveOffADriveThatBecameSlowAndThenStay) {
  for (const std::int64_t bytes : {8 * kMiB, 2 * kMiB, 256 * kKiB}) {
    const auto engine = ram_engine({kGiB, kGiB, kGiB, kGiB});
    ExtentPlacement placement(*engine, {});
    std::vector<std::vector<Piece>> extents(64);
    for (auto& pieces : extents) ASSERT_TRUE(placement.reserve(bytes, 0, pieces));
    EXPECT_EQ(rewrite(placement, extents, bytes), 0);
    expect_loads(placement, 4, 0.01);
    const auto sample = [&](std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
      for (int i = 0; i < 10; ++i)
        placement.sample(
            std::vector<DriveSample>{{a, 0.05, 0.05}, {b, 0.05, 0.05}, {c, 0.05, 0.05}, {d, 0.05, 0.05}},
            0.05);
    };
    sample(10'000'000, 10'000'000, 20'000'000, 40'000'000);
    EXPECT_GT(rewrite(placement, extents, bytes), 0);
    for (int i = 0; i < 3; ++i) rewrite(placement, extents, bytes);
    expect_loads(placement, 4, 0.1);
    sample(10'000'000, 10'000'000, 20'000'000, 4'000'000);
    for (int i = 0; i < 3; ++i) rewrite(placement, extents, bytes);
    expect_loads(placement, 4, 0.1);
    EXPECT_LE(rewrite(placement, extents, bytes), 4) << bytes;
    for (auto& pieces : extents) placement.release(pieces);
    for (int d = 0; d < 4; ++d) EXPECT_EQ(placement.largest_bytes(d), kGiB);
  }
}

TEST(Placement, WithoutRoomElsewhereAnExtentStays) {
  for (const std::int64_t bytes : {8 * kMiB, kMiB}) {
    const auto engine = ram_engine({8 * kMiB, 8 * kMiB});
    ExtentPlacement placement(*engine, {});
    std::vector<std::vector<Piece>> extents(static_cast<std::size_t>(16 * kMiB / bytes));
    for (auto& pieces : extents) ASSERT_TRUE(placement.reserve(bytes, 0, pieces));
    for (int i = 0; i < 10; ++i)
      placement.sample(std::vector<DriveSample>{{40'000'000, 0.05, 0.05}, {4'000'000, 0.05, 0.05}}, 0.05);
    EXPECT_EQ(rewrite(placement, extents, bytes), 0) << bytes;
    if (bytes < 8 * kMiB) continue;
    // As soon as there is some, its own space counts too.
    placement.release(extents[0]);
    EXPECT_EQ(rewrite(placement, extents, bytes), 1);
    EXPECT_GE(placement.used_bytes(0), 7 * kMiB);
  }
}

// Slots of one number take turns: all slots 0 together use all drives, and so do all slots 1.
TEST(Placement, EachSlotNumberIsSpreadByItself) {
  const auto engine = ram_engine({64 * kMiB, 64 * kMiB});
  ExtentPlacement placement(*engine, {});
  std::int64_t held[2][2] = {};
  for (int i = 0; i < 40; ++i) {
    for (int slot = 0; slot < 2; ++slot) {
      std::vector<Piece> pieces;
      ASSERT_TRUE(placement.reserve(256 * kKiB, slot, pieces));
      for (const Piece& p : pieces) held[slot][p.drive] += p.bytes;
    }
  }
  for (int slot = 0; slot < 2; ++slot) EXPECT_EQ(held[slot][0], held[slot][1]) << "slot " << slot;
}

TEST(Placement, PiecesAreBoundedAndCoverTheExtent) {
  const auto engine = ram_engine({64 * kMiB, 64 * kMiB});
  ExtentPlacement placement(*engine, {});
  for (const std::int64_t bytes : {std::int64_t{1}, 64 * kKiB, 9 * kMiB + 5, 50 * kMiB}) {
    std::vector<Piece> pieces;
    ASSERT_TRUE(placement.reserve(bytes, 0, pieces));
    std::int64_t at = 0;
    for (const Piece& p : pieces) {
      EXPECT_EQ(p.position, at);
      EXPECT_EQ(p.offset % placement.grain(), 0);
      EXPECT_LE(p.bytes, ExtentPlacement::kMaxPiece);
      at += p.bytes;
    }
    EXPECT_EQ(at, bytes);
    placement.release(pieces);
  }
}

}  // namespace
}  // namespace zg::io::test
