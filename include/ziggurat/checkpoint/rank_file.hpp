// The file of a checkpoint that one rank writes, and the elements of each tensor that the rank holds.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/files.hpp"
#include "ziggurat/engine/step_executor.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {

// A tensor that a checkpoint keeps for a parameter: its master weight, a moment, or the scales of a moment's
// codes.
struct CheckpointPart {
  enum class Kind { kMaster, kMoment, kScale };
  std::string name;  // name of the tensor
  std::string dtype;
  Kind kind = Kind::kMaster;
  int which = 0;          // number of the moment
  bool in_codes = false;  // 8-bit codes, which are kept in whole blocks
  // For the parameter's elements [first, last): the tensor's first entry, and the entry after its last one.
  std::int64_t begin(std::int64_t first) const;
  std::int64_t end(std::int64_t last) const;
  View of(const StateTile& tile) const;
};
// A parameter that is kept in codes has no part, since its codes are in the model's files.
std::vector<CheckpointPart> parts_of(const Layout& layout, std::int32_t unit, const Param& param);
// All tensors of a checkpoint of this model, including those that other ranks hold.
std::vector<CheckpointTensor> tensors_of(const Layout& layout);

// Calls f(band, at, box) for each box of the whole parameter that held elements [begin, end) fill, in
// ascending order. The box's elements are held elements `at`, `at` + 1, ..., line after line.
template <class F>
void for_boxes(const Param& param, std::int64_t begin, std::int64_t end, const F& f) {
  const std::int64_t length = param.line(), whole = param.vector ? 1 : param.whole_cols;
  for (const Band& band : param.bands) {
    std::int64_t at = std::max(begin, band.line * length);
    const std::int64_t last = std::min(end, (band.line + band.lines) * length);
    while (at < last) {
      const std::int64_t line = at / length, col = at % length, rest = last - at;
      CheckpointBox box{(band.whole_line + line - band.line) * whole + param.first_col + col, 1, rest, 0};
      if (length != whole) {
        // The rest of a line, or all whole lines.
        const bool lines = col == 0 && rest >= 2 * length;
        box.lines = lines ? rest / length : 1;
        box.width = lines ? length : std::min(rest, length - col);
        box.stride = lines ? whole : 0;
      }
      f(band, at, box);
      at += box.count();
    }
  }
}

// A range of elements that this rank holds of a parameter: elements [first, first + count) of its tensor
// shard. There are several ranges, in ascending order, if the rank has a ZeRO shard of each tile.
struct HeldRange {
  std::int64_t first = 0, count = 0;
};
std::vector<HeldRange> held_by(const Layout& layout, std::int32_t unit, const Param& param);
// Whether the unit's tiles are sharded one by one, so that each rank has several pieces of a matrix.
bool has_shards_of_tiles(const Layout& layout, std::int32_t unit);

// A rank's file: a safetensors file of the pieces that this rank holds and no other rank writes.
class RankFile {
 public:
  // Lays the file out.
  RankFile(const Layout& layout, int rank);
  const std::string& name() const { return name_; }
  std::int64_t bytes() const { return data_begin_ + data_bytes_; }

  void create(Files& files, const std::string& directory);
  // A unit's tiles must come in ascending order of each parameter's elements.
  void write(const StateTile& tile);
  double written() const;  // the share of the data that was written
  // Writes the header, and brings the file to the drive.
  CheckpointFile finish();

 private:
  struct Piece {
    CheckpointPart part;
    std::string name;        // name of the file's entry
    std::int64_t first = 0;  // the first number of the entry's note (kNoteForm)
    std::string note;        // the rest of that note, after the hash
    std::vector<std::int64_t> shape;
    std::int64_t begin = 0, count = 0;   // held entries of `part`
    std::int64_t offset = 0, bytes = 0;  // place in the file's data
    std::int64_t written = 0;            // bytes written so far
    io::Hash hash;
    std::int64_t width() const { return bytes / count; }
  };
  struct Slot {
    std::size_t first_piece = 0, pieces = 0;
  };
  void add(const Param& param, const CheckpointPart& part, std::int64_t at, const CheckpointBox& box,
           int number, bool in_pieces);
  std::string header() const;

  std::string name_;
  std::vector<Piece> pieces_;
  std::vector<std::vector<Slot>> params_;  // indexed by unit and parameter
  std::vector<const Param*> first_param_;  // the first parameter of each unit
  std::int64_t data_begin_ = 0, data_bytes_ = 0, written_ = 0;
  std::unique_ptr<NewFile> file_;
};

// Whether this rank writes a file: there is a unit that it writes to checkpoints (Layout::gives).
bool writes_file(const Layout& layout);
// CheckpointManifest::format for this layout: 2 if a file may have several boxes of a tensor.
std::int64_t format_of(const Layout& layout);

}  // namespace zg
