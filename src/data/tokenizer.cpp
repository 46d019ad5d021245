#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "data/bpe.hpp"
#include "data/shown.hpp"
#include "data/text_tokenizer.hpp"
#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/model_files.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg {
namespace {

constexpr std::int64_t kFormatVersion = 1;
constexpr const char* kEncoderFile = "encoder.json";
constexpr const char* kMergesFile = "vocab.bpe";

std::string in_directory(const std::string& directory, const char* file) {
  return (std::filesystem::path(directory) / file).string();
}

void make_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw Error(Errc::kIo, directory, "cannot be created: " + error.message());
}

void save_description(const std::string& directory, const char* type, nlohmann::json more) {
  more["type"] = type;
  more["version"] = kFormatVersion;
  write_file_atomically(in_directory(directory, kTokenizerFile), more.dump(1) + "\n");
}

void check_id(std::int32_t id, std::int64_t vocab_size) {
  if (id < 0 || id >= vocab_size) throw_unknown_id(id, vocab_size);
}

class ByteTokenizer final : public TextTokenizer {
 public:
  std::int64_t vocab_size() const override { return 256; }
  std::string identity() const override { return "bytes"; }
  std::int32_t id_of_token(const std::string&) const override { return -1; }
  std::size_t safe_prefix(std::string_view text) const override { return text.size(); }
  void append(std::string_view text, const TextPlace&, std::vector<std::int32_t>& out) const override {
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
  }
  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const std::int32_t id : ids) {
      check_id(id, vocab_size());
      text.push_back(static_cast<char>(static_cast<unsigned char>(id)));
    }
    return text;
  }
  void save(const std::string& directory) const override {
    make_directory(directory);
    save_description(directory, "bytes", nlohmann::json::object());
  }
};

class CharTokenizer final : public TextTokenizer {
 public:
  explicit CharTokenizer(std::vector<char32_t> codes) : codes_(std::move(codes)) {
    ascii_.fill(-1);
    for (std::size_t i = 0; i < codes_.size() && codes_[i] < 128; ++i)
      ascii_[codes_[i]] = static_cast<std::int32_t>(i);
    for (const char32_t code : codes_) utf8::append(code, characters_);
  }

  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(codes_.size()); }
  std::string identity() const override {
    return fmt::format("chars {} {:016x}", codes_.size(), fnv1a64(characters_));
  }
  std::int32_t id_of_token(const std::string&) const override { return -1; }
  std::size_t safe_prefix(std::string_view text) const override { return utf8::whole_prefix(text); }

  void append(std::string_view text, const TextPlace& place, std::vector<std::int32_t>& out) const override {
    for (std::size_t at = 0; at < text.size();) {
      const utf8::Decoded c = utf8::decode(text, at);
      if (c.length == 0) throw_invalid_utf8(text, at, place);
      const std::int32_t id = id_of(c.code);
      if (id < 0)
        throw_unknown(text.substr(at, c.length), c.code, place.offset + static_cast<std::int64_t>(at), place);
      out.push_back(id);
      at += c.length;
    }
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const std::int32_t id : ids) {
      check_id(id, vocab_size());
      utf8::append(codes_[static_cast<std::size_t>(id)], text);
    }
    return text;
  }

  void save(const std::string& directory) const override {
    make_directory(directory);
    save_description(directory, "chars", {{"characters", characters_}});
  }

 private:
  std::int32_t id_of(char32_t code) const {
    if (code < 128) return ascii_[code];
    const auto it = std::lower_bound(codes_.begin(), codes_.end(), code);
    return it != codes_.end() && *it == code ? static_cast<std::int32_t>(it - codes_.begin()) : -1;
  }
  [[noreturn]] void throw_unknown(std::string_view character, char32_t code, std::int64_t at,
                                  const TextPlace& place) const {
    const std::string shown = code < 0x20 || code == 0x7F ? "" : fmt::format(" '{}'", character);
    throw Error(
        Errc::kUsage, place.where,
        fmt::format("character U+{:04X}{} at byte {} is not among the {} characters of the vocabulary",
                    static_cast<std::uint32_t>(code), shown, at, codes_.size()),
        "the vocabulary is the set of characters of the training text; the tokenizer \"bytes\" knows all");
  }

  std::vector<char32_t> codes_;
  std::string characters_;  // the same code points as UTF-8
  std::array<std::int32_t, 128> ascii_;
};

struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};

// Keeps the texts of its files, so that save() writes what was loaded, whatever has happened to the files
// since.
class Gpt2Tokenizer final : public TextTokenizer {
 public:
  Gpt2Tokenizer(std::string encoder_json, std::string vocab_bpe, const std::string& encoder_name,
                const std::string& bpe_name)
      : encoder_json_(std::move(encoder_json)),
        vocab_bpe_(std::move(vocab_bpe)),
        model_(encoder_json_, vocab_bpe_, encoder_name, bpe_name) {}

