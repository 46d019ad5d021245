#include <fcntl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <unordered_set>

#include "model/foreign_files.hpp"
#include "model/hf_text.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

static_assert(std::endian::native == std::endian::little, "tensors are read as they lie in the file");

namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxRank = 64;
constexpr std::uint64_t kMaxInt = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

struct Width {
  std::string_view dtype;
  std::uint64_t bytes;
};
constexpr std::array<Width, 16> kWidths = {{{"BOOL", 1},
                                            {"U8", 1},
                                            {"I8", 1},
                                            {"F8_E4M3", 1},
                                            {"F8_E5M2", 1},
                                            {"F8_E8M0", 1},
                                            {"I16", 2},
                                            {"U16", 2},
                                            {"F16", 2},
                                            {"BF16", 2},
                                            {"I32", 4},
                                            {"U32", 4},
                                            {"F32", 4},
                                            {"I64", 8},
                                            {"U64", 8},
                                            {"F64", 8}}};

// Bytes of an element; 0 if this is not a dtype.
std::uint64_t width_of(std::string_view dtype) {
  for (const Width& w : kWidths) {
    if (w.dtype == dtype) return w.bytes;
  }
  return 0;
}

std::string known_dtypes() {
  std::string text;
  for (const Width& w : kWidths) text += (text.empty() ? "" : ", ") + std::string(w.dtype);
  return text;
}

struct RawTensor {
  std::string name, dtype;
  std::vector<std::uint64_t> shape, offsets;
};

// Reads the header as a stream of JSON events, so that memory is bounded by what a header may hold, and a key
// that appears twice is noticed. The first fault stops the parser, and problem() describes it.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  std::vector<RawTensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
  const std::string& problem() const { return problem_; }

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(hf::in_quotes(text)); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::kShape) {
      if (tensor_.shape.size() == kMaxRank) {
        return fail(
            fmt::format("tensor {} has more than {} dimensions", hf::in_quotes(tensor_.name), kMaxRank));
      }
      if (value > kMaxInt)
        return fail(fmt::format("tensor {} has a dimension of {}", hf::in_quotes(tensor_.name), value));
      tensor_.shape.push_back(value);
      return true;
    }
    if (state_ != State::kOffsets) return unexpected(std::to_string(value));
    tensor_.offsets.push_back(value);
    return tensor_.offsets.size() <= 2 || two_offsets();
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      metadata.emplace_back(std::move(key_), std::move(value));
      return true;
    }
    if (state_ != State::kTensor || key_ != "dtype") return unexpected("text " + hf::in_quotes(value));
    if (width_of(value) == 0) {
      return fail(fmt::format("tensor {} has dtype {}; known are {}", hf::in_quotes(tensor_.name),
                              hf::in_quotes(value), known_dtypes()));
    }
    tensor_.dtype = std::move(value);
    return true;
  }

  bool key(string_t& value) override {
    if (state_ == State::kTensor) {
      const bool known = value == "dtype" || value == "shape" || value == "data_offsets";
      if (!known) {
        return fail(fmt::format("tensor {} has the key {}; dtype, shape and data_offsets are expected",
                                hf::in_quotes(tensor_.name), hf::in_quotes(value)));
      }
    }
    auto& seen = state_ == State::kTop ? names_ : keys_;
    if (!seen.insert(value).second)
      return fail(fmt::format("the key {} appears twice", hf::in_quotes(value)));
    key_ = std::move(value);
    return true;
  }

  bool start_object(std::size_t) override {
    keys_.clear();
    if (state_ == State::kStart) {
      state_ = State::kTop;
    } else if (state_ == State::kTop && key_ == "__metadata__") {
      state_ = State::kMetadata;
    } else if (state_ == State::kTop) {
      state_ = State::kTensor;
      tensor_ = {};
      tensor_.name = std::move(key_);
      has_shape_ = false;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTop) {
      state_ = State::kDone;
      return true;
    }
    if (state_ == State::kTensor) {
      if (tensor_.dtype.empty()) return missing("dtype");
      if (!has_shape_) return missing("shape");
      if (tensor_.offsets.empty()) return missing("data_offsets");
      tensors.push_back(std::move(tensor_));
    }
    state_ = State::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (state_ == State::kTensor && key_ == "shape") {
      state_ = State::kShape;
      has_shape_ = true;
    } else if (state_ == State::kTensor && key_ == "data_offsets") {
      state_ = State::kOffsets;
    } else {
      return unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets && tensor_.offsets.size() != 2) return two_offsets();
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    // nlohmann's own message would quote the last token, which may be megabytes of anything.
    return fail(fmt::format("the header is not valid JSON at its byte {}", position));
  }

 private:
  enum class State { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kDone };

  bool fail(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
    return false;
  }
  bool missing(const char* what) {
    return fail(fmt::format("tensor {} has no {}", hf::in_quotes(tensor_.name), what));
  }
  bool two_offsets() {
    return fail(fmt::format("tensor {} has {} data_offsets; begin and end are expected",
                            hf::in_quotes(tensor_.name),
                            tensor_.offsets.size() < 2 ? "fewer than two" : "more than two"));
  }
  bool unexpected(const std::string& found) {
    const auto in_tensor = [&](const char* what) {
      return fail(
          fmt::format("tensor {} has {} where {} is expected", hf::in_quotes(tensor_.name), found, what));
    };
    switch (state_) {
      case State::kMetadata:
        return fail(
            fmt::format("__metadata__ has {} for {}; only text is allowed", found, hf::in_quotes(key_)));
      case State::kShape:
        return in_tensor("a dimension, a whole number >= 0,");
      case State::kOffsets:
        return in_tensor("an offset, a whole number >= 0,");
      case State::kTensor:
        return in_tensor(key_ == "dtype" ? "a dtype, a text," : "an array of numbers");
      case State::kTop:
        return fail(fmt::format("{} is {}; an object is expected", hf::in_quotes(key_), found));
      default:
        return fail(fmt::format("the header is {}; an object is expected", found));
    }
  }

  State state_ = State::kStart;
  std::string key_, problem_;
  RawTensor tensor_;
  bool has_shape_ = false;
  std::unordered_set<std::string> names_, keys_;
};

