#include "data/sentencepiece_check.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "data/shown.hpp"

namespace zg {
namespace {

// What no trained model comes near. The longest replacement of NFKC has 33 bytes.
constexpr std::int64_t kMostPieces = 4'000'000;
constexpr std::size_t kLongestPiece = 1024, kLongestReplacement = 64;

const char* const kCut = "is cut off, or is no such file";

// The fields of a message of Protocol Buffers, one after the other.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  struct Field {
    std::uint64_t number = 0;
    int type = 0;            // 0: a number, 2: bytes, 1 and 5: eight bytes and four
    std::string_view bytes;  // but of a number
  };
  // The next; none at the end, and where the message is damaged, which `damaged` then says.
  std::optional<Field> next() {
    if (rest_.empty() || damaged) return std::nullopt;
    const std::optional<std::uint64_t> key = number();
    if (!key) return fail();
    Field field{.number = *key >> 3, .type = static_cast<int>(*key & 7), .bytes = {}};
    std::optional<std::uint64_t> size;
    if (field.type == 0) {
      if (!number()) return fail();
      return field;
    }
    if (field.type == 2) size = number();
    if (field.type == 1) size = 8;
    if (field.type == 5) size = 4;
    if (!size || *size > rest_.size()) return fail();
    field.bytes = rest_.substr(0, static_cast<std::size_t>(*size));
    rest_.remove_prefix(static_cast<std::size_t>(*size));
    return field;
  }
  bool damaged = false;

 private:
  std::optional<Field> fail() {
    damaged = true;
    return std::nullopt;
  }
  std::optional<std::uint64_t> number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_[0]);
      rest_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }
  std::string_view rest_;
};

std::uint32_t word_at(std::string_view bytes, std::size_t index) {
  std::uint32_t word;
  std::memcpy(&word, bytes.data() + 4 * index, 4);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
  return word;
}

// A trie of Darts-clone, whose leaves say where in `texts` a replacement begins, which ends with a zero.
std::string trie_problem(std::string_view trie, std::string_view texts) {
  const std::size_t n = trie.size() / 4;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t unit = word_at(trie, i);
    if (unit >> 31) continue;  // a leaf, which has a value in place of an offset
    const std::size_t offset = static_cast<std::size_t>(unit >> 10) << ((unit & (1u << 9)) >> 6);
    const std::size_t children = i ^ offset;
    if ((children | 0xFF) >= n) return "has a table of replacements that points behind its own end";
    const bool has_leaf = ((unit >> 8) & 1) != 0;
    if (has_leaf && (word_at(trie, children) & 0x7FFFFFFF) >= texts.size())
      return "has a table of replacements that points behind its texts";
  }
  return {};
}

std::string replacements_problem(std::string_view table) {
  if (table.empty()) return {};
  if (table.size() < 4) return "has a table of replacements that is cut off";
  const std::size_t size = word_at(table, 0);
  table.remove_prefix(4);
  if (size >= table.size() || size % 1024 != 0 || size == 0)
    return "has a table of replacements whose size is no size";
  const std::string_view texts = table.substr(size);
  if (texts.back() != '\0') return "has a table of replacements without an end";
  for (std::size_t at = 0; at < texts.size();) {
    const std::size_t end = texts.find('\0', at);
    if (end - at > kLongestReplacement)
      return fmt::format("has a replacement of {} bytes; {} are known here at most", end - at,
                         kLongestReplacement);
    at = end + 1;
  }
  return trie_problem(table.substr(0, size), texts);
}

std::string normalizer_problem(std::string_view message) {
  Fields fields(message);
  while (const auto field = fields.next()) {
    if (field->number != 2) continue;
    if (std::string problem = replacements_problem(field->bytes); !problem.empty()) return problem;
  }
  return fields.damaged ? kCut : "";
}

std::string piece_problem(std::string_view message, std::int64_t index) {
  const auto problem = [&](const std::string& what) { return fmt::format("its piece {} {}", index, what); };
  Fields fields(message);
  while (const auto field = fields.next()) {
    if (field->number == 1 && field->bytes.size() > kLongestPiece)
      return problem(
          fmt::format("has {} bytes; {} are known here at most", field->bytes.size(), kLongestPiece));
    if (field->number == 1 && field->bytes.find('\0') != std::string_view::npos)
      return problem("has a zero byte");
    if (field->number == 2 && field->type == 5 &&
        !std::isfinite(std::bit_cast<float>(word_at(field->bytes, 0))))
      return problem("has a score that is no number");
  }
  return fields.damaged ? kCut : "";
}

}  // namespace

std::string sentencepiece_problem(std::string_view model) {
  Fields fields(model);
  std::int64_t pieces = 0;
  while (const auto field = fields.next()) {
    std::string problem;
    if (field->number == 1) problem = piece_problem(field->bytes, pieces++);
    if (field->number == 3 || field->number == 5) problem = normalizer_problem(field->bytes);
    if (pieces > kMostPieces) problem = fmt::format("has more than {} pieces", kMostPieces);
    if (!problem.empty()) return problem;
  }
  if (fields.damaged) return kCut;
  return pieces == 0 ? "has no pieces" : "";
}

}  // namespace zg
