// The table of a segment's states: each event changes what it says, and nothing else.
#include "store/copy_states.hpp"

#include <gtest/gtest.h>

namespace zg::copy_states {
namespace {

constexpr Event kAll[kEvents] = {Event::kTakeDevice, Event::kTakeHost,  Event::kFreeDevice,
                                 Event::kFreeHost,   Event::kWriteBack, Event::kWriteDevice,
                                 Event::kWriteHost,  Event::kForget};

// What a legal event leads to.
std::uint8_t meant(std::uint8_t state, Event event) {
  switch (event) {
    case Event::kTakeDevice:
      return state | D;
    case Event::kTakeHost:
      return state | H;
    case Event::kFreeDevice:
      return state & static_cast<std::uint8_t>(~D);
    case Event::kFreeHost:
      return state & static_cast<std::uint8_t>(~H);
    case Event::kWriteBack:
      return state | N;
    case Event::kWriteDevice:
      return D;
    case Event::kWriteHost:
      return H;
    case Event::kForget:
      return 0;
  }
  return kIllegal;
}

TEST(CopyStates, EachLegalEventChangesWhatItSays) {
  for (std::uint8_t state = 0; state < kNext.size(); ++state) {
    for (const Event event : kAll) {
      const std::uint8_t to = next(state, event);
      if (to == kIllegal) continue;
      EXPECT_EQ(to, meant(state, event)) << int{state} << " " << static_cast<int>(event);
    }
  }
}

TEST(CopyStates, MemoryIsTakenOnceAndFreedWhereItIs) {
  for (std::uint8_t state = 0; state < kNext.size(); ++state) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      const std::uint8_t here = tier == Tier::kDevice ? D : H;
      EXPECT_EQ(next(state, take(tier)) == kIllegal, (state & here) != 0) << int{state};
      EXPECT_EQ(next(state, free(tier)) == kIllegal, (state & here) == 0) << int{state};
      // Who writes has the only copy in memory.
      EXPECT_EQ(next(state, write(tier)) != kIllegal, (state & (D | H)) == here) << int{state};
    }
    EXPECT_EQ(next(state, Event::kForget) != kIllegal, (state & (D | H)) == 0) << int{state};
  }
}

TEST(CopyStates, OnlyWhatMaySinkToNvmeIsEverThere) {
  for (std::uint8_t state = 0; state < kNext.size(); ++state) {
    EXPECT_TRUE(reachable(state, true)) << int{state};
    EXPECT_EQ(reachable(state, false), (state & N) == 0) << int{state};
  }
  EXPECT_FALSE(reachable(kNext.size(), true));
}

}  // namespace
}  // namespace zg::copy_states
