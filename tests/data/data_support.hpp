// Files, a tiny vocabulary and random texts for the tests of tokenizers and data sets.
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "data/utf8.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/data/options.hpp"

namespace zg::test {

template <class T>
std::string write_tokens(const std::string& path, const std::vector<T>& tokens) {
  return write_file(path,
                    std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(T)));
}

// The text of the error that `work` must throw, and with this code.
template <class Work>
std::string refusal(const Work& work, Errc code = Errc::kUsage) {
  const Error e = error_of(work);
  EXPECT_EQ(e.code(), code) << e.what();
  return e.what();
}

inline TokenizerConfig chars() {
  return {.kind = TokenizerConfig::Kind::kChars, .directory = ""};
}
inline TokenizerConfig gpt2(const std::string& directory) {
  return {.kind = TokenizerConfig::Kind::kGpt2, .directory = directory};
}

// DataConfig, of which a test names only what it is about.
struct Settings {
  std::string train{}, validation{};
  double validation_share = 0.1;
  TokenizerConfig tokenizer{};
  DType token_dtype = DType::kU16;
  std::int64_t seq_len = 256;

  operator DataConfig() const {
    return {.train = train,
            .validation = validation,
            .document_end = "",
            .validation_share = validation_share,
            .tokenizer = tokenizer,
            .token_dtype = token_dtype,
            .seq_len = seq_len,
            .blend = {}};
  }
};

// GPT-2's way of writing bytes, said in other words than bpe.cpp says it.
inline std::string written(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) {
    const auto b = static_cast<unsigned char>(c);
    char32_t code = b;
    if (b <= 32) code = 256u + b;
    if (b >= 127 && b <= 160) code = 256u + 33 + (b - 127u);
    if (b == 173) code = 256u + 67;
    utf8::append(code, out);
  }
  return out;
}

// encoder.json and vocab.bpe: the 256 bytes (numbered downwards, so that no test passes for taking a byte's
// value as its id), the merges' products, <|endoftext|>.
struct TinyVocabulary {
  std::vector<std::pair<std::string, std::string>> merges;  // of bytes
  std::vector<std::string> tokens;                          // by id, as bytes

  explicit TinyVocabulary(std::vector<std::pair<std::string, std::string>> m) : merges(std::move(m)) {
    for (int b = 255; b >= 0; --b) tokens.push_back(std::string(1, static_cast<char>(b)));
    for (const auto& [left, right] : merges) {
      if (id_of(left + right) < 0) tokens.push_back(left + right);
    }
    tokens.push_back("<|endoftext|>");
  }
  std::int32_t id_of(const std::string& bytes) const {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] == bytes) return static_cast<std::int32_t>(i);
    }
    return -1;
  }
  std::string encoder_json() const {
    std::string json = "{";
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::string quoted;
      for (const char c : written(tokens[i])) {
        if (c == '"' || c == '\\') quoted += '\\';
        quoted += c;
      }
      json += fmt::format("{}\"{}\": {}", i == 0 ? "" : ", ", quoted, i);
    }
    return json + "}";
  }
  std::string vocab_bpe() const {
    std::string text = "#version: 0.2\n";
    for (const auto& [left, right] : merges) text += written(left) + " " + written(right) + "\n";
    return text;
  }
  std::string save(const std::string& directory) const {
    std::filesystem::create_directories(directory);
    write_file(directory + "/encoder.json", encoder_json());
    write_file(directory + "/vocab.bpe", vocab_bpe());
    return directory;
  }
};

inline TinyVocabulary english_vocabulary() {
  return TinyVocabulary(
      {{"t", "h"}, {"th", "e"}, {" ", "the"}, {"a", "n"}, {"an", "d"}, {" ", "and"}, {"\xc3", "\xa9"}});
}

// Words, blanks, punctuation and code points of every length in UTF-8.
inline std::string random_text(std::uint64_t seed, std::size_t pieces) {
  static const std::vector<std::string> words = {"the", " the", " and", "and",    " ",    "  ",    "\n",
                                                 "\t",  "'s",   "'ll",  "'re",    "'",    "12",    " 3",
                                                 "!?",  "...",  "é",    "\u00a0", "日本", "\u3000"};
  const NamedRandom random(seed, "text");
  std::string text;
  for (std::size_t i = 0; i < pieces; ++i) {
    if (random.below(2 * i, 4) > 0) {
      text += words[random.below(2 * i + 1, words.size())];
      continue;
    }
    char32_t code = static_cast<char32_t>(random.below(2 * i + 1, 0x110000 - 0x800));
    if (code >= 0xD800) code += 0x800;
    utf8::append(code, text);
  }
  return text;
}

// The folder of shared data next to the source tree; empty where there is none.
inline std::string shared_data() {
  const std::string path = test::in_source("../shared/data");
  return std::filesystem::exists(path + "/gpt2-tokenizer") ? path : "";
}

}  // namespace zg::test
