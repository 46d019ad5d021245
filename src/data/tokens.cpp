#include "data/tokens.hpp"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "data/file_kind.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

constexpr std::int64_t kSample = 4096, kFewest = 32;  // words that are looked at in each place, and at all

// Numbers of a token file from its begin, its middle and its end, as whole groups of four.
std::vector<std::int32_t> sample_of(const TokenFile& file) {
  std::vector<std::int32_t> words;
  const std::int64_t groups = file.size() / 4, some = std::min(groups, kSample / 4);
  for (const std::int64_t first : {std::int64_t{0}, (groups - some) / 2, groups - some}) {
    words.resize(words.size() + static_cast<std::size_t>(4 * some));
    file.read(4 * first, 4 * some, words.data() + words.size() - 4 * some);
  }
  return words;
}

// Bits that the ids seem to have, while they are read as the file's type; 0: nothing is to be seen. Their
// high halves are 0, or next to 0 beside low halves that are large: no tokens alternate like that.
int real_bits(const TokenFile& file) {
  const std::vector<std::int32_t> words = sample_of(file);
  if (static_cast<std::int64_t>(words.size()) < kFewest) return 0;
  const auto is_high = [](std::int32_t word) { return word >= 0 && word < 16; };
  std::size_t quads = 0, full = 0, pairs = 0, filled = 0, large = 0;
  bool zeros = true;
  for (std::size_t i = 0; i < words.size(); i += 4) {
    quads += is_high(words[i + 1]) && words[i + 2] == 0 && words[i + 3] == 0;
    full += words[i] != 0;
    for (const std::size_t at : {i, i + 2}) {
      pairs += is_high(words[at + 1]), zeros = zeros && words[at + 1] == 0;
      filled += words[at] != 0, large += static_cast<std::uint32_t>(words[at]) > 255;
    }
  }
  const std::size_t groups = words.size() / 4;
  const bool narrow = file.dtype() == DType::kU16;
  if (narrow && quads == groups && 2 * full > groups) return 64;
  const bool wider = pairs == 2 * groups && ((zeros && filled > groups) || (narrow && large > groups));
  return !wider ? 0 : narrow ? 32 : 64;
}

}  // namespace

Tokens open_raw_tokens(const std::string& path, std::optional<DType> dtype) {
  const TokenDescription description = describe_tokens(path, dtype.value_or(DType::kU16));
  Tokens tokens{.file = nullptr, .mask = description.mask};
  if (description.tokens < 0) check_raw_tokens(open_data(path, "a token file"));
  tokens.file = std::make_shared<const TokenFile>(path, description.dtype);
  if (description.tokens >= 0 || tokens.file->has_header()) return tokens;
  const int bits = real_bits(*tokens.file), read_as = tokens.file->dtype() == DType::kU16 ? 16 : 32;
  if (bits == 0) return tokens;
  if (bits == 32 && !dtype) {
    tokens.file = std::make_shared<const TokenFile>(path, DType::kI32);
    return tokens;
  }
  const std::string narrow = std::filesystem::path(path).replace_extension(".uint32.bin").string();
  throw Error(
      Errc::kUsage, path,
      fmt::format("its numbers have {} bits, and are read as {}: {} of them are the high parts of others",
                  bits, read_as, bits == 2 * read_as ? "every second" : "three of four"),
      bits == 32 ? std::string("set data.token_dtype to \"uint32\"")
                 : fmt::format("python3 -c \"import numpy; numpy.fromfile('{}', 'int64').astype('uint32')"
                               ".tofile('{}')\" writes 32 bits each, for data.token_dtype \"uint32\"",
                               path, narrow));
}

void check_token_ids(const Tokens& tokens, std::int64_t first, std::span<const std::int32_t> ids,
                     std::int64_t limit, const char* whose) {
  const auto bad = std::find_if(ids.begin(), ids.end(),
                                [&](std::int32_t id) { return id < 0 || (limit > 0 && id >= limit); });
  if (bad == ids.end()) return;
  throw_bad_token(tokens.file->path(), first + (bad - ids.begin()), *bad,
                  fmt::format("the {} vocabulary of {}", whose, limit),
                  "give the tokens that this model has");
}

void throw_bad_token(const std::string& path, std::int64_t position, std::int32_t id,
                     const std::string& vocabulary, const std::string& hint) {
  // Megatron's are signed, where -1 and -100 mark padding.
  const std::string as_signed = id < 0 ? fmt::format(" ({} as a signed number)", id) : "";
  throw Error(Errc::kUsage, path,
              fmt::format("token {} at position {}{} is beyond {}", static_cast<std::uint32_t>(id), position,
                          as_signed, vocabulary),
              hint);
}

}  // namespace zg