// The bytes of a tensor according to its dtype and shape; none if they do not fit into 63 bits.
std::optional<std::uint64_t> bytes_by_shape(const RawTensor& t) {
  if (std::find(t.shape.begin(), t.shape.end(), 0u) != t.shape.end()) return 0;
  std::uint64_t bytes = width_of(t.dtype);
  for (const std::uint64_t n : t.shape) {
    if (__builtin_mul_overflow(bytes, n, &bytes) || bytes > kMaxInt) return std::nullopt;
  }
  return bytes;
}

// Sorts the tensors by their place in the file. Returns a description of the first fault in the places;
// empty: no fault.
std::string check_places(std::vector<RawTensor>& tensors) {
  for (const RawTensor& t : tensors) {
    const std::uint64_t begin = t.offsets[0], end = t.offsets[1];
    if (begin > end || end > kMaxInt) {
      return fmt::format("tensor {} has data_offsets [{}, {}]", hf::in_quotes(t.name), begin, end);
    }
    const auto bytes = bytes_by_shape(t);
    if (!bytes) {
      return fmt::format("tensor {} of {} {} is larger than any file", hf::in_quotes(t.name), t.dtype,
                         hf::shape_text(t.shape));
    }
    if (*bytes != end - begin) {
      return fmt::format("tensor {} of {} {} takes {} bytes, its data_offsets [{}, {}] say {}",
                         hf::in_quotes(t.name), t.dtype, hf::shape_text(t.shape), *bytes, begin, end,
                         end - begin);
    }
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const RawTensor& a, const RawTensor& b) { return a.offsets < b.offsets; });
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const RawTensor& t = tensors[i];
    if (t.offsets[0] < end) {
      return fmt::format("tensor {} begins at offset {}, inside {}, which ends at {}", hf::in_quotes(t.name),
                         t.offsets[0], hf::in_quotes(tensors[i - 1].name), end);
    }
    if (t.offsets[0] > end) {
      return fmt::format("{} bytes that belong to no tensor lie before {}, at offset {}", t.offsets[0] - end,
                         hf::in_quotes(t.name), end);
    }
    end = t.offsets[1];
  }
  return {};
}

[[noreturn]] void malformed(const std::string& path, const std::string& problem) {
  throw Error(Errc::kUsage, path, problem,
              "the file is damaged or no safetensors file; fetch or save it again");
}

// Throws the error for a file that is not a safetensors file: names its format if the first bytes identify
// it; else reports `problem`, a fault in the header's length.
[[noreturn]] void no_safetensors(const InputFile& file, const std::string& problem) {
  char head[hf::kForeignHead];
  const std::int64_t n = file.read_some(head, sizeof head, 0);
  hf::refuse_foreign({head, static_cast<std::size_t>(n)}, file.path());
  malformed(file.path(), problem);
}

