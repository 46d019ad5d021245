#include "model/coded_source.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "kernels/host/elementwise.hpp"
#include "model/hf_text.hpp"

namespace zg::hf {
namespace {

using kernels::CodedMatrix;
using Shape = std::vector<std::int64_t>;

constexpr std::int64_t kValues = 1 << 20;            // elements that are decoded at a time
constexpr std::int64_t kColumnValues = 8 * kValues;  // elements whose codes are turned at a time
constexpr const char* kRefetch = "the file is damaged, or not of this model; fetch it again";
// The output of the eight that a word of AWQ holds whose code lies in half byte i.
constexpr int kAwqOutput[8] = {0, 2, 4, 6, 1, 3, 5, 7};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::optional<CodeScale> scale_of(const std::string& dtype) {
  if (dtype == "F32") return CodeScale::kF32;
  if (dtype == "BF16") return CodeScale::kBF16;
  if (dtype == "F16") return CodeScale::kF16;
  if (dtype == "F8_E8M0" || dtype == "U8") return CodeScale::kPower;
  return std::nullopt;
}

}  // namespace

// Finds the tensors of a matrix and checks them.
class CodedSource::Builder {
 public:
  Builder(const std::string& weight, std::int64_t rows, std::int64_t cols, const Quantization& quantization,
          const FindSource& find)
      : weight_(weight),
        module_(weight.substr(0, weight.rfind(".weight"))),
        rules_(quantization),
        find_(find),
        out_(rows, cols) {}

  std::optional<CodedSource> build() {
    if (const Source* plain = find_(weight_)) {
      const std::string& dtype = plain->entry->dtype;
      if (dtype == "U8") return use(weight_), build_nf4(), out_;
      if (dtype == "F8_E4M3") return use(weight_), build_fp8(), out_;
      if (dtype == "I8") {
        fail(*plain, find_(module_ + ".SCB") != nullptr
                         ? "is in the 8 bits of LLM.int8(), which cannot be read"
                         : "has the dtype I8, which cannot be read");
      }
      return std::nullopt;
    }
    if (find_(weight_ + "_blocks") != nullptr) return use(weight_ + "_blocks"), build_blocks(), out_;
    if (find_(module_ + ".weight_packed") != nullptr)
      return use(module_ + ".weight_packed"), build_packed(), out_;
    if (find_(module_ + ".qweight") != nullptr) return use(module_ + ".qweight"), build_turned(), out_;
    return std::nullopt;
  }

 private:
  [[noreturn]] static void fail(const Source& source, const std::string& problem,
                                const std::string& hint = kRefetch) {
    throw Error(Errc::kUsage, source.file->path(),
                fmt::format("{} {}", in_quotes(source.entry->name), problem), hint);
  }

  // The tensor becomes the codes.
  void use(const std::string& name) { codes_ = &need(name); }
  const Source& need(const std::string& name) {
    const Source* const source = find_(name);
    if (source == nullptr) fail(*codes_, fmt::format("is there without {}", in_quotes(name)));
    out_.names_.push_back(name);
    return *source;
  }
  const Source* optional(const std::string& name) { return find_(name) == nullptr ? nullptr : &need(name); }

  static void expect(const Source& source, std::initializer_list<const char*> dtypes, const Shape& shape) {
    const SafeTensors::Entry& e = *source.entry;
    std::string names;
    for (const char* dtype : dtypes) names += (names.empty() ? "" : " or ") + std::string(dtype);
    const bool known = std::any_of(dtypes.begin(), dtypes.end(), [&](const char* d) { return e.dtype == d; });
    if (known && e.shape == shape) return;
    fail(source,
         fmt::format("is {} {}; {} {} is expected", e.dtype, shape_text(e.shape), names, shape_text(shape)));
  }
  // All of a small tensor.
  template <class T>
  static std::vector<T> content(const Source& source) {
    std::vector<T> out(static_cast<std::size_t>(source.entry->bytes) / sizeof(T));
    source.file->read(*source.entry, 0, source.entry->bytes, out.data());
    return out;
  }
  static Source bytes_of(const Source& source) { return {source.file, source.entry, DType::kU8}; }

