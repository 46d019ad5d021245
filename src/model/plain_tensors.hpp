// Parameters as the tensors of a file have them, in fp32 or bf16. Private to src/model.
#pragma once
#include <cstdint>
#include <vector>

#include "model/weight_files.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg::hf {

// A parameter's place among the files. Parameters that files store as one tensor share it.
struct Placed {
  const Unit* unit = nullptr;
  const Param* param = nullptr;
  WeightFiles::Place place = {};
};

// Adds a parameter's tensor, unless it is a later part of one that `last` belongs to.
Placed add_plain(WeightFiles& files, const Unit& unit, const Param& param, DType dtype, const Placed& last);

// Converts and writes parameters through two buffers of fixed size.
class PlainWriter {
 public:
  // Elements read at a time: 4 MiB as fp32, and up to as much again for the file's format.
  static constexpr std::int64_t kTile = 1 << 20;

  PlainWriter(DType dtype, const ReadParam& read)
      : dtype_(dtype), read_(read), in_(kTile), out_(static_cast<std::size_t>(kTile * width())) {}
  void write(OutputFile& file, const WeightFiles& files, const Placed& placed);

 private:
  std::int64_t width() const { return static_cast<std::int64_t>(size_of(dtype_)); }
  void store(std::int64_t i, float value);
  void write_straight(OutputFile& file, std::int64_t at, const Placed& t);
  void write_transposed(OutputFile& file, std::int64_t at, const Placed& t);
  void turn(std::int64_t rows, std::int64_t cols);

  DType dtype_;
  const ReadParam& read_;
  std::vector<float> in_;
  std::vector<char> out_;
};

}  // namespace zg::hf
