// What both front ends of a store stand on: which copies there are, which are leased, and how moves go on.
//
//   Residency    decides which tiers have copies            LeaseTable   which copies are leased
//   MoveGraph    which moves may start                      SegmentState all else that is kept of a segment
//
// `mutex` guards all members, except words of copies and atomic counters, which threads access without it
// (copy_word.hpp). It is never held while bytes move.
#pragma once
#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "store/counters.hpp"
#include "store/leases.hpp"
#include "store/move_graph.hpp"
#include "store/segment_state.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

struct StoreCore {
  using Lock = std::unique_lock<std::mutex>;

  StoreCore(const TensorStore::Options& o, StoreParts& parts, MoveDriver& driver, MoveEvents& events);
  void grow();  // fits for the segments that the table has
  // Only the first failure is kept and reported.
  void fail(const Error& error);
  void throw_failure() const;
  // Throws: the segment does not exist, or the tier is NVMe.
  void check_access(SegmentId segment, Tier tier) const {
    if (segment < 0 || segment >= leases.segments() || tier == Tier::kNvme) refuse(segment);
  }
  CopyWord& word(SegmentId segment) const { return segments[segment].word; }

  TensorTable table;
  const TensorStore::Options options;
  mutable std::mutex mutex;
  std::condition_variable changed;  // a waiting thread may be able to go on
  Counters counters;
  SegmentStates segments;
  Residency residency;
  LeaseTable leases;
  MoveGraph moves;
  std::vector<Action> actions;  // decisions, which the graph gets at once
  std::optional<Error> failure;
  bool closing = false;

 private:
  [[noreturn]] void refuse(SegmentId segment) const;
};

}  // namespace zg