  void expect_finite(const Source& source, const std::vector<float>& values) {
    for (const float v : values) {
      if (!std::isfinite(v)) fail(source, fmt::format("holds {}, which is no number", v));
    }
  }

  void build_nf4() {
    const std::int64_t rows = out_.rows_, cols = out_.cols_;
    for (const char* other : {"fp4", "int8"}) {
      if (find_(weight_ + ".quant_state.bitsandbytes__" + other) != nullptr) {
        fail(*codes_, fmt::format("is in the format {} of bitsandbytes; only NF4 can be read", other),
             "quantise the model with bnb_4bit_quant_type \"nf4\"");
      }
    }
    const Source& state = need(weight_ + ".quant_state.bitsandbytes__nf4");
    std::string text(static_cast<std::size_t>(std::min<std::int64_t>(state.entry->bytes, 1 << 16)), '\0');
    state.file->read(*state.entry, 0, static_cast<std::int64_t>(text.size()), text.data());
    const std::string where = state.file->path() + ": " + in_quotes(state.entry->name);
    const json object = parse_object(text, where);
    const Keys keys(object, where);
    if (const std::string type = keys.text("quant_type", ""); type != "nf4") {
      fail(state, fmt::format("has the quant_type {}; \"nf4\" is expected", in_quotes(type)));
    }
    const json& shape = keys.has("shape") ? keys.at("shape") : object;
    if (shape != json::array({rows, cols})) {
      fail(state,
           fmt::format("is of a matrix {}; the configuration asks for {}", shape.dump(),
                       shape_text(Shape{rows, cols})),
           "config.json and the weights must be of the same model");
    }
    CodeFormat& f = out_.format_;
    f = {WeightCode::kNf4, CodeScale::kF32, 1, keys.size("blocksize", {}, 1 << 16)};
    if (f.block_cols % 2 != 0) keys.wrong("blocksize", "an even number");
    const std::int64_t blocks = f.blocks(rows, cols);
    expect(*codes_, {"U8"}, codes_->entry->shape);
    if (codes_->entry->bytes != f.code_bytes(rows, cols)) {
      fail(*codes_, fmt::format("has {} bytes; {} are expected for {}", codes_->entry->bytes,
                                f.code_bytes(rows, cols), shape_text(Shape{rows, cols})));
    }
    const Source& map = need(weight_ + ".quant_map");
    expect(map, {"F32"}, {16});
    if (std::memcmp(content<float>(map).data(), kNf4Levels.data(), sizeof(kNf4Levels)) != 0)
      fail(map, "holds other levels than NF4 has");
    const Source& scales = need(weight_ + ".absmax");
    if (scales.entry->dtype == "U8") {
      expect(scales, {"U8"}, {blocks});
      f.scale = CodeScale::kNested;
      f.nested_block = keys.size("nested_blocksize", {}, 1 << 16);
      if (const std::string type = keys.text("nested_dtype", "float32"); type != "float32")
        keys.wrong("nested_dtype", "\"float32\"");
      if (!keys.has("nested_offset") || !keys.at("nested_offset").is_number())
        keys.wrong("nested_offset", "a number");
      out_.nested_offset_ = keys.at("nested_offset").get<float>();
      const Source &levels = need(weight_ + ".nested_quant_map"), &nested = need(weight_ + ".nested_absmax");
      expect(levels, {"F32"}, {256}), expect(nested, {"F32"}, {f.nested_blocks(rows, cols)});
      out_.nested_levels_ = content<float>(levels);
      expect_finite(levels, out_.nested_levels_);
      out_.nested_scales_ = nested;
    } else {
      expect(scales, {"F32"}, {blocks});
    }
    out_.codes_ = bytes_of(*codes_), out_.scales_ = scales;
  }

