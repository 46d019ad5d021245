// The accesses that are known to follow: those of a program after a position in it, and then, since the
// program is assumed to run again, those from its start up to this position. A part of Residency.
//
// Distances are in accesses, from the position on.
//
// Not thread-safe.
#pragma once
#include <cstdint>

#include "ziggurat/store/policy.hpp"
#include "ziggurat/store/program.hpp"

namespace zg {

class KnownFuture {
 public:
  // Null: nothing is known. Position -1: no access of the program has happened.
  void follow(const Program* program, std::int32_t position);
  void set_position(std::int32_t position) { at_ = position; }
  const Program* program() const { return program_; }
  std::int32_t position() const { return at_; }
  // Accesses since the first program began. One more than the position, which begins at -1.
  std::uint64_t now() const { return base_ + static_cast<std::uint64_t>(at_ + 1); }
  // Only where something is known.
  std::uint64_t distance_to(std::int32_t position) const {
    return static_cast<std::uint64_t>(position > at_ ? position - at_
                                                     : position + program_->access_count() - at_);
  }
  // Distance to the next access of the segment at any tier; to the next one that needs its content; and to
  // the next one that its copy at `tier` would serve, if the device has a copy or not. kNever: none is known.
  std::uint64_t next_access(SegmentId id) const;
  std::uint64_t next_read(SegmentId id) const;
  std::uint64_t next_use(SegmentId id, Tier tier, bool on_device) const;
  // Whether the rest of the program, which is known, overwrites the content before it reads it.
  bool is_overwritten(SegmentId id) const;

 private:
  template <class Visit>
  void visit(SegmentId id, Visit&& visit) const;

  const Program* program_ = nullptr;
  std::uint64_t accesses_ = 0;  // of the program when it was first followed
  std::int32_t at_ = -1;
  std::uint64_t base_ = 0;  // accesses of all programs before this one
};

}  // namespace zg
