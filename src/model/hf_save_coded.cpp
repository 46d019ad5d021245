// Writes models whose matrices are coded, as the libraries that read them name and describe their tensors.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/nested_scales.hpp"
#include "model/families/family.hpp"
#include "model/hf_text.hpp"
#include "model/plain_tensors.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

using hf::FileTensor;
using hf::WeightFiles;
using nlohmann::ordered_json;

constexpr std::int64_t kBand =
    128;  // rows that are coded together: whole blocks of FP8, and whole bytes and blocks of NF4
constexpr std::int64_t kShardBytes = std::int64_t{5} << 30;

// A matrix of a file, of one parameter or of several one below the other.
struct Matrix {
  const Unit* unit = nullptr;
  std::vector<const Param*> params;
  std::int64_t rows = 0, cols = 0;
  CodeFormat format;
  WeightFiles::Place codes, scales;
  std::vector<std::pair<WeightFiles::Place, std::string>> constants;  // tensors with their content

  std::string name() const { return params.front()->name_in_files(); }
  std::string module() const {
    const std::string weight = name();
    return weight.substr(0, weight.rfind(".weight"));
  }
};

template <class T>
std::string bytes_of(const T* values, std::size_t count) {
  return {reinterpret_cast<const char*>(values), count * sizeof(T)};
}

class CodedWriter {
 public:
  CodedWriter(const std::string& from, const Model& model, SavedCode code, DType dtype, const ReadParam& read)
      : from_(from), model_(model), code_(code), dtype_(dtype), read_(read) {
    if (model.config().arch == Arch::kGpt2)
      fail("is of the family gpt2, whose matrices no library reads in few bits",
           "quantise a model of another family");
    if (model::family_of(model.config().arch).files.block.fused_experts)
      fail(fmt::format("is of the family {}, whose files have all experts of a layer in one tensor, which no "
                       "library reads in few bits",
                       name_of(model.config().arch)),
           "quantise a model of another family");
    for (const Unit& unit : model.units()) add(unit);
    result.bytes += plain_.bytes();
  }

  void save(const std::string& directory, const std::function<void(std::int64_t, std::int64_t)>& progress) {
    for (const Matrix& m : matrices_) all_ += m.rows * m.cols * static_cast<std::int64_t>(sizeof(float));
    hf::PlainWriter plain(read_);
    files_.save(directory, config(), [&](OutputFile& file, std::size_t shard) {
      plain_.write(file, files_, shard, plain);
      for (const Matrix& m : matrices_) {
        if (m.codes.shard == shard) write(file, m, progress);
      }
    });
  }

  CodedSave result;

 private:
  [[noreturn]] void fail(const std::string& problem, const std::string& hint) const {
    throw Error(Errc::kUsage, from_, problem, hint);
  }

  void add(const Unit& unit) {
    for (const Param& p : unit.params) {
      if (stays_plain(unit, p)) {
        plain_.add(files_, unit, p);
      } else if (p.file_row > 0) {
        matrices_.back().params.push_back(&p);
      } else {
        add_matrix(unit, p);
      }
    }
    plain_.add_choice_bias(files_, unit);
  }

  static bool stays_plain(const Unit& unit, const Param& p) { return p.vector || unit.layer < 0 || p.routes; }
  // The names of the modules that stay plain.
  std::vector<std::string> plain_modules() const {
    std::vector<std::string> names{"lm_head"};
    for (const Unit& unit : model_.units()) {
      for (const Param& p : unit.params) {
        if (p.routes) names.push_back(p.name.substr(0, p.name.rfind(".weight")));
      }
    }
    return names;
  }

