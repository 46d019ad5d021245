// The part of a checkpoint that one rank writes, and the commit of all parts. Private to src/train.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "train/files.hpp"
#include "ziggurat/engine/step_executor.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/train/checkpoint.hpp"

namespace zg {

// What is kept of a parameter: the master weight, or one of the others.
struct CheckpointPart {
  enum class Kind { kMaster, kMoment, kScale };
  std::string name;  // of the tensor
  std::string dtype;
  Kind kind = Kind::kMaster;
  int which = 0;  // the moment
  // Elements [first, first + count) of the parameter as elements of the tensor.
  std::int64_t begin(std::int64_t first) const;
  std::int64_t count(std::int64_t elements) const;
  View of(const StateTile& tile) const;
  bool in_codes = false;  // int8, which is kept in whole blocks
};
std::vector<CheckpointPart> parts_of(const Layout& layout, std::int32_t unit, const Param& param);
// All tensors of a checkpoint of this model.
std::vector<CheckpointTensor> tensors_of(const Layout& layout);

// What this rank holds of a parameter: elements [first, first + count) of the logical tensor.
struct HeldRange {
  std::int64_t first = 0, count = 0;
};
HeldRange held_by(const Layout& layout, std::int32_t unit, const Param& param);

// A rank's file: a safetensors file of the pieces that the rank holds.
class RankFile {
 public:
  // Lays the file out.
  RankFile(const Layout& layout, int rank);
  const std::string& name() const { return name_; }
  std::int64_t bytes() const { return data_begin_ + data_bytes_; }

  void create(Files& files, const std::string& directory);
  // The tiles of a unit come in ascending order of each parameter's elements.
  void write(const StateTile& tile);
  // Writes the header, and brings the file to the drive.
  CheckpointFile finish();

 private:
  struct Piece {
    CheckpointPart part;
    std::vector<std::int64_t> shape;
    std::int64_t first = 0, count = 0;   // elements of the tensor
    std::int64_t offset = 0, bytes = 0;  // in the data
    std::int64_t written = 0;            // bytes
    io::Hash hash;
  };
  struct Slot {
    std::size_t first_piece = 0, pieces = 0;
  };
  std::string header() const;

  std::string name_;
  std::vector<Piece> pieces_;
  std::vector<std::vector<Slot>> params_;  // by unit and parameter
  std::vector<const Param*> first_param_;  // of each unit
  std::int64_t data_begin_ = 0, data_bytes_ = 0;
  std::unique_ptr<NewFile> file_;
};

// Puts a checkpoint in place whose files are on the drive: writes the manifest, and gives the directory its
// name. Throws Error(kIo).
void commit_checkpoint(Files& files, const std::string& unfinished, const std::string& path,
                       const std::string& manifest);
// The same as the public function; returns what failed. Empty: nothing.
std::string discard_checkpoint(Files& files, const std::string& path);

}  // namespace zg
