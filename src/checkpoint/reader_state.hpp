// An open checkpoint's files and the pieces in them. Private to the reader of checkpoints.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/pins_reader.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

inline constexpr const char* kDamagedHint = "the checkpoint is damaged: resume from another one";
[[noreturn]] inline void damaged(const std::string& where, const std::string& what) {
  throw Error(Errc::kUsage, where, what, kDamagedHint);
}

struct Checkpoint::State {
  // A source of pieces: a safetensors file, or a rank's pinned state.
  struct Source {
    Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    ~Source() {
      if (fd >= 0) (void)::close(fd);
    }
    int fd = -1;  // descriptor of a safetensors file
    std::unique_ptr<SafeTensors> file;
    std::unique_ptr<PinnedReader> pins;
    const std::string& path() const { return file ? file->path() : pins->path(); }
  };
  struct Stored {
    CheckpointBox box;
    const Source* file = nullptr;
    const SafeTensors::Entry* entry = nullptr;
    // Only for codes in blocks of a shard's elements: their scales, and the first element's place in its
    // block.
    const SafeTensors::Entry* scales = nullptr;
    std::int64_t phase = 0;
    const PinnedPiece* pinned = nullptr;  // if set, `entry` has only sizes and no data
    std::int64_t width() const { return box.count() > 0 ? entry->bytes / box.count() : 0; }
  };
  using Pieces = std::vector<Stored>;  // sorted by first element
  std::vector<std::unique_ptr<Source>> files;
  std::unordered_map<std::string, Pieces> tensors;
  std::deque<SafeTensors::Entry> pinned_entries;
  std::unordered_map<const SafeTensors::Entry*, std::uint64_t> hashes;

  void add(const std::string& path, const CheckpointFile& wanted);
  void add_pins(const std::string& path, const CheckpointFile& wanted);
  // Throws if the hash of an entry's bytes differs from the file's.
  void verify_entry(const SafeTensors& file, const SafeTensors::Entry& entry, std::uint64_t found) const;
  // Whether the pieces bring their own scales. Otherwise the blocks are the whole tensor's, whose scales are
  // a separate tensor.
  static bool has_own_blocks(const Pieces& pieces) {
    return std::any_of(pieces.begin(), pieces.end(), [](const Stored& s) { return s.scales != nullptr; });
  }
  // The first element that no piece has, or that two have; -1: none.
  static std::int64_t gap_in(const Pieces& pieces, std::int64_t count);
};

}  // namespace zg
