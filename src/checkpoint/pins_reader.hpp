// Reads pinned state from the drives' files.
//
// Nobody writes to what is pinned. A run may unpin it while it is read, after it has taken the checkpoint's
// name away: Checkpoint::check_still_there() finds that out. Any thread may read.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ziggurat/checkpoint/pins.hpp"

namespace zg {

class PinnedReader {
 public:
  // `path`: of the rank's file in the checkpoint, for messages. Throws Error(kUsage) where a drive's file is
  // missing or too short.
  PinnedReader(PinnedState state, std::string path);
  ~PinnedReader();
  PinnedReader(const PinnedReader&) = delete;
  PinnedReader& operator=(const PinnedReader&) = delete;

  const PinnedState& state() const { return state_; }
  const std::string& path() const { return path_; }
  // Elements [first, first + count) of a piece, as the checkpoint has them. Throws Error(kIo).
  void read(const PinnedPiece& piece, std::int64_t first, std::int64_t count, char* out) const;
  // The scales of its blocks [first, first + count).
  void read_scales(const PinnedPiece& piece, std::int64_t first, std::int64_t count, float* out) const;
  // Reads all bytes of all segments in their order, and gives them to `take` in parts; compares the checksum
  // of each piece with that of what it gave. Throws Error(kUsage) where one differs, Error(kIo).
  using Sink =
      std::function<void(std::int64_t segment, std::int64_t offset, const char* data, std::int64_t bytes)>;
  void read_all(const Sink& take) const;

 private:
  void read_segment(std::int64_t segment, std::int64_t offset, std::int64_t bytes, char* out) const;
  void read_file(const io::StoredPiece& piece, std::int64_t offset, std::int64_t bytes, char* out) const;
  void close();
  const PinnedState state_;
  const std::string path_;
  std::vector<int> fds_;
};

}  // namespace zg
