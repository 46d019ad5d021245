// The tokenizer that a tokenizer.json describes. Text goes through the steps of Hugging Face's `tokenizers`
// in its order: added tokens that are looked for in the raw text, normalizer, added tokens of the normalised
// text, the splits into pieces, and the merges inside each piece.
#include <algorithm>
#include <filesystem>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "data/bpe.hpp"
#include "data/hf_file.hpp"
#include "data/merge_table.hpp"
#include "data/piece_cache.hpp"
#include "data/split.hpp"
#include "data/text_tokenizer.hpp"
#include "data/unicode.hpp"
#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {
namespace {

constexpr const char* kJsonFile = "tokenizer.json";

bool is_ascii_word(char c) {
  return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  std::size_t found = text.find(from);
  if (found == std::string::npos) return;
  std::string out;
  std::size_t done = 0;
  for (; found != std::string::npos; found = text.find(from, done)) {
    out.append(text, done, found - done).append(to);
    done = found + from.size();
  }
  text = out.append(text, done);
}

// "<0x0A>" is the token of a byte; -1: another token.
int byte_of_token(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    if (!((c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'))) return -1;
    value = 16 * value + (c <= '9' ? c - '0' : c - 'A' + 10);
  }
  return value;
}

// The vocabulary and the merges: from a piece to tokens.
class HfModel {
 public:
  HfModel(const HfDescription& d, const std::string& name)
      : bytes_(d.bytes), fallback_(d.byte_fallback), fuse_(d.fuse_unknown), whole_first_(d.ignore_merges) {
    std::unordered_map<std::string, std::int32_t> ids(d.tokens.begin(), d.tokens.end());
    if (!d.unknown.empty()) unknown_ = ids.at(d.unknown);
    table_ = MergeTable(d.merges.size());
    for (std::size_t i = 0; i < d.merges.size(); ++i) {
      const auto& [left, right] = d.merges[i];
      table_.set(ids.at(left), ids.at(right), {static_cast<std::int32_t>(i), ids.at(left + right)});
    }
    std::fill(std::begin(byte_id_), std::end(byte_id_), -1);
    for (const auto& [token, id] : d.tokens) take(token, id);
    for (int b = 0; bytes_ && b < 256; ++b) {
      if (byte_id_[b] < 0)
        throw Error(Errc::kUsage, name,
                    fmt::format("model.vocab: there is no token for the byte 0x{:02X}", b),
                    "all 256 are expected, since any of them may occur in a text");
    }
    fallback_ =
        fallback_ && std::all_of(std::begin(byte_id_), std::end(byte_id_), [](auto id) { return id >= 0; });
  }

  // Requires that the piece is not empty.
  void append(std::string_view piece, std::vector<std::int32_t>& symbols,
              std::vector<std::int32_t>& out) const {
    if (whole_first_) {
      const auto it = whole_.find(std::string(piece));
      if (it != whole_.end()) return out.push_back(it->second);
    }
    symbols.clear();
    if (bytes_) {
      for (const char c : piece) symbols.push_back(byte_id_[static_cast<unsigned char>(c)]);
    } else {
      characters(piece, symbols);
    }
    table_.join(symbols);
    out.insert(out.end(), symbols.begin(), symbols.end());
  }

 private:
  void take(const std::string& token, std::int32_t id) {
    if (bytes_) {
      const auto bytes = bytes_of_written(token);
      if (!bytes) return;  // an added token, which no text gives
      if (bytes->size() == 1) byte_id_[static_cast<unsigned char>((*bytes)[0])] = id;
      if (whole_first_) whole_.emplace(*bytes, id);
      return;
    }
    if (whole_first_) whole_.emplace(token, id);
    if (const int b = byte_of_token(token); fallback_ && b >= 0) byte_id_[b] = id;
    if (token.empty()) return;
    const utf8::Decoded c = utf8::decode(token, 0);
    if (c.length == token.size()) character_id_.emplace(c.code, id);
  }

  // A character that is no token becomes its bytes, or unknown. Unknown ones in a row may be one token; those
  // that come before bytes stand behind them, as Hugging Face's have it.
  void characters(std::string_view piece, std::vector<std::int32_t>& symbols) const {
    int unknown = 0;
    const auto flush = [&] {
      for (; unknown > 0; unknown = 0) symbols.push_back(unknown_);
    };
    for (std::size_t at = 0; at < piece.size();) {
      const utf8::Decoded c = utf8::decode(piece, at);
      const auto it = character_id_.find(c.code);
      if (it != character_id_.end()) {
        flush();
        symbols.push_back(it->second);
      } else if (fallback_) {
        for (const char b : piece.substr(at, c.length))
          symbols.push_back(byte_id_[static_cast<unsigned char>(b)]);
      } else if (unknown_ >= 0) {
        if (!fuse_) flush();
        unknown = 1;
      }
      at += c.length;
    }
    flush();
  }

  bool bytes_, fallback_, fuse_, whole_first_;
  std::int32_t unknown_ = -1;
  std::int32_t byte_id_[256];
  std::unordered_map<char32_t, std::int32_t> character_id_;
  std::unordered_map<std::string, std::int32_t> whole_;
  MergeTable table_;
};

std::string normalized(const std::vector<HfNormalizerStep>& steps, std::string text, bool goes_on) {
  for (const HfNormalizerStep& step : steps) {
    switch (step.kind) {
      case HfNormalizerStep::Kind::kNfc:
        text = unicode::nfc(text);
        break;
      case HfNormalizerStep::Kind::kPrepend:
        if (!goes_on && !text.empty()) text.insert(0, step.to);
        break;
      case HfNormalizerStep::Kind::kReplace:
        replace_all(text, step.from, step.to);
        break;
    }
  }
  return text;
}

class HfTokenizer final : public TextTokenizer {
 public:
  HfTokenizer(std::string json, const std::string& name)
      : json_(std::move(json)), d_(read_hf_tokenizer(json_, name)), model_(d_, name) {
    std::vector<AddedToken> raw, inside;
    for (AddedToken token : d_.added) {
      if (!token.content.empty() && is_ascii_word(token.content.back()))
        word_endings_.push_back(token.content);
      if (token.normalized) token.content = normalized(d_.normalizer, token.content, false);
      (token.normalized ? inside : raw).push_back(std::move(token));
    }
    added_ = AddedTokens(std::move(raw));
    added_inside_ = AddedTokens(std::move(inside));
    drop_idle_splits();
    words_ = !d_.bytes && merges_keep_words();
    cuts_ = may_cut();
    name_tokens();
  }

  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(texts_.size()); }
  std::string identity() const override { return fmt::format("tokenizer.json {:016x}", fnv1a64(json_)); }
  std::vector<std::int32_t> begin_ids() const override { return d_.begin; }
  std::vector<std::int32_t> end_ids() const override { return d_.end; }
  std::int32_t id_of_token(const std::string& name) const override {
    const auto it = ids_.find(name);
    return it == ids_.end() ? -1 : it->second;
  }

  // Cuts before a blank behind an ASCII letter or digit, where the tokenizer's parts let no token or piece go
  // on (may_cut()), and none of the added tokens ends.
  std::size_t safe_prefix(std::string_view text) const override {
    for (std::size_t at = cuts_ ? text.size() : 0; at-- > 1;) {
      if (text[at] != ' ' || !is_ascii_word(text[at - 1])) continue;
      const auto ends = [&](const std::string& token) {
        return at >= token.size() && text.substr(at - token.size(), token.size()) == token;
      };
      if (std::none_of(word_endings_.begin(), word_endings_.end(), ends)) return at;
    }
    return 0;
  }

  void append(std::string_view text, const TextPlace& place, std::vector<std::int32_t>& out) const override {
    check_utf8(text, place);
    const Lease scratch(*this);
    added_.split(
        text,
        [&](std::string_view part) {
          const bool at_begin = part.data() == text.data();
          append_part(part, at_begin && place.goes_on, at_begin && !place.goes_on, *scratch, out);
        },
        [&](std::int32_t id) { out.push_back(id); });
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= vocab_size() || !texts_[static_cast<std::size_t>(id)])
        throw_unknown_id(id, vocab_size());
      text += *texts_[static_cast<std::size_t>(id)];
    }
    if (d_.strip_blank && !text.empty() && text[0] == ' ') text.erase(0, 1);
    return text;
  }

