// The states of a segment, and the legal transitions between them.
//
// A state is the set of tiers that have a current copy, or will have one as soon as the moves that were
// decided are done; a bit for each tier. Where the bit of NVMe is not set, the content is dirty: the copies
// in memory are newer than the copy on the drives. Only CopyTable changes states, and only by this table.
#pragma once
#include <array>
#include <cstdint>

#include "ziggurat/store/table.hpp"

namespace zg::copy_states {

enum class Event : std::uint8_t {
  kTakeDevice,  // memory was allocated at the tier, and the content is about to fill it
  kTakeHost,
  kFreeDevice,  // the tier's copy is evicted or dropped
  kFreeHost,
  kWriteBack,    // the content is written back to NVMe, and its copies in memory stay
  kWriteDevice,  // new content at the tier: the other copy in memory was freed, the one on NVMe is stale
  kWriteHost,
  kForget,  // the content is dropped; its copies in memory were freed before
};
inline constexpr std::size_t kEvents = 8;

inline constexpr std::uint8_t kIllegal = 0xff;
using Row = std::array<std::uint8_t, kEvents>;

// clang-format off
inline constexpr std::uint8_t D = 1, H = 2, N = 4, x = kIllegal;  // device, host, NVMe
inline constexpr std::array<Row, 8> kNext = {{
    //             take       take       free   free   write  write   write
    //             device     host       device host   back   device  host    forget
    /* nothing */ {{D,         H,         x,     x,     x,     x,      x,      0}},
    /* D       */ {{x,         D | H,     0,     x,     D | N, D,      x,      x}},
    /* H       */ {{D | H,     x,         x,     0,     H | N, x,      H,      x}},
    /* D H     */ {{x,         x,         H,     D,     D|H|N, x,     x,      x}},
    /* N       */ {{D | N,     H | N,     x,     x,     x,     x,      x,      0}},
    /* D N     */ {{x,         D | H | N, N,     x,     x,     D,      x,      x}},
    /* H N     */ {{D | H | N, x,         x,     N,     x,     x,      H,      x}},
    /* D H N   */ {{x,         x,         H | N, D | N, x,     x,      x,      x}},
}};
// clang-format on

constexpr std::uint8_t next(std::uint8_t state, Event event) {
  return kNext[state][static_cast<std::size_t>(event)];
}

// Whether a segment without content can get into this state. `may_demote`: whether it may be demoted to NVMe.
constexpr bool reachable(std::uint8_t state, bool may_demote) {
  std::array<bool, kNext.size()> found{true};
  for (std::size_t round = 0; round < kNext.size(); ++round) {
    for (std::size_t from = 0; from < kNext.size(); ++from) {
      for (std::size_t e = 0; e < kEvents && found[from]; ++e) {
        if (!may_demote && static_cast<Event>(e) == Event::kWriteBack) continue;
        if (kNext[from][e] != kIllegal) found[kNext[from][e]] = true;
      }
    }
  }
  return state < kNext.size() && found[state];
}
static_assert(reachable(D | H, false) && !reachable(N, false) && reachable(D | H | N, true));

inline Event take(Tier tier) {
  return tier == Tier::kDevice ? Event::kTakeDevice : Event::kTakeHost;
}
inline Event free(Tier tier) {
  return tier == Tier::kDevice ? Event::kFreeDevice : Event::kFreeHost;
}
inline Event write(Tier tier) {
  return tier == Tier::kDevice ? Event::kWriteDevice : Event::kWriteHost;
}

}  // namespace zg::copy_states
