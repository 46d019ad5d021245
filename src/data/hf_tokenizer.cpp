// The tokenizer that a tokenizer.json describes. It applies the steps of Hugging Face's `tokenizers` in the
// same order: added tokens in the raw text, normalizer, added tokens in the normalised text, the splits into
// pieces, and the merges inside each piece.
#include <algorithm>
#include <filesystem>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "data/bpe.hpp"
#include "data/hf_file.hpp"
#include "data/merge_table.hpp"
#include "data/piece_cache.hpp"
#include "data/split.hpp"
#include "data/text_tokenizer.hpp"
#include "data/unicode.hpp"
#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/model_files.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg {
namespace {

constexpr const char* kJsonFile = "tokenizer.json";

bool is_ascii_word(char c) {
  return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
}

// Limits the total length that replacements may give to texts: seven replacements of an "a" by twenty of them
// would fill any memory. Unicode's normal forms make a text at most 11 times as long.
class Growth {
 public:
  Growth(const std::string& file, const char* part, std::size_t bytes)
      : file_(file), part_(part), most_(kBytes + kTimes * bytes) {}
  // Checks the limit for texts of `bytes` in all, in addition to the texts that were kept.
  void check(std::size_t bytes) const {
    if (bytes <= most_ - kept_) return;
    throw Error(Errc::kUsage, file_, fmt::format("{}: makes texts more than {} times as long", part_, kTimes),
                "no released model's does; take the model's own tokenizer.json");
  }
  void keep(std::size_t bytes) {
    check(bytes);
    kept_ += bytes;
  }