  void save(const std::string& directory) const override {
    save_tokenizer_file(directory, "hf", kJsonFile, json_);
  }

 private:
  struct Scratch {
    PieceCache cache;
    Pieces pieces;
    std::vector<std::int32_t> symbols;
    std::string normal, spaced;
  };
  // Scratch for one call: taken from those that no other call uses.
  class Lease {
   public:
    explicit Lease(const HfTokenizer& of) : of_(of) {
      const std::lock_guard lock(of_.mutex_);
      if (of_.idle_.empty()) {
        scratch_ = std::make_unique<Scratch>();
      } else {
        scratch_ = std::move(of_.idle_.back());
        of_.idle_.pop_back();
      }
    }
    ~Lease() {
      const std::lock_guard lock(of_.mutex_);
      of_.idle_.push_back(std::move(scratch_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Scratch& operator*() const { return *scratch_; }

   private:
    const HfTokenizer& of_;
    std::unique_ptr<Scratch> scratch_;
  };

  // A part of the text without raw added tokens.
  void append_part(std::string_view part, bool goes_on, bool first, Scratch& scratch,
                   std::vector<std::int32_t>& out) const {
    if (!d_.normalizer.empty()) {
      scratch.normal = normalized(d_.normalizer, std::string(part), goes_on);
      part = scratch.normal;
    }
    added_inside_.split(
        part,
        [&](std::string_view inner) {
          const bool at_begin = inner.data() == part.data();
          append_pieces(inner, at_begin && goes_on, at_begin && first, scratch, out);
        },
        [&](std::int32_t id) { out.push_back(id); });
  }

  void append_pieces(std::string_view part, bool goes_on, bool first, Scratch& scratch,
                     std::vector<std::int32_t>& out) const {
    Pieces& pieces = scratch.pieces;
    if (d_.prefix_space && !goes_on && part[0] != ' ') {
      scratch.spaced.assign(1, ' ').append(part);
      part = scratch.spaced;
    }
    pieces.assign(1, part);
    for (const HfSplitStep& step : d_.splits) {
      if (step.kind == HfSplitStep::Kind::kMetaspace) {
        put_marks(step, part, goes_on, first, scratch.spaced);
        pieces.assign(1, scratch.spaced);
        if (step.split) split_pieces(mark_split(step), pieces);
      } else {
        split_pieces(step, pieces);
      }
    }
    const auto compute = [&](std::string_view piece, std::vector<std::int32_t>& ids) {
      model_.append(piece, scratch.symbols, ids);
    };
    for (const std::string_view piece : pieces) {
      if (!words_) {
        scratch.cache.append(piece, out, compute);
        continue;
      }
      for (std::size_t at = 0; at < piece.size();) {
        const std::size_t n = word_at(piece, at);
        scratch.cache.append(piece.substr(at, n), out, compute);
        at += n;
      }
    }
  }

  // Metaspace: blanks become marks, and a mark comes before the text.
  void put_marks(const HfSplitStep& step, std::string_view part, bool goes_on, bool first,
                 std::string& out) const {
    out = part;
    replace_all(out, " ", step.text);
    using Prepend = HfSplitStep::Prepend;
    const bool wanted = step.prepend == Prepend::kAlways || (step.prepend == Prepend::kFirst && first);
    if (wanted && !goes_on && out.compare(0, step.text.size(), step.text) != 0) out.insert(0, step.text);
  }
  static HfSplitStep mark_split(const HfSplitStep& step) {
    return {.kind = HfSplitStep::Kind::kText,
            .behavior = HfSplitStep::Behavior::kMergedWithNext,
            .text = step.text};
  }

  // The length of the word at `at`: up to a mark that follows another character.
  std::size_t word_at(std::string_view piece, std::size_t at) const {
    std::size_t end = at;
    while (piece.substr(end, kMark.size()) == kMark) end += kMark.size();
    end = piece.find(kMark, end);
    return (end == std::string_view::npos ? piece.size() : end) - at;
  }

  // Whether no merge joins a symbol to one on its right that begins with a mark, unless it ends with one
  // itself: words are then independent of each other.
  bool merges_keep_words() const {
    if (d_.ignore_merges) return false;
    const auto begins = [](const std::string& s) { return s.compare(0, kMark.size(), kMark) == 0; };
    const auto ends = [](const std::string& s) {
      return s.size() >= kMark.size() && s.compare(s.size() - kMark.size(), kMark.size(), kMark) == 0;
    };
    const bool known =
        std::any_of(d_.tokens.begin(), d_.tokens.end(), [](const auto& t) { return t.first == kMark; });
    return known && std::none_of(d_.merges.begin(), d_.merges.end(), [&](const auto& merge) {
             return begins(merge.second) && !ends(merge.first);
           });
  }

  // A split at a text that the normalizer leaves nothing of does nothing.
  void drop_idle_splits() {
    for (const HfNormalizerStep& n : d_.normalizer) {
      if (n.kind != HfNormalizerStep::Kind::kReplace || n.to.find(n.from) != std::string::npos) continue;
      const auto idle = [&](const HfSplitStep& s) {
        return s.kind == HfSplitStep::Kind::kText && s.text.find(n.from) != std::string::npos;
      };
      if (n.from.size() == 1)
        d_.splits.erase(std::remove_if(d_.splits.begin(), d_.splits.end(), idle), d_.splits.end());
    }
  }

  // Whether any text may be cut where safe_prefix() does.
  bool may_cut() const {
    const auto joins = [](const std::string& text) {
      for (std::size_t i = 1; i < text.size(); ++i) {
        if (is_ascii_word(text[i - 1]) && (text[i] == ' ' || text.compare(i, kMark.size(), kMark) == 0))
          return true;
      }
      return false;
    };
    bool blanks_marked = false, ends = false;
    for (const HfNormalizerStep& n : d_.normalizer) {
      if (n.kind != HfNormalizerStep::Kind::kReplace) continue;
      if (n.from.size() != 1 || is_ascii_word(n.from[0])) return false;
      blanks_marked = blanks_marked || (n.from == " " && n.to == kMark);
    }
    for (const AddedToken& token : d_.added) {
      if (joins(token.content)) return false;
    }
    for (const HfSplitStep& s : d_.splits) {
      if (s.kind == HfSplitStep::Kind::kMetaspace) {
        blanks_marked = blanks_marked || s.text == kMark;
      } else if (!keeps_blanks_first(s)) {
        return false;
      }
      ends = ends || begins_at_blank(s);
    }
    return d_.bytes ? ends && !blanks_marked : blanks_marked && words_;
  }

  // What each number stands for, and the numbers by name.
  void name_tokens() {
    const auto put = [&](std::int32_t id, std::string text) {
      if (static_cast<std::size_t>(id) >= texts_.size()) texts_.resize(static_cast<std::size_t>(id) + 1);
      texts_[static_cast<std::size_t>(id)] = std::move(text);
    };
    for (const auto& [token, id] : d_.tokens) {
      ids_.emplace(token, id);
      std::string text = token;
      if (d_.bytes) {
        text = bytes_of_written(token).value_or(token);
      } else if (const int b = byte_of_token(token); d_.byte_fallback && b >= 0) {
        text = std::string(1, static_cast<char>(b));
      } else {
        for (const auto& [from, to] : d_.replaced) replace_all(text, from, to);
      }
      put(id, std::move(text));
    }
    for (const AddedToken& token : d_.added) {
      ids_.emplace(token.content, token.id);
      std::string text = token.content;
      for (const auto& [from, to] : d_.replaced) replace_all(text, from, to);
      put(token.id, std::move(text));
    }
  }

  static constexpr std::string_view kMark = "\u2581";

  std::string json_;
  HfDescription d_;
  HfModel model_;
  AddedTokens added_, added_inside_;
  std::vector<std::string> word_endings_;  // added tokens that end with a letter or a digit
  bool words_ = false, cuts_ = false;
  std::vector<std::optional<std::string>> texts_;
  std::unordered_map<std::string, std::int32_t> ids_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace

std::unique_ptr<TextTokenizer> make_hf_tokenizer(const std::string& json_file) {
  return std::make_unique<HfTokenizer>(read_text_file(json_file, "a tokenizer"), json_file);
}

std::unique_ptr<TextTokenizer> make_file_tokenizer(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::string file = path;
  if (fs::is_directory(path, ignored)) {
    file = (fs::path(path) / kJsonFile).string();
    if (!fs::exists(file)) file = (fs::path(path) / "tokenizer.model").string();
    if (!fs::exists(file)) {
      throw Error(Errc::kUsage, path, "holds neither tokenizer.json nor tokenizer.model",
                  "the directory of a Hugging Face model is expected, or one of these files");
    }
  }
  if (fs::path(file).extension() == ".model") return make_sentencepiece_tokenizer(file);
  return make_hf_tokenizer(file);
}

}  // namespace zg