  // Scales of blocks, of rows, or one for all.
  void build_fp8() {
    const std::int64_t rows = out_.rows_, cols = out_.cols_;
    expect(*codes_, {"F8_E4M3"}, {rows, cols});
    const Source* const inverse = optional(module_ + ".weight_scale_inv");
    const Source& scales = inverse != nullptr ? *inverse : need(module_ + ".weight_scale");
    optional(module_ + ".input_scale"),
        optional(module_ + ".activation_scale");  // of activations, which stay as they are
    const SafeTensors::Entry& e = *scales.entry;
    const auto type = scale_of(e.dtype);
    if (!type) fail(scales, fmt::format("has the dtype {}; F32, BF16, F16 or F8_E8M0 is expected", e.dtype));
    CodeFormat& f = out_.format_;
    f = {WeightCode::kFp8, *type, rows, cols};
    if (e.count() == rows && rows > 1 && (e.shape.size() == 1 || e.shape == Shape{rows, 1})) {
      f.block_rows = 1;
    } else if (e.count() != 1) {
      if (rules_.block_rows == 0) {
        fail(scales,
             fmt::format("has the shape {}, and config.json names no \"weight_block_size\"",
                         shape_text(e.shape)),
             "fetch the model's config.json again");
      }
      f.block_rows = rules_.block_rows, f.block_cols = rules_.block_cols;
      expect(scales, {e.dtype.c_str()}, {ceil_div(rows, f.block_rows), ceil_div(cols, f.block_cols)});
    }
    out_.codes_ = bytes_of(*codes_), out_.scales_ = scales;
  }

  void build_packed() {
    const std::int64_t rows = out_.rows_, cols = out_.cols_;
    if (const Source* const nvfp4 = find_(module_ + ".weight_global_scale"))
      fail(*nvfp4, "belongs to NVFP4, which cannot be read", "fetch the model in MXFP4, INT4 or FP8");
    const Source& scales = need(module_ + ".weight_scale");
    CodeFormat& f = out_.format_;
    if (codes_->entry->dtype == "U8") {
      f = {WeightCode::kMxfp4, CodeScale::kPower, 1, 32};
      if (cols % 32 != 0) fail(*codes_, fmt::format("is MXFP4 with {} columns; blocks have 32", cols));
      expect(*codes_, {"U8"}, {rows, cols / 2}), expect(scales, {"U8", "F8_E8M0"}, {rows, cols / 32});
      out_.codes_ = bytes_of(*codes_), out_.scales_ = scales;
      return;
    }
    const Shape& packed = codes_->entry->shape;
    if (packed == Shape{rows, ceil_div(cols, 4)} && cols > 4)
      fail(*codes_, "has weights of 8 bits; of pack-quantized files those of 4 bits can be read");
    expect(*codes_, {"I32"}, {rows, ceil_div(cols, 8)});
    if (const Source* const shape = optional(module_ + ".weight_shape")) expect_shape_tensor(*shape);
    const std::int64_t groups = scales.entry->shape.size() == 2 ? scales.entry->shape[1] : 0;
    if (groups < 1 || cols % groups != 0 || (cols / groups % 2 != 0 && groups > 1))
      fail(scales,
           fmt::format("has the shape {}; [{}, groups] is expected", shape_text(scales.entry->shape), rows));
    expect(scales, {"F32", "BF16", "F16"}, {rows, groups});
    f = {WeightCode::kInt4, *scale_of(scales.entry->dtype), 1, cols / groups};
    if (const Source* const zeros = optional(module_ + ".weight_zero_point")) {
      expect(*zeros, {"I32"}, {ceil_div(rows, 8), groups});
      out_.zeros_ = bytes_of(*zeros);
    }
    if (const Source* const order = optional(module_ + ".weight_g_idx")) set_groups(*order, groups);
    out_.codes_ = bytes_of(*codes_), out_.scales_ = scales;
  }

