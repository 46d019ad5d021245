// A call on a unit in tiles that goes through several operations, without a model: the call asks for tiles,
// and the test has them in its own order.
#include "engine/tile_call.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace zg {
namespace {

using enum TileUse::Kind;

constexpr TileUse kFirst{3, kWeight}, kSecond{3, kGradient}, kThird{4, kWeight};

struct Seen {
  std::vector<void*> tiles;
  bool ended = false;
};

View view_at(int& tile) {
  return {&tile, DType::kI32, 1, 1};
}

TileCall call_for(Seen& seen) {
  return TileCall({}, {}, [&seen](const UnitCall& call) {
    for (const TileUse& use : {kFirst, kSecond, kThird}) seen.tiles.push_back(call.tiles->next(use).data);
    seen.ended = true;
  });
}

TEST(TileCalls, AreSuspendedAtTheBordersOfTiles) {
  Seen seen;
  int a = 0, b = 0, c = 0;
  TileCall call = call_for(seen);
  EXPECT_TRUE(seen.tiles.empty());
  call.go_on(kFirst, view_at(a));
  EXPECT_EQ(seen.tiles, (std::vector<void*>{&a}));
  EXPECT_FALSE(call.ended());
  call.go_on(kSecond, view_at(b));
  EXPECT_EQ(seen.tiles, (std::vector<void*>{&a, &b}));
  EXPECT_FALSE(call.ended());
  call.go_on(kThird, view_at(c));
  EXPECT_EQ(seen.tiles, (std::vector<void*>{&a, &b, &c}));
  EXPECT_TRUE(call.ended() && seen.ended);
}

// The operation after one that failed never comes: the call ends where it is.
TEST(TileCalls, MayEndBetweenTwoTiles) {
  Seen seen;
  int a = 0;
  {
    TileCall call = call_for(seen);
    call.go_on(kFirst, view_at(a));
  }
  EXPECT_EQ(seen.tiles.size(), 1u);
  EXPECT_FALSE(seen.ended);
}

TEST(TileCalls, ThrowWhatTheModelThrows) {
  int a = 0;
  TileCall call({}, {}, [](const UnitCall& of) {
    (void)of.tiles->next(kFirst);
    throw std::runtime_error("the device failed");
  });
  EXPECT_THROW(call.go_on(kFirst, view_at(a)), std::runtime_error);
  EXPECT_TRUE(call.ended());
}

TEST(TileCallsDeathTest, ProgramAndCallHaveTheSameTiles) {
  int a = 0;
  Seen seen;
  EXPECT_DEATH(call_for(seen).go_on(kSecond, view_at(a)), "the program has tile 3, the call asks for tile 3");
  EXPECT_DEATH(
      {
        TileCall call({}, {}, [](const UnitCall&) {});
        call.go_on(kFirst, view_at(a));
      },
      "the call has ended, and the program has tile 3 for it");
}

}  // namespace
}  // namespace zg