// Checks the header's length and brackets, and returns its text. `end`: where it ends in the file.
std::string header_text(const InputFile& file, std::uint64_t& end) {
  const std::string& path = file.path();
  const auto file_bytes = static_cast<std::uint64_t>(file.bytes());
  std::uint64_t length = 0;
  if (file_bytes < sizeof length) {
    no_safetensors(file,
                   fmt::format("truncated: {} bytes, a header begins with 8 bytes of length", file_bytes));
  }
  file.read(&length, sizeof length, 0);
  if (length > kMaxHeader) {
    no_safetensors(file, fmt::format("the header's length is given as {} bytes; at most {} are allowed",
                                     length, kMaxHeader));
  }
  if (length > file_bytes - sizeof length) {
    no_safetensors(file, fmt::format("truncated: the header should end at byte {}, the file at {}",
                                     length + sizeof length, file_bytes));
  }
  std::string text(length, '\0');
  file.read(text.data(), static_cast<std::int64_t>(length), sizeof length);
  if (text.empty() || text.front() != '{') no_safetensors(file, "the header does not begin with '{'");
  end = sizeof length + length;
  text.resize(text.find_last_not_of(' ') + 1);
  if (text.back() != '}') malformed(path, "the header does not end with '}' and spaces");
  // nlohmann's parser takes a zero byte for the end of its input, and would ignore what follows.
  if (text.find('\0') != text.npos) malformed(path, "the header has a zero byte in it");
  return text;
}

}  // namespace

std::int64_t SafeTensors::Entry::count() const {
  std::int64_t n = 1;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  for (const std::int64_t d : shape) n *= d;
  return n;
}

SafeTensors::SafeTensors(const std::string& path, const std::string& what) : file_(path, what) {
  // Tensors are read from front to back, mostly once. It does not matter if the hint is refused.
  (void)::posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_SEQUENTIAL);
  parse();
}

void SafeTensors::parse() {
  const auto file_bytes = static_cast<std::uint64_t>(file_.bytes());
  const std::string& path = file_.path();
  std::uint64_t data_begin = 0;
  const std::string text = header_text(file_, data_begin);
  HeaderReader header;
  if (!json::sax_parse(text.begin(), text.end(), &header)) malformed(path, header.problem());
  if (const std::string problem = check_places(header.tensors); !problem.empty()) malformed(path, problem);

  const std::uint64_t data_bytes = header.tensors.empty() ? 0 : header.tensors.back().offsets[1];
  if (data_bytes > file_bytes - data_begin) {
    malformed(path,
              fmt::format("truncated: the tensors take {} bytes, {} are there (the file should have {} bytes "
                          "and has {})",
                          data_bytes, file_bytes - data_begin, data_begin + data_bytes, file_bytes));
  }
  if (data_bytes < file_bytes - data_begin) {
    malformed(path, fmt::format(
                        "{} bytes that belong to no tensor lie at the end (the file should have {} bytes and "
                        "has {})",
                        file_bytes - data_begin - data_bytes, data_begin + data_bytes, file_bytes));
  }

  metadata_ = std::move(header.metadata);
  entries_.reserve(header.tensors.size());
  for (RawTensor& t : header.tensors) {
    by_name_.emplace(t.name, entries_.size());
    entries_.push_back({.name = std::move(t.name),
                        .dtype = std::move(t.dtype),
                        .shape = {t.shape.begin(), t.shape.end()},
                        .offset = static_cast<std::int64_t>(data_begin + t.offsets[0]),
                        .bytes = static_cast<std::int64_t>(t.offsets[1] - t.offsets[0])});
  }
}

const SafeTensors::Entry* SafeTensors::find(const std::string& name) const& {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

void SafeTensors::read(const Entry& entry, std::int64_t begin, std::int64_t bytes, void* out) const {
  ZG_ASSERT(begin >= 0 && bytes >= 0 && bytes <= entry.bytes - begin, "outside of {} in {}", entry.name,
            path());
  try {
    file_.read(out, bytes, entry.offset + begin);
  } catch (const Error& e) {
    throw Error(e.code(), e.where(), fmt::format("{} (in {})", e.message(), hf::in_quotes(entry.name)),
                e.hint());
  }
}

}  // namespace zg