  // MXFP4 as gpt-oss has it: the rows of all experts, in blocks of 32 elements; the first of two elements is
  // in the lower half of a byte.
  void build_blocks() {
    const std::int64_t rows = out_.rows_, cols = out_.cols_;
    const Source& scales = need(weight_ + "_scales");
    if (cols % 32 != 0) fail(*codes_, fmt::format("is MXFP4 with {} columns; blocks have 32", cols));
    const auto of_rows = [&](const Source& source, Shape behind) {
      const Shape& shape = source.entry->shape;
      const bool split = shape.size() == behind.size() + 2 && shape[0] > 0 && rows % shape[0] == 0;
      behind.insert(behind.begin(), {split ? shape[0] : 1, rows / (split ? shape[0] : 1)});
      expect(source, {"U8"}, behind);
    };
    of_rows(*codes_, {cols / 32, 16}), of_rows(scales, {cols / 32});
    out_.format_ = {WeightCode::kMxfp4, CodeScale::kPower, 1, 32};
    out_.codes_ = bytes_of(*codes_), out_.scales_ = scales;
  }

  void expect_shape_tensor(const Source& shape) {
    const Shape expected{out_.rows_, out_.cols_};
    Shape found;
    if (shape.entry->dtype == "I64") {
      found = content<std::int64_t>(shape);
    } else if (shape.entry->dtype == "I32") {
      for (const std::int32_t n : content<std::int32_t>(shape)) found.push_back(n);
    }
    if (found != expected) {
      fail(shape,
           fmt::format("says {}; the configuration asks for {}", shape_text(found), shape_text(expected)),
           "config.json and the weights must be of the same model");
    }
  }

  // GPTQ and AWQ, whose matrices are [inputs, outputs].
  void build_turned() {
    const std::int64_t rows = out_.rows_, cols = out_.cols_;
    const bool awq = rules_.method == Quantization::Method::kAwq;
    if (!awq && rules_.method != Quantization::Method::kGptq) {
      fail(*codes_, "is of GPTQ or AWQ, and config.json says neither", "fetch the model's config.json again");
    }
    if (rows % 8 != 0 || cols % 8 != 0)
      fail(*codes_, fmt::format("holds words of 8 codes, and the matrix is {} x {}", rows, cols));
    expect(*codes_, {"I32"}, awq ? Shape{cols, rows / 8} : Shape{cols / 8, rows});
    const std::int64_t group = rules_.group == 0 ? cols : rules_.group, groups = ceil_div(cols, group);
    const Source &scales = need(module_ + ".scales"), &zeros = need(module_ + ".qzeros");
    expect(scales, {"F16", "BF16", "F32"}, {groups, rows}), expect(zeros, {"I32"}, {groups, rows / 8});
    out_.format_ = {WeightCode::kInt4, *scale_of(scales.entry->dtype), 1, group};
    out_.order_ = awq ? Order::kAwq : Order::kGptq;
    out_.zero_bias_ = rules_.zeros_less_one ? 1 : 0;
    out_.codes_ = bytes_of(*codes_), out_.scales_ = scales, out_.zeros_ = bytes_of(zeros);
    if (awq) return;
    if (const Source* const order = optional(module_ + ".g_idx")) set_groups(*order, groups);
  }

  void set_groups(const Source& order, std::int64_t groups) {
    expect(order, {"I32"}, {out_.cols_});
    std::vector<std::int32_t> of = content<std::int32_t>(order);
    bool usual = true;
    for (std::int64_t c = 0; c < out_.cols_; ++c) {
      const std::int32_t g = of[static_cast<std::size_t>(c)];
      if (g < 0 || g >= groups) fail(order, fmt::format("places column {} in group {} of {}", c, g, groups));
      usual = usual && g == c / out_.format_.block_cols;
    }
    if (!usual) out_.groups_ = std::move(of);
  }

