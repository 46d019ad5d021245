// The NVMe copies of segments: each is an extent of a volume, with a slot for every version that is kept.
//
// The store's mutex guards all members. The volume itself may be called from any thread.
// Invariant: versions take the slots in turn, so a write never touches the newest whole copy where there is
// room for two.
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
  // Over the volume that the options name, or one of its own.
  NvmeCopies(const TensorTable& table, const TensorStore::Options& options);
  ~NvmeCopies();  // gives its extents back

  void grow(std::int32_t segments) { copies_.grow(segments_ = segments); }  // the table has so many
  // Reserves its extent. Throws Error(kIo) where the drives have no room.
  void create(SegmentId segment);
  void destroy(const Tensor& tensor);  // those that it has; nothing of it moves

  // What reads the newest version, or writes the next one, which is counted as begun. The caller adds memory,
  // completion and urgency.
  io::ExtentTransfer to_read(SegmentId segment) const;
  io::ExtentTransfer to_write(SegmentId segment);
  io::ExtentId extent(SegmentId segment) const { return copies_[segment].extent; }
  io::Volume& volume() const { return volume_; }

  // The whole ones, newest first.
  std::vector<std::int64_t> versions(SegmentId segment) const;
  // Reads one of them; throws Error(kUsage) when it is not there, Error(kIo) when it cannot be read.
  void read(SegmentId segment, std::int64_t version, void* data) const;
  static Error no_version(const TensorTable& table, SegmentId segment, std::int64_t version);
  std::int64_t first_written_bytes() const { return first_written_; }

 private:
  struct Copies {
    io::ExtentId extent;
    std::int64_t writes = 0;  // that were begun
  };
  int slots(SegmentId segment) const;

  const TensorTable& table_;
  const std::unique_ptr<io::Volume> own_;  // null: it is shared with other stores
  io::Volume& volume_;
  std::int32_t segments_ = 0;
  Blocks<Copies> copies_;
  std::int64_t first_written_ = 0;  // to slots that held nothing before
};

}  // namespace zg
