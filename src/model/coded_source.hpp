// Matrices in 4 or 8 bits in the files of a quantised model: which tensors belong to one, and its values in
// fp32. Private to src/model.
//
// Objects are immutable; any thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/quantization.hpp"
#include "model/safetensors_values.hpp"
#include "ziggurat/model/param_code.hpp"

namespace zg::hf {

// The tensor of a name in the files, or null.
using FindSource = std::function<const Source*(const std::string&)>;

class CodedSource {
 public:
  // The matrix [rows, cols] of a linear layer whose plain weight would have the name `weight`. None if the
  // files have no codes for it. Throws Error(kUsage) that names tensor and file for tensors that are missing,
  // that have another type or shape than the format asks for, or whose format cannot be read.
  static std::optional<CodedSource> find(const std::string& weight, std::int64_t rows, std::int64_t cols,
                                         const Quantization& quantization, const FindSource& find);

  ParamCode code() const { return {format_, zeros_.has_value(), !groups_.empty(), nested_offset_}; }
  // Writes all codes and scales of a part that has a code_of_part() to memory from `base` on, through some
  // MiB of memory and the matrix's scales. Throws Error(kIo).
  void read_codes(const CodePart& part, const CodePlaces& places, std::byte* base) const;
  // The names of all tensors of the files that belong to the matrix.
  const std::vector<std::string>& names() const { return names_; }
  // Writes elements [begin, end), row after row, to out [end - begin], through some MiB of memory. A matrix
  // whose file has its columns one by one (GPTQ, AWQ) is walked over as a whole by each call: ask for large
  // ranges. Throws Error(kIo).
  void read(std::int64_t begin, std::int64_t end, float* out) const;

 private:
  class Builder;
  // How codes, scales and zero points lie in the file: by rows of the matrix, or by its columns as GPTQ and
  // AWQ have them.
  enum class Order { kRows, kGptq, kAwq };
  // Arrays of some rows, or of some blocks where codes have no rows.
  struct Arrays;

  CodedSource(std::int64_t rows, std::int64_t cols) : rows_(rows), cols_(cols) {}
  void read_flat(std::int64_t begin, std::int64_t end, float* out) const;
  // Read codes, scales and zero points of the rows [first, last), in the order that CodedMatrix has.
  void read_rows(Arrays& arrays, std::int64_t first, std::int64_t last) const;
  void read_row_scales(Arrays& arrays, std::int64_t first, std::int64_t last) const;
  void read_columns(Arrays& arrays, std::int64_t first, std::int64_t last) const;
  void read_column_codes(Arrays& arrays, std::int64_t first, std::int64_t last) const;
  void read_column_scales(Arrays& arrays, std::int64_t first, std::int64_t last) const;
  // Codes of the rows [first, last) alone, row after row.
  void read_codes_of(Arrays& arrays, std::int64_t first, std::int64_t last) const;
  void write_scales(const CodePart& part, const CodePlaces& places, std::byte* base) const;
  void write_codes(const CodePart& part, const CodePlaces& places, std::byte* base) const;
  std::int64_t end_of_rows(std::int64_t first) const;

  std::int64_t rows_, cols_;
  CodeFormat format_;
  Order order_ = Order::kRows;
  int zero_bias_ = 0;  // is added to stored zero points
  std::optional<Source> codes_, scales_, zeros_, nested_scales_;
  std::vector<std::int32_t> groups_;  // as CodedMatrix::groups, or empty
  std::vector<float> nested_levels_;
  float nested_offset_ = 0;
  std::vector<std::string> names_;
};

}  // namespace zg::hf
