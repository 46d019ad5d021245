#include "data/bpe.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <queue>

#include "data/shown.hpp"
#include "data/unicode.hpp"
#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/json.hpp"

namespace zg {
namespace {

enum class CharClass : std::uint8_t { kOther, kLetter, kNumber, kSpace };

CharClass search_class(char32_t code) {
  const unicode::CategorySet category = unicode::category_bit(code);
  if ((category & unicode::kLetter) != 0) return CharClass::kLetter;
  if ((category & unicode::kNumber) != 0) return CharClass::kNumber;
  return unicode::is_space(code) ? CharClass::kSpace : CharClass::kOther;
}

CharClass class_of(char32_t code) {
  static const std::array<CharClass, 128> ascii = [] {
    std::array<CharClass, 128> classes{};
    for (char32_t c = 0; c < 128; ++c) classes[c] = search_class(c);
    return classes;
  }();
  return code < 128 ? ascii[code] : search_class(code);
}

// A position in a text, with the character there.
struct Cursor {
  std::string_view text;
  std::size_t at = 0;
  std::size_t length = 0;  // bytes of the character; 0 at the end and at invalid UTF-8
  CharClass kind = CharClass::kOther;

  Cursor(std::string_view t, std::size_t a) : text(t), at(a) { look(); }
  bool at_end() const { return at >= text.size(); }
  void step() {
    at += length;
    look();
  }
  void look() {
    if (at_end()) {
      length = 0;
      return;
    }
    const utf8::Decoded c = utf8::decode(text, at);
    length = c.length;
    kind = class_of(c.code);
  }
};

std::size_t contraction_at(std::string_view rest) {
  for (const std::string_view form : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (rest.substr(0, form.size()) == form) return form.size();
  }
  return 0;
}

// The characters by which GPT-2's files write the 256 bytes: printable Latin-1 bytes as themselves, the
// others in order as the characters from U+0100 on.
std::array<char32_t, 256> byte_characters() {
  std::array<char32_t, 256> table{};
  char32_t next = 0x100;
  for (char32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    table[b] = printable ? b : next++;
  }
  return table;
}

// The inverse: the byte of each character; -1: none.
std::vector<int> byte_by_character() {
  std::vector<int> bytes(0x200, -1);
  const auto table = byte_characters();
  for (int b = 0; b < 256; ++b) bytes[table[static_cast<std::size_t>(b)]] = b;
  return bytes;
}

std::string bytes_of_text(const std::string& token, const std::string& name) {
  if (const auto bytes = bytes_of_written(token)) return *bytes;
  std::size_t at = 0;
  for (std::size_t n; bytes_of_written(token.substr(at, n = utf8::decode(token, at).length));) at += n;
  throw Error(Errc::kUsage, name,
              fmt::format("token \"{}\" has the character U+{:04X}, which stands for no byte", shown(token),
                          static_cast<std::uint32_t>(utf8::decode(token, at).code)),
              "GPT-2's byte-level vocabulary is expected; for another kind name its tokenizer.json: "
              "\"tokenizer\": {\"file\": \"tokenizer.json\"}");
}

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return (std::uint64_t{static_cast<std::uint32_t>(left)} << 32) | static_cast<std::uint32_t>(right);
}

}  // namespace

std::optional<std::string> bytes_of_written(std::string_view token) {
  static const std::vector<int> byte_by_char = byte_by_character();
  std::string bytes;
  for (std::size_t at = 0; at < token.size();) {
    const utf8::Decoded c = utf8::decode(token, at);  // the JSON parser lets nothing but UTF-8 through
    if (c.code >= byte_by_char.size() || byte_by_char[c.code] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(static_cast<unsigned char>(byte_by_char[c.code])));
    at += c.length;
  }
  return bytes;
}

