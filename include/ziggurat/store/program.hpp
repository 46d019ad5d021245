// A program: the operations of a step in their order, each with the segments that it accesses.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/store/table.hpp"

namespace zg {

struct AccessStep {
  SegmentId segment = 0;
  Tier tier = Tier::kDevice;  // kDevice or kHost
  Access access = Access::kRead;
  bool last = false;  // the content is dead (never read again) after this access
};

class Program {
 public:
  explicit Program(std::string name = "") : name_(std::move(name)) {}

  // Appends an operation. It holds the leases of all its accesses at once; each segment appears once. `time`:
  // how long it takes, relative to the others; 0: it runs beside them. Times influence which copies are
  // retained, never the results.
  void add_op(std::span<const AccessStep> accesses, std::int64_t time = 1);
  // Builds the index of next uses. The program cannot be changed afterwards.
  void finish(std::int32_t segment_count);

  const std::string& name() const { return name_; }
  std::int32_t op_count() const { return static_cast<std::int32_t>(op_first_.size()); }
  std::span<const AccessStep> op(std::int32_t index) const;
  std::int64_t time(std::int32_t op) const { return op_time_[static_cast<std::size_t>(op)]; }
  std::int32_t first_access(std::int32_t op) const { return op_first_[static_cast<std::size_t>(op)]; }
  std::int32_t access_count() const { return static_cast<std::int32_t>(accesses_.size()); }
  const AccessStep& access(std::int32_t position) const {
    return accesses_[static_cast<std::size_t>(position)];
  }
  // Whether the segment existed when the program was made.
  bool knows(SegmentId segment) const { return static_cast<std::size_t>(segment) + 1 < use_first_.size(); }
  // Positions at which a segment is accessed, ascending.
  std::span<const std::int32_t> uses(SegmentId segment) const;
  // Beside each of uses(): the index in it of the first later use that is not such a read at the same tier as
  // this one, where this is a read that is not the last. The tiles of a layer read one input hundreds of
  // times.
  std::span<const std::int32_t> behind_reads(SegmentId segment) const;
  // A hash of the operations: equal programs have equal hashes, on every rank.
  std::uint64_t hash() const;

 private:
  std::string name_;
  std::vector<std::int32_t> op_first_;
  std::vector<std::int64_t> op_time_;
  std::vector<AccessStep> accesses_;
  // All segments' uses, segment by segment, and where each segment's begin; and behind_reads() of all.
  std::vector<std::int32_t> use_first_, uses_, behind_reads_;
};

}  // namespace zg