  void add_matrix(const Unit& unit, const Param& p) {
    Matrix m;
    m.unit = &unit, m.params = {&p}, m.rows = p.rows_in_files(), m.cols = p.whole_cols;
    m.format = format();
    const CodeFormat& f = m.format;
    const std::string name = m.name(), module = m.module();
    const std::int64_t blocks = f.blocks(m.rows, m.cols), codes = f.code_bytes(m.rows, m.cols);
    std::vector<FileTensor> group;
    std::vector<std::string> contents;
    switch (code_) {
      case SavedCode::kNf4:
      case SavedCode::kNf4Double: {
        const std::int64_t nested = f.nested_blocks(m.rows, m.cols);
        std::string state = quant_state(m, 0);
        const auto length = static_cast<std::int64_t>(state.size());
        group = {{name, "U8", {codes, 1}, codes},
                 nested > 0 ? FileTensor{name + ".absmax", "U8", {blocks}, blocks}
                            : FileTensor{name + ".absmax", "F32", {blocks}, 4 * blocks},
                 {name + ".quant_map", "F32", {16}, 64},
                 {name + ".quant_state.bitsandbytes__nf4", "U8", {length}, length}};
        contents = {bytes_of(kNf4Levels.data(), kNf4Levels.size()), std::move(state)};
        if (nested == 0) break;
        group.push_back({name + ".nested_quant_map", "F32", {256}, 4 * 256});
        group.push_back({name + ".nested_absmax", "F32", {nested}, 4 * nested});
        contents.push_back(bytes_of(host::nested_levels().data(), 256));
        break;
      }
      case SavedCode::kFp8: {
        const std::int64_t across = f.row_blocks(m.rows, m.cols);
        group = {{name, "F8_E4M3", {m.rows, m.cols}, codes},
                 {module + ".weight_scale_inv", "F32", {blocks / across, across}, 4 * blocks}};
        break;
      }
      case SavedCode::kInt4: {
        const std::int64_t shape[] = {m.rows, m.cols};
        group = {{module + ".weight_packed", "I32", {m.rows, f.row_bytes(m.cols) / 4}, codes},
                 {module + ".weight_scale", "BF16", {m.rows, blocks / m.rows}, 2 * blocks},
                 {module + ".weight_shape", "I64", {2}, 16}};
        contents = {bytes_of(shape, 2)};
        break;
      }
    }
    m.codes = files_.add(group);
    m.scales = {m.codes.shard, m.codes.tensor + 1};
    for (std::size_t i = 0; i < contents.size(); ++i)
      m.constants.push_back({{m.codes.shard, m.codes.tensor + 2 + i}, std::move(contents[i])});
    for (const FileTensor& t : group) result.bytes += t.bytes;
    ++result.matrices;
    matrices_.push_back(std::move(m));
  }

  // The text has the same length for every offset, since it is placed in the file before that is known.
  std::string quant_state(const Matrix& m, float offset) const {
    ordered_json state{{"quant_type", "nf4"},
                       {"blocksize", m.format.block_cols},
                       {"dtype", dtype_ == DType::kBF16 ? "bfloat16" : "float32"},
                       {"shape", {m.rows, m.cols}}};
    if (code_ == SavedCode::kNf4) return state.dump();
    state["nested_blocksize"] = m.format.nested_block, state["nested_dtype"] = "float32";
    std::string text = state.dump();
    text.back() = ',';
    return text + fmt::format("\"nested_offset\":{:<16.9g}}}", offset);
  }

  CodeFormat format() {
    if (code_ == SavedCode::kNf4) return {WeightCode::kNf4, CodeScale::kF32, 1, 64};
    if (code_ == SavedCode::kNf4Double) return {WeightCode::kNf4, CodeScale::kNested, 1, 64};
    if (code_ == SavedCode::kFp8) return {WeightCode::kFp8, CodeScale::kF32, 128, 128};
    if (group_ == 0) choose_group();
    return {WeightCode::kInt4, CodeScale::kBF16, 1, group_};
  }
  // The largest group that all widths are multiples of: the description in config.json has one for all.
  void choose_group() {
    for (const std::int64_t group : {128, 64, 32}) {
      bool fits = true;
      for (const Unit& unit : model_.units()) {
        for (const Param& p : unit.params) fits = fits && (stays_plain(unit, p) || p.whole_cols % group == 0);
      }
      if (fits) {
        group_ = group;
        return;
      }
    }
    fail("has matrices whose inputs are no multiple of 32, the smallest group of INT4", "take nf4 or fp8");
  }