  std::int64_t vocab_size() const override { return model_.vocab_size(); }
  std::string identity() const override {
    return fmt::format("gpt2 {:016x} {:016x}", fnv1a64(encoder_json_), fnv1a64(vocab_bpe_));
  }
  std::int32_t id_of_token(const std::string& name) const override { return model_.id_of_bytes(name); }

  // A piece always ends before white space that follows another character, whatever comes next. It suffices
  // to look for ASCII characters.
  std::size_t safe_prefix(std::string_view text) const override {
    const auto is_blank = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); };
    for (std::size_t at = text.size(); at-- > 1;) {
      const char before = text[at - 1];
      if (is_blank(text[at]) && !is_blank(before) && static_cast<unsigned char>(before) < 128) return at;
    }
    return 0;
  }

  void append(std::string_view text, const TextPlace& place, std::vector<std::int32_t>& out) const override {
    // Words recur, so their tokens are looked up rather than computed again.
    std::unordered_map<std::string, std::vector<std::int32_t>, StringHash, std::equal_to<>> cache;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t length = gpt2_piece(text, at);
      if (length == 0) throw_invalid_utf8(text, at, place);
      const std::string_view piece = text.substr(at, length);
      at += length;
      if (piece.size() == 1 || piece.size() > kLongestCached) {
        model_.append_piece(piece, out);
        continue;
      }
      auto it = cache.find(piece);
      if (it == cache.end()) {
        if (cache.size() >= kCacheEntries) cache.clear();
        it = cache.emplace(piece, std::vector<std::int32_t>()).first;
        model_.append_piece(piece, it->second);
      }
      out.insert(out.end(), it->second.begin(), it->second.end());
    }
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      check_id(id, vocab_size());
      text += model_.bytes_of(id);
    }
    return text;
  }

  void save(const std::string& directory) const override {
    make_directory(directory);
    write_file_atomically(in_directory(directory, kEncoderFile), encoder_json_);
    write_file_atomically(in_directory(directory, kMergesFile), vocab_bpe_);
    save_description(directory, "gpt2", {{"encoder", kEncoderFile}, {"merges", kMergesFile}});
  }

 private:
  static constexpr std::size_t kCacheEntries = 1 << 16, kLongestCached = 64;

  std::string encoder_json_, vocab_bpe_;
  BpeModel model_;
};

std::unique_ptr<TextTokenizer> load_char_tokenizer(const nlohmann::json& root, const std::string& name) {
  if (!root.contains("characters") || !root["characters"].is_string()) {
    throw Error(Errc::kUsage, name, "\"characters\", a text of all characters, is expected");
  }
  const auto characters = root["characters"].get<std::string>();
  std::vector<char32_t> codes;
  for (std::size_t at = 0; at < characters.size();) {
    const utf8::Decoded c = utf8::decode(characters, at);
    if (c.length == 0) throw_invalid_utf8(characters, at, {.where = name});
    if (!codes.empty() && codes.back() >= c.code) {
      throw Error(Errc::kUsage, name,
                  fmt::format("\"characters\" is not sorted at its character {}", codes.size()));
    }
    codes.push_back(c.code);
    at += c.length;
  }
  if (codes.empty()) throw Error(Errc::kUsage, name, "\"characters\" is empty");
  return make_char_tokenizer(std::move(codes));
}

}  // namespace

void save_tokenizer_file(const std::string& directory, const char* type, const char* file,
                         const std::string& content) {
  make_directory(directory);
  write_file_atomically(in_directory(directory, file), content);
  save_description(directory, type, {{"file", file}});
}

void check_utf8(std::string_view text, const TextPlace& place) {
  for (std::size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 128) {
      ++at;
      continue;
    }
    const std::size_t length = utf8::decode(text, at).length;
    if (length == 0) throw_invalid_utf8(text, at, place);
    at += length;
  }
}

void throw_invalid_utf8(std::string_view text, std::size_t at, const TextPlace& place) {
  throw Error(Errc::kUsage, place.where,
              fmt::format("is no UTF-8 at byte {} (0x{:02X})", place.offset + static_cast<std::int64_t>(at),
                          static_cast<unsigned char>(text[at])),
              "convert the text to UTF-8, or use the tokenizer \"bytes\"");
}

void throw_unknown_id(std::int32_t id, std::int64_t vocab_size) {
  throw Error(Errc::kUsage, "tokenizer",
              fmt::format("token {} is not in its vocabulary of {}", id, vocab_size));
}

