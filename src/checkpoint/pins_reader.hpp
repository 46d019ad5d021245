// Reads pinned state from the drives' files.
//
// Pinned state is never written to. A run may unpin it while it is read, after it has renamed the checkpoint:
// Checkpoint::check_still_there() detects that. Any thread may read.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ziggurat/checkpoint/pins.hpp"

namespace zg {

class PinnedReader {
 public:
  // `path`: the rank's file in the checkpoint, for messages. Throws Error(kUsage) if a drive's file is
  // missing or too short.
  PinnedReader(PinnedState state, std::string path);
  ~PinnedReader();
  PinnedReader(const PinnedReader&) = delete;
  PinnedReader& operator=(const PinnedReader&) = delete;

  const PinnedState& state() const { return state_; }
  const std::string& path() const { return path_; }
  // Reads elements [first, first + count) of a piece, in the checkpoint's format. Throws Error(kIo).
  void read(const PinnedPiece& piece, std::int64_t first, std::int64_t count, char* out) const;
  // Reads the scales of the piece's blocks [first, first + count).
  void read_scales(const PinnedPiece& piece, std::int64_t first, std::int64_t count, float* out) const;
  // Reads all bytes of all segments in order, passes them to `take` in chunks, and compares their checksums
  // with each piece's. Throws Error(kUsage) if one differs, Error(kIo).
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