  // Rows [first, last) of the file's matrix, from its parameters.
  void read_rows(const Matrix& m, std::int64_t first, std::int64_t last, float* out) const {
    for (const Param* p : m.params) {
      const std::int64_t from = std::max(first, p->file_row),
                         to = std::min(last, p->file_row + p->whole_rows);
      if (from >= to) continue;
      read_(*m.unit, *p, (from - p->file_row) * m.cols, (to - p->file_row) * m.cols,
            out + (from - first) * m.cols);
    }
  }

  using Progress = std::function<void(std::int64_t, std::int64_t)>;

  void write(OutputFile& file, const Matrix& m, const Progress& progress) {
    for (const auto& [place, content] : m.constants) write_at(file, place, 0, content);
    if (m.format.scale == CodeScale::kNested) {
      write_nested(file, m, progress);
    } else {
      for_bands(m, [&](std::int64_t first, std::int64_t rows) {
        encode_band(file, m, m.format, first, rows);
        compare(m, m.format, rows, scales_.data());
        const auto width = static_cast<std::int64_t>(size_of(scale_type(m.format.scale)));
        write_at(file, m.scales, m.format.blocks(first, m.cols) * width, scales_);
        tell(rows * m.cols, progress);
      });
    }
  }

  // The scales of all bands are coded together. The elements that codes decode to are known only then, so the
  // rows are read twice.
  void write_nested(OutputFile& file, const Matrix& m, const Progress& progress) {
    CodeFormat plain = m.format;
    plain.scale = CodeScale::kF32;
    std::vector<float> scales;
    std::vector<std::uint8_t> codes;
    for_bands(m, [&](std::int64_t first, std::int64_t rows) {
      encode_band(file, m, plain, first, rows);
      const auto* const band = reinterpret_cast<const float*>(scales_.data());
      scales.insert(scales.end(), band, band + plain.blocks(rows, m.cols));
      codes.insert(codes.end(), codes_.begin(), codes_.end());
    });
    const host::NestedScales nested =
        host::encode_scales(scales.data(), static_cast<std::int64_t>(scales.size()), m.format.nested_block);
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const auto block = i / static_cast<std::size_t>(m.format.nested_block);
      scales[i] = host::nested_levels()[nested.codes[i]] * nested.scales[block] + nested.offset;
    }
    for_bands(m, [&](std::int64_t first, std::int64_t rows) {
      read_band(m, first, rows);
      const auto from = codes.begin() + plain.code_bytes(first, m.cols);
      codes_.assign(from, from + plain.code_bytes(rows, m.cols));
      compare(m, plain, rows, scales.data() + plain.blocks(first, m.cols));
      tell(rows * m.cols, progress);
    });
    write_at(file, m.scales, 0, nested.codes);
    write_at(file, {m.scales.shard, m.scales.tensor + 2}, 0, quant_state(m, nested.offset));
    write_at(file, {m.scales.shard, m.scales.tensor + 4}, 0, nested.scales);
  }

  template <class F>
  static void for_bands(const Matrix& m, const F& f) {
    for (std::int64_t first = 0; first < m.rows; first += kBand) f(first, std::min(kBand, m.rows - first));
  }
  template <class T>
  void write_at(OutputFile& file, const WeightFiles::Place& place, std::int64_t offset,
                const T& values) const {
    file.write_at(files_.tensor(place).begin + offset, values.data(),
                  static_cast<std::int64_t>(values.size() * sizeof(values[0])));
  }
  void tell(std::int64_t elements, const Progress& progress) {
    done_ += elements * static_cast<std::int64_t>(sizeof(float));
    if (progress) progress(done_, all_);
  }

  void read_band(const Matrix& m, std::int64_t first, std::int64_t rows) {
    values_.resize(static_cast<std::size_t>(rows * m.cols));
    read_rows(m, first, first + rows, values_.data());
    for (const float v : values_) {
      if (std::isfinite(v)) continue;
      fail(fmt::format("{} holds {}, which has no code", hf::in_quotes(m.name()), v),
           "take a model whose weights are finite");
    }
  }

  // Reads a band of rows, leaves its codes and scales in codes_ and scales_, and writes the codes. A band of
  // 128 rows begins at a whole byte and at a block.
  void encode_band(OutputFile& file, const Matrix& m, const CodeFormat& f, std::int64_t first,
                   std::int64_t rows) {
    read_band(m, first, rows);
    codes_.resize(static_cast<std::size_t>(f.code_bytes(rows, m.cols)));
    scales_.resize(static_cast<std::size_t>(f.blocks(rows, m.cols)) * size_of(scale_type(f.scale)));
    host::encode(f, {rows, m.cols}, values_.data(), codes_.data(), scales_.data());
    write_at(file, m.codes, f.code_bytes(first, m.cols), codes_);
  }

  // Notes the largest error of the band in values_ and codes_.
  void compare(const Matrix& m, const CodeFormat& f, std::int64_t rows, const void* scales) {
    decoded_.resize(values_.size());
    host::decode<float>({.format = f, .rows = rows, .cols = m.cols, .codes = codes_.data(), .scales = scales},
                        decoded_.data());
    for (std::size_t i = 0; i < values_.size(); ++i) {
      const double error = std::abs(static_cast<double>(values_[i]) - static_cast<double>(decoded_[i]));
      if (error > result.largest_error) result.largest_error = error, result.largest_error_in = m.name();
    }
  }

  std::string config() const {
    ordered_json object = ordered_json::parse(write_hf_config(model_.config(), dtype_));
    object["quantization_config"] = description();
    return object.dump(2) + "\n";
  }
  ordered_json description() const {
    const char* const type = dtype_ == DType::kBF16 ? "bfloat16" : "float32";
    switch (code_) {
      case SavedCode::kNf4:
      case SavedCode::kNf4Double:
        return {{"quant_method", "bitsandbytes"},
                {"load_in_4bit", true},
                {"load_in_8bit", false},
                {"bnb_4bit_quant_type", "nf4"},
                {"bnb_4bit_use_double_quant", code_ == SavedCode::kNf4Double},
                {"bnb_4bit_compute_dtype", type},
                {"bnb_4bit_quant_storage", "uint8"}};
      case SavedCode::kFp8:
        return {{"quant_method", "fp8"},
                {"fmt", "e4m3"},
                {"weight_block_size", {128, 128}},
                {"activation_scheme", "dynamic"},
                {"modules_to_not_convert", plain_modules()}};
      case SavedCode::kInt4:
        break;
    }
    const ordered_json weights = {{"num_bits", 4},       {"type", "int"},        {"symmetric", true},
                                  {"strategy", "group"}, {"group_size", group_}, {"dynamic", false}};
    const ordered_json group = {{"targets", {"Linear"}}, {"weights", weights}};
    return {{"quant_method", "compressed-tensors"},
            {"format", "pack-quantized"},
            {"quantization_status", "compressed"},
            {"config_groups", {{"group_0", group}}},
            {"ignore", plain_modules()}};
  }

  const std::string& from_;
  const Model& model_;
  SavedCode code_;
  DType dtype_;
  const ReadParam& read_;
  std::int64_t group_ = 0;  // kInt4
  WeightFiles files_{kShardBytes};
  hf::PlainTensors plain_{dtype_};
  std::vector<Matrix> matrices_;
  std::int64_t done_ = 0, all_ = 0;
  std::vector<float> values_, decoded_;
  std::vector<std::uint8_t> codes_, scales_;
};

}  // namespace

CodedSave save_hf_coded(const std::string& directory, const std::string& from, const Model& model,
                        SavedCode code, DType dtype, const ReadParam& read,
                        const std::function<void(std::int64_t, std::int64_t)>& progress) {
  CodedWriter writer(from, model, code, dtype, read);
  writer.save(directory, progress);
  return writer.result;
}

std::int64_t coded_bytes(const std::string& from, const Model& model, SavedCode code, DType dtype) {
  const ReadParam none;
  return CodedWriter(from, model, code, dtype, none).result.bytes;
}

}  // namespace zg
