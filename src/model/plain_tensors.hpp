// Parameters as the tensors of a file have them, in fp32 or bf16. Private to src/model.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/weight_files.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg::hf {

// A parameter's place among the files. Parameters that files store as one tensor share it.
struct Placed {
  const Unit* unit = nullptr;
  const Param* param = nullptr;
  DType dtype = DType::kF32;
  WeightFiles::Place place = {};
};

// Converts and writes parameters through two buffers of fixed size.
class PlainWriter {
 public:
  // Elements read at a time: 4 MiB as fp32, and up to as much again for the file's format.
  static constexpr std::int64_t kTile = 1 << 20;

  explicit PlainWriter(const ReadParam& read)
      : read_(read), in_(kTile), out_(static_cast<std::size_t>(kTile) * sizeof(float)) {}
  void write(OutputFile& file, const WeightFiles& files, const Placed& placed);

 private:
  std::int64_t width() const { return static_cast<std::int64_t>(size_of(dtype_)); }
  void store(std::int64_t i, float value);
  void write_straight(OutputFile& file, std::int64_t at, const Placed& t);
  void write_transposed(OutputFile& file, std::int64_t at, const Placed& t);
  void turn(std::int64_t rows, std::int64_t cols);

  DType dtype_ = DType::kF32;  // of the parameter that is being written
  const ReadParam& read_;
  std::vector<float> in_;
  std::vector<char> out_;
};

// The parameters of a model, or some of them, that files hold without codes.
class PlainTensors {
 public:
  // dtype: of the tensors; choice biases are always fp32.
  explicit PlainTensors(DType dtype) : dtype_(dtype) {}
  // All of a unit, which must outlive this object.
  void add(WeightFiles& files, const Unit& unit);
  void add(WeightFiles& files, const Unit& unit, const Param& param) { add(files, unit, param, dtype_); }
  void add_choice_bias(WeightFiles& files, const Unit& unit) {
    if (unit.choice_bias) add(files, unit, *unit.choice_bias, DType::kF32);
  }
  std::int64_t bytes() const { return bytes_; }  // of all tensors
  // Writes the parameters that lie in one of the files.
  void write(OutputFile& file, const WeightFiles& files, std::size_t shard, PlainWriter& writer) const;

 private:
  void add(WeightFiles& files, const Unit& unit, const Param& param, DType dtype);

  DType dtype_;
  std::vector<Placed> list_;
  std::map<std::string, WeightFiles::Place> places_;  // by the tensor's name
  std::int64_t bytes_ = 0;
};

}  // namespace zg::hf
