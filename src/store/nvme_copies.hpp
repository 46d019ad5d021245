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
#include "ziggurat/store/table.hpp"

namespace zg {

class NvmeCopies {
 public:
  NvmeCopies(const TensorTable& table, io::Engine& engine, const std::vector<double>& shares, bool verify);

  void grow(std::int32_t segments) { copies_.grow(segments); }  // the table has so many
  // Reserves its extent. Throws Error(kIo) where the drives have no room.
  void create(SegmentId segment);
  void destroy(const Tensor& tensor);  // those that it has; nothing of it moves

  // What reads the newest version, or writes the next one, which is counted as begun. The caller adds memory,
  // completion and urgency.
  io::ExtentTransfer to_read(SegmentId segment) const;
  io::ExtentTransfer to_write(SegmentId segment);
  io::ExtentId extent(SegmentId segment) const { return copies_[segment].extent; }
  io::Volume& volume() const { return *volume_; }

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
  std::unique_ptr<io::Volume> volume_;
  Blocks<Copies> copies_;
  std::int64_t first_written_ = 0;  // to slots that held nothing before
};

}  // namespace zg