std::size_t gpt2_piece(std::string_view text, std::size_t& at) {
  const std::size_t begin = at;
  if (const std::size_t n = contraction_at(text.substr(begin)); n > 0) return n;

  // " ?" and a run of characters of one class. The run may end at invalid bytes: the piece then ends before
  // them, and the next call begins at them.
  Cursor cursor(text, begin);
  if (text[begin] == ' ') cursor.step();
  if (cursor.length == 0 && !cursor.at_end()) {
    at = cursor.at;
    return 0;
  }
  if (!cursor.at_end() && cursor.kind != CharClass::kSpace) {
    const CharClass run = cursor.kind;
    while (cursor.length > 0 && cursor.kind == run) cursor.step();
    return cursor.at - begin;
  }

  // A run of white space. Its last character belongs to the next piece (as the " ?" of a word, if it is a
  // blank), unless it is the only one or nothing follows.
  cursor = Cursor(text, begin);
  std::size_t last = begin;
  while (cursor.length > 0 && cursor.kind == CharClass::kSpace) {
    last = cursor.at;
    cursor.step();
  }
  if (cursor.at_end() || last == begin) return cursor.at - begin;
  return last - begin;
}

BpeModel::BpeModel(std::string_view encoder_json, std::string_view vocab_bpe, const std::string& encoder_name,
                   const std::string& bpe_name) {
  const Ids ids = read_vocabulary(encoder_json, encoder_name);
  read_merges(vocab_bpe, bpe_name, ids, encoder_name);
}

BpeModel::Ids BpeModel::read_vocabulary(std::string_view json, const std::string& name) {
  const auto root =
      parse_json(json, name, "the encoder.json of GPT-2 is expected", {.depth = 8, .values = 4'000'000});
  if (!root.is_object() || root.empty()) {
    throw Error(Errc::kUsage, name,
                "an object of tokens and their numbers is expected, not " +
                    std::string(root.is_object() ? "an empty one" : root.type_name()));
  }
  const auto count = static_cast<std::int64_t>(root.size());
  bytes_.resize(root.size());
  std::vector<bool> taken(root.size());
  Ids ids;
  ids.reserve(root.size());
  for (const auto& [token, value] : root.items()) {
    if (!value.is_number_integer() || value < 0 || value >= count) {
      throw Error(Errc::kUsage, name,
                  fmt::format("token \"{}\" has the number {}; one of 0 to {} is expected", shown(token),
                              shown(value.dump(-1, ' ', true)), count - 1));
    }
    const auto id = value.get<std::int32_t>();
    if (taken[static_cast<std::size_t>(id)]) {
      throw Error(Errc::kUsage, name,
                  fmt::format("number {} is given to two tokens, \"{}\" being one", id, shown(token)));
    }
    taken[static_cast<std::size_t>(id)] = true;
    bytes_[static_cast<std::size_t>(id)] = bytes_of_text(token, name);
    ids.emplace(token, id);
  }
  const auto characters = byte_characters();
  for (std::size_t b = 0; b < 256; ++b) {
    std::string character;
    utf8::append(characters[b], character);
    const auto it = ids.find(character);
    if (it == ids.end()) {
      throw Error(Errc::kUsage, name,
                  fmt::format("there is no token for the byte 0x{:02X} (\"{}\")", b, character));
    }
    byte_id_[b] = it->second;
  }
  return ids;
}

void BpeModel::read_merges(std::string_view text, const std::string& name, const Ids& ids,
                           const std::string& encoder_name) {
  merges_.reserve(ids.size());
  std::int32_t rank = 0;
  std::int64_t line_number = 0;
  const auto fail = [&](const std::string& what) {
    throw Error(Errc::kUsage, fmt::format("{}:{}", name, line_number), what);
  };
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty() || (line_number == 1 && line.substr(0, 8) == "#version")) continue;
    const std::size_t blank = line.find(' ');
    if (blank == std::string_view::npos || blank == 0 || blank + 1 == line.size() ||
        line.find(' ', blank + 1) != std::string_view::npos) {
      fail(fmt::format("two tokens with one blank between them are expected, found \"{}\"", shown(line)));
    }
    const auto id_of = [&](const std::string& token) {
      const auto it = ids.find(token);
      if (it == ids.end()) fail(fmt::format("token \"{}\" is not in {}", shown(token), encoder_name));
      return it->second;
    };
    const std::string left(line.substr(0, blank)), right(line.substr(blank + 1));
    const Merge merge{.rank = rank++, .product = id_of(left + right)};
    if (!merges_.emplace(pair_key(id_of(left), id_of(right)), merge).second) {
      fail(fmt::format("the merge \"{}\" stands in the file twice", shown(line)));
    }
  }
}

