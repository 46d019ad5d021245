// The NVMe copies of segments. Each is an extent of a volume, with a slot for every version that is kept.
//
// The store's mutex guards all members. The volume itself may be called from any thread. Invariant: a version
// takes the slot with the oldest one that is not pinned. So with two slots and no pin a write never touches
// the newest whole version, and with pins it never touches a pinned one.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/stable_array.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

class NvmeCopies {
 public:
  // In the volume that the options name, or in a volume of its own.
  NvmeCopies(const TensorTable& table, const TensorStore::Options& options);
  ~NvmeCopies();  // destroys its extents

  void grow(std::int32_t segments) { copies_.grow(segments_ = segments); }  // the table's number of segments
  // Reserves the segment's extent. Throws Error(kIo) where the drives have no room.
  void create(SegmentId segment);
  void destroy(const Tensor& tensor);  // the extents of its segments, none of which moves

  // What to_write() has begun has ended.
  void written(SegmentId segment, int slot);
  // A transfer that reads the newest version, or one that writes the next version and counts it as begun. The
  // caller adds memory, completion and priority.
  io::ExtentTransfer to_read(SegmentId segment) const;
  io::ExtentTransfer to_write(SegmentId segment);
  io::ExtentId extent(SegmentId segment) const { return copies_[segment].extent; }
  io::Volume& volume() const { return volume_; }

  // The newest version is the one that to_write() has begun last or, if `next`, the one that it will begin
  // next; and whether that version is whole.
  void expect(SegmentId segment, bool next) { copies_[segment].expected = copies_[segment].writes + next; }
  bool has_expected(SegmentId segment) const;
  // Pins the newest version, which is whole and at rest; the slot that has it. unpin() takes that slot.
  int pin(SegmentId segment);
  void unpin(SegmentId segment, int slot) { volume_.unpin(extent(segment), slot); }
  // Where that version lies.
  io::StoredSlot stored(SegmentId segment, int slot) const;

  // The versions that are whole, newest first.
  std::vector<std::int64_t> versions(SegmentId segment) const;
  // Reads a version. Throws Error(kUsage) when there is no such version, Error(kIo) when it cannot be read.
  void read(SegmentId segment, std::int64_t version, void* data) const;
  static Error no_version(const TensorTable& table, SegmentId segment, std::int64_t version);
  // Counts writes that have ended, like the store's traffic.
  std::int64_t first_written_bytes() const { return first_written_; }

 private:
  struct Copies {
    io::ExtentId extent;
    std::int64_t writes = 0;    // begun so far; the number of the newest version
    std::int64_t expected = 0;  // see expect()
    std::uint64_t written = 0;  // a bit for each slot that was written, or adopted
  };
  int slots(SegmentId segment) const;

  const TensorTable& table_;
  const std::unique_ptr<io::Volume> own_;  // null: the volume is shared with other stores
  io::Volume& volume_;
  const AdoptedVersions* const adopted_;  // null: none
  std::int32_t segments_ = 0;
  StableArray<Copies> copies_;
  std::int64_t first_written_ = 0;  // bytes written to slots that were empty
};

}  // namespace zg
