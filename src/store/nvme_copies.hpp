// The NVMe copies of segments. Each is an extent of a volume, with a slot for every version that is kept.
//
// The store's mutex guards all members. The volume itself may be called from any thread. Invariant: versions
// take the slots in turn, so with two slots a write never touches the newest whole version.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/blocks.hpp"
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

  // A transfer that reads the newest version, or one that writes the next version and counts it as begun. The
  // caller adds memory, completion and priority.
  io::ExtentTransfer to_read(SegmentId segment) const;
  io::ExtentTransfer to_write(SegmentId segment);
  io::ExtentId extent(SegmentId segment) const { return copies_[segment].extent; }
  io::Volume& volume() const { return volume_; }

  // The versions that are whole, newest first.
  std::vector<std::int64_t> versions(SegmentId segment) const;
  // Reads a version. Throws Error(kUsage) when there is no such version, Error(kIo) when it cannot be read.
  void read(SegmentId segment, std::int64_t version, void* data) const;
  static Error no_version(const TensorTable& table, SegmentId segment, std::int64_t version);
  std::int64_t first_written_bytes() const { return first_written_; }

 private:
  struct Copies {
    io::ExtentId extent;
    std::int64_t writes = 0;  // begun so far
  };
  int slots(SegmentId segment) const;

  const TensorTable& table_;
  const std::unique_ptr<io::Volume> own_;  // null: the volume is shared with other stores
  io::Volume& volume_;
  std::int32_t segments_ = 0;
  Blocks<Copies> copies_;
  std::int64_t first_written_ = 0;  // bytes written to slots that were empty
};

}  // namespace zg