std::int32_t BpeModel::id_of_bytes(std::string_view bytes) const {
  const auto it = std::find(bytes_.begin(), bytes_.end(), bytes);
  return it == bytes_.end() ? -1 : static_cast<std::int32_t>(it - bytes_.begin());
}

const BpeModel::Merge* BpeModel::find(std::int32_t left, std::int32_t right) const {
  const auto it = merges_.find(pair_key(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

// A token of the piece, in a linked list. Merging takes the right token out of the list.
struct BpeModel::Part {
  std::int32_t id;
  std::int32_t previous, next;  // -1: none
};

// Two neighbours that could be merged. A candidate is stale when either token has changed since: their ids
// are then no longer those of the candidate.
struct BpeModel::Candidate {
  std::int32_t rank, left, left_id, right_id, product;
  bool operator<(const Candidate& other) const {  // the top of the queue: lowest rank, then leftmost
    return rank != other.rank ? rank > other.rank : left > other.left;
  }
};

// GPT-2's reference finds the merge of lowest rank that occurs in the piece, applies it from left to right
// throughout the piece, and starts again. A priority queue does the same without scanning the piece anew.
class BpeModel::Merging {
 public:
  Merging(const BpeModel& model, std::string_view piece) : model_(model) {
    ZG_ASSERT_LT(piece.size(), std::size_t{1} << 31);
    const auto n = static_cast<std::int32_t>(piece.size());
    parts_.reserve(piece.size());
    for (std::int32_t i = 0; i < n; ++i) {
      const auto byte = static_cast<unsigned char>(piece[static_cast<std::size_t>(i)]);
      parts_.push_back({model.byte_id_[byte], i - 1, i + 1 < n ? i + 1 : -1});
    }
    for (std::int32_t i = 0; i + 1 < n; ++i) propose(i);
  }

  void run(std::vector<std::int32_t>& out) {
    std::vector<Candidate> same_rank;
    while (!queue_.empty()) {
      // All candidates of this rank come before new ones that these merges create, even of lower rank.
      const std::int32_t rank = queue_.top().rank;
      same_rank.clear();
      while (!queue_.empty() && queue_.top().rank == rank) {
        same_rank.push_back(queue_.top());
        queue_.pop();
      }
      for (const Candidate& c : same_rank) apply(c);
    }
    for (std::int32_t i = parts_.empty() ? -1 : 0; i >= 0; i = parts_[index(i)].next)
      out.push_back(parts_[index(i)].id);
  }

 private:
  static std::size_t index(std::int32_t i) { return static_cast<std::size_t>(i); }

  void propose(std::int32_t left) {
    const Part& part = parts_[index(left)];
    if (part.next < 0) return;
    const std::int32_t right_id = parts_[index(part.next)].id;
    if (const Merge* merge = model_.find(part.id, right_id)) {
      queue_.push({merge->rank, left, part.id, right_id, merge->product});
    }
  }

  void apply(const Candidate& c) {
    Part& left = parts_[index(c.left)];
    if (left.id != c.left_id || left.next < 0 || parts_[index(left.next)].id != c.right_id) return;
    Part& right = parts_[index(left.next)];
    left.id = c.product;
    left.next = right.next;
    right.id = -1;  // no candidate has this id, so all that begin with the right token are stale
    if (left.next >= 0) parts_[index(left.next)].previous = c.left;
    propose(c.left);
    if (left.previous >= 0) propose(left.previous);
  }

  const BpeModel& model_;
  std::vector<Part> parts_;
  std::priority_queue<Candidate> queue_;
};

void BpeModel::append_piece(std::string_view piece, std::vector<std::int32_t>& out) const {
  if (piece.size() == 1) {
    out.push_back(byte_id_[static_cast<unsigned char>(piece[0])]);
    return;
  }
  Merging(*this, piece).run(out);
}

}  // namespace zg