  const std::string &weight_, module_;
  const Quantization& rules_;
  const FindSource& find_;
  const Source* codes_ = nullptr;
  CodedSource out_;
};

std::optional<CodedSource> CodedSource::find(const std::string& weight, std::int64_t rows, std::int64_t cols,
                                             const Quantization& quantization, const FindSource& find) {
  return Builder(weight, rows, cols, quantization, find).build();
}

struct CodedSource::Arrays {
  std::vector<std::uint8_t> codes, scales, zeros;
  std::vector<float> nested_scales;

  CodedMatrix matrix(const CodedSource& of, std::int64_t rows, std::int64_t cols) const {
    return {.format = of.format_,
            .rows = rows,
            .cols = cols,
            .codes = codes.data(),
            .scales = scales.data(),
            .zeros = zeros.empty() ? nullptr : zeros.data(),
            .groups = of.groups_.empty() ? nullptr : of.groups_.data(),
            .nested_levels = of.nested_levels_.data(),
            .nested_scales = nested_scales.data(),
            .nested_offset = of.nested_offset_};
  }
};

namespace {

// Bytes [begin, end) of a tensor.
void read_bytes(const Source& source, std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>& out) {
  out.resize(static_cast<std::size_t>(end - begin));
  source.file->read(*source.entry, begin, end - begin, out.data());
}

// Columns [first, last) of a tensor of `lines` lines of `width` elements of so many bytes.
std::vector<std::uint8_t> read_columns_of(const Source& source, std::int64_t lines, std::int64_t width,
                                          std::int64_t first, std::int64_t last, std::int64_t bytes) {
  const std::int64_t piece = (last - first) * bytes;
  std::vector<std::uint8_t> out(static_cast<std::size_t>(lines * piece));
  if (last - first == width) {
    source.file->read(*source.entry, 0, lines * piece, out.data());
    return out;
  }
  for (std::int64_t i = 0; i < lines; ++i)
    source.file->read(*source.entry, (i * width + first) * bytes, piece, out.data() + i * piece);
  return out;
}

unsigned half_byte(const std::uint8_t* word, int i) {
  return (word[i / 2] >> (i % 2 * 4)) & 15u;
}

}  // namespace

void CodedSource::read(std::int64_t begin, std::int64_t end, float* out) const {
  if (format_.is_flat()) return read_flat(begin, end, out);
  Arrays arrays;
  std::vector<float> edge;  // rows of which not all are asked for
  for (std::int64_t first = begin / cols_, stop = ceil_div(end, cols_); first < stop;) {
    const std::int64_t last = std::min(stop, end_of_rows(first));
    order_ == Order::kRows ? read_rows(arrays, first, last) : read_columns(arrays, first, last);
    const std::int64_t from = std::max(begin, first * cols_), to = std::min(end, last * cols_);
    const CodedMatrix matrix = arrays.matrix(*this, last - first, cols_);
    if (from == first * cols_ && to == last * cols_) {
      host::decode(matrix, out + from - begin);
    } else {
      edge.resize(static_cast<std::size_t>((last - first) * cols_));
      host::decode(matrix, edge.data());
      std::copy_n(edge.begin() + (from - first * cols_), to - from, out + from - begin);
    }
    first = last;
  }
}

// The rows that are decoded together from `first` on: whole rows of blocks, or rows of one.
std::int64_t CodedSource::end_of_rows(std::int64_t first) const {
  const std::int64_t most =
      std::max<std::int64_t>(1, (order_ == Order::kRows ? kValues : kColumnValues) / cols_);
  if (order_ != Order::kRows) return first / 8 * 8 + std::max<std::int64_t>(8, most / 8 * 8);
  const std::int64_t border = (first / format_.block_rows + 1) * format_.block_rows;
  if (first + format_.block_rows != border || most < format_.block_rows)
    return std::min(border, first + most);
  return first + most / format_.block_rows * format_.block_rows;
}

void CodedSource::read_codes(const CodePart& part, const CodePlaces& at, std::byte* base) const {
  const auto copy = [&](const auto& values, std::int64_t to) {
    if (to >= 0) std::memcpy(base + to, values.data(), values.size() * sizeof(values[0]));
  };
  copy(groups_, at.groups), copy(nested_levels_, at.nested_levels);
  write_scales(part, at, base);
  write_codes(part, at, base);
}

// Each block of the part has the scale and the zero point of the matrix's block in which it lies.
void CodedSource::write_scales(const CodePart& part, const CodePlaces& at, std::byte* base) const {
  const CodeFormat& f = format_;
  const CodeFormat own = code_of_part(code(), part)->format;
  Arrays all;
  order_ == Order::kRows ? read_row_scales(all, 0, rows_) : read_column_scales(all, 0, rows_);
  const auto width = static_cast<std::int64_t>(size_of(scale_type(f.scale)));
  const bool plain = own.scale != f.scale;  // nested scales whose blocks the part cuts
  std::int64_t block = 0;                   // of the part
  const auto put = [&](std::int64_t matrix_block) {
    const std::uint8_t* const scale = all.scales.data() + matrix_block * width;
    const std::int64_t nested = matrix_block / f.nested_block;
    if (plain) {
      const float value = nested_levels_[*scale] * all.nested_scales[static_cast<std::size_t>(nested)];
      const float sum = value + nested_offset_;
      std::memcpy(base + at.scales + block * 4, &sum, 4);
    } else {
      std::memcpy(base + at.scales + block * width, scale, static_cast<std::size_t>(width));
    }
    if (at.nested_scales >= 0 && block % f.nested_block == 0) {
      std::memcpy(base + at.nested_scales + block / f.nested_block * 4,
                  &all.nested_scales[static_cast<std::size_t>(nested)], 4);
    }
    if (at.zeros >= 0) {
      base[at.zeros + block] = std::byte{all.zeros[static_cast<std::size_t>(matrix_block)]};
    }
    ++block;
  };
  const std::int64_t rows = part.rows(), per_row = own.row_blocks(rows, part.cols);
  if (f.is_flat()) {
    std::int64_t held = 0;  // elements before the run
    for (const CodePart::Run& run : part.runs) {
      const std::int64_t end = held + run.rows * part.cols;
      while (block * own.block_cols < end) {
        const std::int64_t element = std::max(block * own.block_cols, held) - held;
        put(((run.first + element / part.cols) * cols_ + part.first_col + element % part.cols) /
            f.block_cols);
      }
      held = end;
    }
    return;
  }
  const std::int64_t in_row = f.row_blocks(rows_, cols_);
  std::int64_t held = 0;  // rows before the run
  for (const CodePart::Run& run : part.runs) {
    for (std::int64_t row = round_up(held, own.block_rows); row < held + run.rows; row += own.block_rows) {
      const std::int64_t blocks = (run.first + row - held) / f.block_rows * in_row;
      for (std::int64_t c = 0; c < per_row; ++c)
        put(blocks + (part.first_col + c * own.block_cols) / f.block_cols);
    }
    held += run.rows;
  }
}

void CodedSource::write_codes(const CodePart& part, const CodePlaces& at, std::byte* base) const {
  const int halves = format_.code == WeightCode::kFp8 ? 0 : 1;
  std::byte* to = base + at.codes;
  const bool as_stored = order_ == Order::kRows && part.has_all_columns();
  const std::int64_t from_bytes = format_.is_flat() ? cols_ / 2 : format_.row_bytes(cols_),
                     to_bytes = format_.is_flat() ? part.cols / 2 : format_.row_bytes(part.cols),
                     piece = (part.cols + halves) >> halves;
  Arrays arrays;
  for (const CodePart::Run& run : part.runs) {
    const std::int64_t end = run.first + run.rows;
    if (as_stored) {
      const auto byte_of = [&](std::int64_t row) {
        return format_.is_flat() ? (row * cols_ + 1) / 2 : row * from_bytes;
      };
      const std::int64_t first = byte_of(run.first), bytes = byte_of(end) - first;
      codes_->file->read(*codes_->entry, first, bytes, to);
      to += bytes;
      continue;
    }
    for (std::int64_t row = run.first; row < end;) {
      const std::int64_t last = std::min(end, end_of_rows(row));
      read_codes_of(arrays, row, last);
      for (std::int64_t r = row; r < last; ++r, to += to_bytes) {
        const std::uint8_t* const codes =
            arrays.codes.data() + (r - row) * from_bytes + (part.first_col >> halves);
        std::memcpy(to, codes, static_cast<std::size_t>(piece));
      }
      row = last;
    }
  }
}

void CodedSource::read_flat(std::int64_t begin, std::int64_t end, float* out) const {
  // Chunks begin where a block of nested scales does.
  const std::int64_t n = rows_ * cols_,
                     unit = format_.block_cols * (nested_scales_ ? format_.nested_block : 1);
  const std::int64_t chunk = std::max<std::int64_t>(1, kValues / unit) * unit;
  Arrays arrays;
  std::vector<float> edge;
  for (std::int64_t first = begin / unit * unit; first < end; first += chunk) {
    const std::int64_t last =
        std::min({n, first + chunk, ceil_div(end, format_.block_cols) * format_.block_cols});
    const std::int64_t block = first / format_.block_cols,
                       blocks = ceil_div(last, format_.block_cols) - block;
    const auto width = static_cast<std::int64_t>(size_of(scale_type(format_.scale)));
    read_bytes(*codes_, first / 2, (last + 1) / 2, arrays.codes);
    read_bytes(*scales_, block * width, (block + blocks) * width, arrays.scales);
    if (nested_scales_) {
      const std::int64_t nested = block / format_.nested_block,
                         count = ceil_div(blocks, format_.nested_block);
      arrays.nested_scales.resize(static_cast<std::size_t>(count));
      nested_scales_->file->read(*nested_scales_->entry, nested * 4, count * 4, arrays.nested_scales.data());
    }
    edge.resize(static_cast<std::size_t>(last - first));
    host::decode(arrays.matrix(*this, 1, last - first), edge.data());
    const std::int64_t from = std::max(begin, first), to = std::min(end, last);
    std::copy_n(edge.begin() + (from - first), to - from, out + from - begin);
  }
}

void CodedSource::read_rows(Arrays& arrays, std::int64_t first, std::int64_t last) const {
  read_codes_of(arrays, first, last);
  read_row_scales(arrays, first, last);
}

void CodedSource::read_codes_of(Arrays& arrays, std::int64_t first, std::int64_t last) const {
  if (order_ != Order::kRows) return read_column_codes(arrays, first, last);
  // MXFP4 has rows of whole blocks, INT4 of whole words. Where rows of NF4 are read one by one, each has
  // whole bytes.
  const std::int64_t row = format_.is_flat() ? cols_ / 2 : format_.row_bytes(cols_);
  read_bytes(*codes_, first * row, last * row, arrays.codes);
}

void CodedSource::read_row_scales(Arrays& arrays, std::int64_t first, std::int64_t last) const {
  const auto width = static_cast<std::int64_t>(size_of(scale_type(format_.scale)));
  if (format_.is_flat()) {
    read_bytes(*scales_, 0, format_.blocks(rows_, cols_) * width, arrays.scales);
    if (!nested_scales_) return;
    arrays.nested_scales.resize(static_cast<std::size_t>(format_.nested_blocks(rows_, cols_)));
    nested_scales_->file->read(*nested_scales_->entry, 0,
                               static_cast<std::int64_t>(arrays.nested_scales.size()) * 4,
                               arrays.nested_scales.data());
    return;
  }
  const std::int64_t groups = format_.row_blocks(rows_, cols_), scales = groups * width;
  read_bytes(*scales_, first / format_.block_rows * scales, ceil_div(last, format_.block_rows) * scales,
             arrays.scales);
  if (!zeros_) return;
  std::vector<std::uint8_t> words;
  read_bytes(*zeros_, first / 8 * groups * 4, ceil_div(last, 8) * groups * 4, words);
  arrays.zeros.clear();
  for (std::int64_t r = first; r < last; ++r) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::uint8_t* const word = words.data() + ((r / 8 - first / 8) * groups + g) * 4;
      arrays.zeros.push_back(static_cast<std::uint8_t>(half_byte(word, static_cast<int>(r % 8))));
    }
  }
}