std::int64_t mark_code_points(std::string_view text, const TextPlace& place, std::vector<bool>& seen) {
  std::int64_t count = 0;
  for (std::size_t at = 0; at < text.size(); ++count) {
    const utf8::Decoded c = utf8::decode(text, at);
    if (c.length == 0) throw_invalid_utf8(text, at, place);
    seen[c.code] = true;
    at += c.length;
  }
  return count;
}

std::vector<char32_t> marked_code_points(const std::vector<bool>& seen) {
  std::vector<char32_t> codes;
  for (std::size_t c = 0; c < seen.size(); ++c) {
    if (seen[c]) codes.push_back(static_cast<char32_t>(c));
  }
  return codes;
}

std::unique_ptr<TextTokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

std::unique_ptr<TextTokenizer> make_char_tokenizer(std::vector<char32_t> code_points) {
  return std::make_unique<CharTokenizer>(std::move(code_points));
}

std::unique_ptr<TextTokenizer> make_gpt2_tokenizer(const std::string& directory) {
  if (directory.empty()) {
    throw Error(Errc::kUsage, "data.tokenizer",
                "GPT-2's tokenizer needs the directory of encoder.json and vocab.bpe",
                "\"tokenizer\": {\"gpt2\": \"directory\"}");
  }
  const std::string encoder = in_directory(directory, kEncoderFile),
                    merges = in_directory(directory, kMergesFile);
  std::string encoder_json = read_tokenizer_file(encoder, "GPT-2's vocabulary");
  std::string vocab_bpe = read_tokenizer_file(merges, "GPT-2's merges");
  return std::make_unique<Gpt2Tokenizer>(std::move(encoder_json), std::move(vocab_bpe), encoder, merges);
}

std::unique_ptr<TextTokenizer> load_text_tokenizer(const std::string& directory) {
  const std::string name = in_directory(directory, kTokenizerFile);
  if (!file_exists(name)) return nullptr;
  const std::string text = read_tokenizer_file(name, "a tokenizer's description");
  const auto root = parse_json(text, name, "take the whole directory that a run has left, with this file",
                               {.depth = 16, .values = 1000});
  if (!root.is_object()) throw Error(Errc::kUsage, name, "is no JSON object");
  const auto version = root.find("version");
  if (version == root.end() || *version != kFormatVersion) {
    throw Error(Errc::kUsage, name,
                fmt::format("version {} found, {} expected",
                            version == root.end() ? "none" : shown(version->dump()), kFormatVersion));
  }
  const auto type = root.find("type");
  if (type != root.end() && *type == "bytes") return make_byte_tokenizer();
  if (type != root.end() && *type == "chars") return load_char_tokenizer(root, name);
  if (type != root.end() && *type == "gpt2") return make_gpt2_tokenizer(directory);
  if (type != root.end() && *type == "hf")
    return make_hf_tokenizer(in_directory(directory, "tokenizer.json"));
  if (type != root.end() && *type == "sentencepiece")
    return make_sentencepiece_tokenizer(in_directory(directory, "tokenizer.model"));
  throw Error(
      Errc::kUsage, name,
      fmt::format("type {} found, \"bytes\", \"chars\", \"gpt2\", \"hf\" or \"sentencepiece\" expected",
                  type == root.end() ? "none" : shown(type->dump())));
}

std::unique_ptr<TextTokenizer> make_named_tokenizer(const TokenizerConfig& config) {
  switch (config.kind) {
    case TokenizerConfig::Kind::kBytes:
      return make_byte_tokenizer();
    case TokenizerConfig::Kind::kGpt2:
      return make_gpt2_tokenizer(config.directory);
    case TokenizerConfig::Kind::kFile:
      return make_file_tokenizer(config.directory);
    case TokenizerConfig::Kind::kChars:
      return nullptr;
  }
  ZG_ASSERT(false, "tokenizer kind {}", static_cast<int>(config.kind));
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config, std::string_view training_text) {
  if (auto named = make_named_tokenizer(config)) return named;
  std::vector<bool> seen(0x110000);
  if (mark_code_points(training_text, {.where = "training text"}, seen) == 0) {
    throw Error(Errc::kUsage, "training text", "is empty; its characters are the vocabulary");
  }
  return make_char_tokenizer(marked_code_points(seen));
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& directory) {
  if (auto saved = load_text_tokenizer(directory)) return saved;
  for (const char* file : {"tokenizer.json", "tokenizer.model"}) {
    const std::string path = in_directory(directory, file);
    if (file_exists(path)) return make_file_tokenizer(path);
  }
  return nullptr;
}

}  // namespace zg