 private:
  static constexpr std::size_t kBytes = 4096, kTimes = 32;
  const std::string& file_;
  const char* part_;
  std::size_t most_, kept_ = 0;
};

void replace_all(std::string& text, const std::string& from, const std::string& to, const Growth& growth) {
  std::size_t found = text.find(from);
  if (found == std::string::npos) return;
  std::string out;
  std::size_t done = 0;
  for (; found != std::string::npos; found = text.find(from, done)) {
    out.append(text, done, found - done).append(to);
    growth.check(out.size());
    done = found + from.size();
  }
  text = out.append(text, done);
}

// The byte that a token like "<0x0A>" stands for; -1 for other tokens.
int byte_of_token(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    if (!((c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'))) return -1;
    value = 16 * value + (c <= '9' ? c - '0' : c - 'A' + 10);
  }
  return value;
}

// The vocabulary and the merges, which turn a piece into tokens.
class HfModel {
 public:
  HfModel(const HfDescription& d, const std::string& name)
      : bytes_(d.bytes), fallback_(d.byte_fallback), fuse_(d.fuse_unknown), whole_first_(d.ignore_merges) {
    unknown_ = d.unknown;
    table_ = MergeTable(d.merges.size());
    for (std::size_t i = 0; i < d.merges.size(); ++i) {
      const HfMerge& merge = d.merges[i];
      table_.set(merge.left, merge.right, {static_cast<std::int32_t>(i), merge.product});
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
      if (!bytes) return;  // an added token, which no merge produces
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

  // A character that is no token becomes byte tokens, or the unknown token. Adjacent unknown characters may
  // be fused into one token. As in Hugging Face's library, unknown tokens that precede byte tokens come after
  // them.
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

std::string normalized(const std::vector<HfNormalizerStep>& steps, std::string text, bool goes_on,
                       Growth& growth) {
  for (const HfNormalizerStep& step : steps) {
    switch (step.kind) {
      case HfNormalizerStep::Kind::kForm:
        text = unicode::normal_form(text, step.form);
        break;
      case HfNormalizerStep::Kind::kLowercase:
        text = unicode::lowercase(text);
        break;
      case HfNormalizerStep::Kind::kPrepend:
        if (!goes_on && !text.empty()) text.insert(0, step.to);
        break;
      case HfNormalizerStep::Kind::kReplace:
        replace_all(text, step.from, step.to, growth);
        break;
    }
    growth.check(text.size());
  }
  growth.keep(text.size());
  return text;
}

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};

// Tokens that end with an ASCII letter or digit, to be found at the end of a text.
class WordEndings {
 public:
  void add(const std::string& token) {
    if (!tokens_.insert(token).second) return;
    const auto at = std::lower_bound(lengths_.begin(), lengths_.end(), token.size());
    if (at == lengths_.end() || *at != token.size()) lengths_.insert(at, token.size());
  }
  bool end(std::string_view text) const {
    return std::any_of(lengths_.begin(), lengths_.end(), [&](std::size_t n) {
      return n <= text.size() && tokens_.find(text.substr(text.size() - n)) != tokens_.end();
    });
  }

 private:
  std::unordered_set<std::string, TextHash, std::equal_to<>> tokens_;
  std::vector<std::size_t> lengths_;  // of the tokens, each once
};

class HfTokenizer final : public TextTokenizer {
 public:
  HfTokenizer(std::string json, const std::string& name)
      : name_(name), json_(std::move(json)), d_(read_hf_tokenizer(json_, name)), model_(d_, name) {
    std::vector<AddedToken> raw, inside;
    std::size_t bytes = 0;
    for (const AddedToken& token : d_.added) bytes += token.content.size();
    Growth growth(name_, "normalizer", bytes);
    for (AddedToken token : d_.added) {
      if (!token.content.empty() && is_ascii_word(token.content.back())) word_endings_.add(token.content);
      if (token.normalized) token.content = normalized(d_.normalizer, token.content, false, growth);
      (token.normalized ? inside : raw).push_back(std::move(token));
    }
    added_ = AddedTokens(std::move(raw));
    added_inside_ = AddedTokens(std::move(inside));
    drop_idle_splits();
    words_ = !d_.bytes && merges_keep_words();
    cuts_ = may_cut();
    name_tokens();
    d_.tokens = {}, d_.merges = {};  // not needed: the model and the texts have their contents
  }

  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(text_at_.size()); }
  std::string identity() const override { return fmt::format("tokenizer.json {:016x}", fnv1a64(json_)); }
  std::vector<std::int32_t> begin_ids() const override { return d_.begin; }
  std::vector<std::int32_t> end_ids() const override { return d_.end; }
  std::int32_t id_of_token(const std::string& name) const override {
    const auto it = ids_.find(name);
    return it == ids_.end() ? -1 : it->second;
  }

  // Cuts before a blank that follows an ASCII letter or digit, if no token or piece can continue across it
  // (may_cut()) and no added token ends there.
  std::size_t safe_prefix(std::string_view text) const override {
    for (std::size_t at = cuts_ ? text.size() : 0; at-- > 1;) {
      if (text[at] != ' ' || !is_ascii_word(text[at - 1])) continue;
      if (!word_endings_.end(text.substr(0, at))) return at;
    }
    return 0;
  }

  void append(std::string_view text, const TextPlace& place, std::vector<std::int32_t>& out) const override {
    check_utf8(text, place);
    const Lease lease(*this);
    Scratch& scratch = *lease;
    scratch.effort = Pattern::Effort(text.size());
    Growth growth(name_, "normalizer", text.size());
    added_.split(
        text,
        [&](std::string_view part) {
          const bool at_begin = part.data() == text.data();
          if (d_.normalizer.empty()) {
            append_part(part, at_begin && place.goes_on, at_begin && !place.goes_on, scratch, out);
          } else {
            const bool goes_on = at_begin && place.goes_on;
            scratch.normal = normalized(d_.normalizer, std::string(part), goes_on, growth);
            append_part(scratch.normal, goes_on, at_begin && !place.goes_on, scratch, out);
          }
        },
        [&](std::int32_t id) { out.push_back(id); });
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t& id : ids) {
      const std::int32_t at = id < 0 || id >= vocab_size() ? -1 : text_at_[static_cast<std::size_t>(id)];
      if (at < 0) throw_unknown_id(id, vocab_size());
      if (d_.blanks_between && &id != ids.data()) text += ' ';
      text += texts_[static_cast<std::size_t>(at)];
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
    Pattern::Effort effort{0};
  };
  // Scratch memory for one call, taken from a pool.
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

  // Normalises and tokenises a part of the text that has no added tokens of the raw text.
  void append_part(std::string_view part, bool goes_on, bool first, Scratch& scratch,
                   std::vector<std::int32_t>& out) const {
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
        if (step.split) split_pieces(mark_split(step), pieces, scratch.effort);
      } else {
        split_pieces(step, pieces, scratch.effort);
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
    out.clear();
    for (const char c : part) c == ' ' ? out += step.text : out += c;
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

  // Whether no merge joins a symbol to a right neighbour that begins with a mark, unless the symbol itself
  // ends with one. Then words are independent of each other.
  bool merges_keep_words() const {
    if (d_.ignore_merges) return false;
    const auto begins = [](const std::string& s) { return s.compare(0, kMark.size(), kMark) == 0; };
    const auto ends = [](const std::string& s) {
      return s.size() >= kMark.size() && s.compare(s.size() - kMark.size(), kMark.size(), kMark) == 0;
    };
    std::vector<bool> begin(static_cast<std::size_t>(d_.ids)), end(begin);
    bool known = false;
    for (const auto& [token, id] : d_.tokens) {
      begin[static_cast<std::size_t>(id)] = begins(token), end[static_cast<std::size_t>(id)] = ends(token);
      known = known || token == kMark;
    }
    return known && std::none_of(d_.merges.begin(), d_.merges.end(), [&](const HfMerge& merge) {
             return begin[static_cast<std::size_t>(merge.right)] &&
                    !end[static_cast<std::size_t>(merge.left)];
           });
  }

  // Drops splits at a text that the normalizer always removes, since they have no effect.
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
    bool blanks_marked = false, blanks_gone = false, ends = false;
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
      blanks_gone = blanks_gone || removes_blanks(s);
    }
    if (blanks_marked) return !d_.bytes && words_;
    return blanks_gone || (d_.bytes && ends);
  }

  // Fills the text of each token id, and the ids by name.
  void name_tokens() {
    text_at_.assign(static_cast<std::size_t>(d_.ids), -1);
    std::size_t bytes = 0;
    for (const auto& [token, id] : d_.tokens) bytes += token.size();
    for (const AddedToken& token : d_.added) bytes += token.content.size();
    Growth growth(name_, "decoder", bytes);
    const auto decoded = [&](std::string text) {
      for (const auto& [from, to] : d_.replaced) replace_all(text, from, to, growth);
      growth.keep(text.size());
      return text;
    };
    const auto put = [&](std::int32_t id, std::string text) {
      std::int32_t& at = text_at_[static_cast<std::size_t>(id)];
      if (at < 0) {
        at = static_cast<std::int32_t>(texts_.size());
        texts_.push_back(std::move(text));
      } else {
        texts_[static_cast<std::size_t>(at)] = std::move(text);
      }
    };
    for (const auto& [token, id] : d_.tokens) {
      ids_.emplace(token, id);
      if (d_.bytes) {
        put(id, bytes_of_written(token).value_or(token));
      } else if (const int b = byte_of_token(token); d_.byte_fallback && b >= 0) {
        put(id, std::string(1, static_cast<char>(b)));
      } else {
        put(id, decoded(token));
      }
    }
    for (const AddedToken& token : d_.added) {
      ids_.emplace(token.content, token.id);
      // A token that is searched for in the normalised text decodes to its normalised form.
      const bool changed = token.normalized && !d_.bytes;
      put(token.id,
          decoded(changed ? normalized(d_.normalizer, token.content, false, growth) : token.content));
    }
  }

  static constexpr std::string_view kMark = "\u2581";

  std::string name_, json_;
  HfDescription d_;
  HfModel model_;
  AddedTokens added_, added_inside_;
  WordEndings word_endings_;  // of added tokens
  bool words_ = false, cuts_ = false;
  std::vector<std::string> texts_;
  std::vector<std::int32_t> text_at_;  // for each id the index in texts_; -1: no token has this id
  std::unordered_map<std::string, std::int32_t> ids_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace

std::unique_ptr<TextTokenizer> make_hf_tokenizer(const std::string& json_file) {
  return std::make_unique<HfTokenizer>(read_tokenizer_file(json_file, "a tokenizer"), json_file);
}

std::unique_ptr<TextTokenizer> make_file_tokenizer(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::string file = path;
  if (fs::is_directory(path, ignored)) {
    file = (fs::path(path) / kJsonFile).string();
    if (!file_exists(file)) file = (fs::path(path) / "tokenizer.model").string();
    if (!file_exists(file)) {
      throw Error(Errc::kUsage, path, "holds neither tokenizer.json nor tokenizer.model",
                  "the directory of a Hugging Face model is expected, or one of these files");
    }
  }
  if (fs::path(file).extension() == ".model") return make_sentencepiece_tokenizer(file);
  return make_hf_tokenizer(file);
}

}  // namespace zg