// Turns codes, scales and zero points of the outputs [first, last), of which the words of 8 are read.
void CodedSource::read_columns(Arrays& arrays, std::int64_t first, std::int64_t last) const {
  read_column_codes(arrays, first, last);
  read_column_scales(arrays, first, last);
}

void CodedSource::read_column_codes(Arrays& arrays, std::int64_t first, std::int64_t last) const {
  const std::int64_t rows = last - first, from = first / 8, to = ceil_div(last, 8), words = to - from;
  const std::int64_t row_bytes = format_.row_bytes(cols_);
  arrays.codes.assign(static_cast<std::size_t>(rows * row_bytes), 0);
  if (order_ == Order::kGptq) {
    // A word has 8 inputs of an output, in the order of our codes.
    const auto read = read_columns_of(*codes_, cols_ / 8, rows_, first, last, 4);
    for (std::int64_t k = 0; k < cols_ / 8; ++k) {
      for (std::int64_t r = 0; r < rows; ++r)
        std::memcpy(arrays.codes.data() + r * row_bytes + 4 * k, read.data() + (k * rows + r) * 4, 4);
    }
  } else {
    const auto read = read_columns_of(*codes_, cols_, rows_ / 8, from, to, 4);
    for (std::int64_t k = 0; k < cols_; ++k) {
      for (std::int64_t w = 0; w < words; ++w) {
        for (int i = 0; i < 8; ++i) {
          const std::int64_t r = (from + w) * 8 + kAwqOutput[i] - first;
          if (r < 0 || r >= rows) continue;
          const unsigned code = half_byte(read.data() + (k * words + w) * 4, i);
          arrays.codes[static_cast<std::size_t>(r * row_bytes + k / 2)] |=
              static_cast<std::uint8_t>(code << (k % 2 * 4));
        }
      }
    }
  }
}

