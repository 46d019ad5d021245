// What an open checkpoint knows of its files and the pieces in them. Private to the reader of checkpoints.
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
  // What pieces lie in: a safetensors file, or what a rank has pinned.
  struct Source {
    Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    ~Source() {
      if (fd >= 0) (void)::close(fd);
    }
    int fd = -1;  // of a safetensors file
    std::unique_ptr<SafeTensors> file;
    std::unique_ptr<PinnedReader> pins;
    const std::string& path() const { return file ? file->path() : pins->path(); }
  };
  struct Stored {
    CheckpointBox box;
    const Source* file = nullptr;
    const SafeTensors::Entry* entry = nullptr;
    // For codes, which are in blocks of a part's elements: their scales, and the place of the first element
    // in its block.
    const SafeTensors::Entry* scales = nullptr;
    std::int64_t phase = 0;
    const PinnedPiece* pinned = nullptr;  // the entry then has no data, but sizes
    std::int64_t width() const { return box.count() > 0 ? entry->bytes / box.count() : 0; }
  };
  using Pieces = std::vector<Stored>;  // by first element
  std::vector<std::unique_ptr<Source>> files;
  std::unordered_map<std::string, Pieces> tensors;
  std::deque<SafeTensors::Entry> pinned_entries;
  std::unordered_map<const SafeTensors::Entry*, std::uint64_t> hashes;

  void add(const std::string& path, const CheckpointFile& wanted);
  void add_pins(const std::string& path, const CheckpointFile& wanted);
  // Throws where an entry's bytes have another hash than the file says.
  void verify_entry(const SafeTensors& file, const SafeTensors::Entry& entry, std::uint64_t found) const;
  // Codes whose blocks are those of the whole tensor have another tensor with the scales.
  static bool has_own_blocks(const Pieces& pieces) {
    return std::any_of(pieces.begin(), pieces.end(), [](const Stored& s) { return s.scales != nullptr; });
  }
  // The first element that no piece has, or that two have; -1: there is none.
  static std::int64_t gap_in(const Pieces& pieces, std::int64_t count);
};

}  // namespace zg