void CodedSource::read_column_scales(Arrays& arrays, std::int64_t first, std::int64_t last) const {
  const std::int64_t rows = last - first, from = first / 8, to = ceil_div(last, 8), words = to - from;
  const std::int64_t groups = format_.row_blocks(rows_, cols_);
  const auto width = static_cast<std::int64_t>(size_of(scale_type(format_.scale)));
  const auto scales = read_columns_of(*scales_, groups, rows_, first, last, width);
  const auto zeros = read_columns_of(*zeros_, groups, rows_ / 8, from, to, 4);
  arrays.scales.resize(scales.size()), arrays.zeros.resize(static_cast<std::size_t>(rows * groups));
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t r = 0; r < rows; ++r)
      std::memcpy(arrays.scales.data() + (r * groups + g) * width, scales.data() + (g * rows + r) * width,
                  static_cast<std::size_t>(width));
    for (std::int64_t w = 0; w < words; ++w) {
      for (int i = 0; i < 8; ++i) {
        const std::int64_t r = (from + w) * 8 + (order_ == Order::kAwq ? kAwqOutput[i] : i) - first;
        if (r < 0 || r >= rows) continue;
        const unsigned zero =
            half_byte(zeros.data() + (g * words + w) * 4, i) + static_cast<unsigned>(zero_bias_);
        arrays.zeros[static_cast<std::size_t>(r * groups + g)] = static_cast<std::uint8_t>(zero);
      }
    }
  }
}

}  // namespace zg::hf
