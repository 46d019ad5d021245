// The contents of a Hugging Face tokenizer.json, as plain values: byte-pair encodings over bytes (GPT-2,
// Llama 3, Qwen, OLMo, ...) and over characters with U+2581 for blanks (Llama 2, Mistral, Gemma, Phi-3).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/added_tokens.hpp"
#include "data/pattern.hpp"
#include "data/unicode.hpp"

namespace zg {

struct HfNormalizerStep {
  enum class Kind { kForm, kLowercase, kPrepend, kReplace };
  Kind kind;
  std::string from{}, to{};  // kReplace; kPrepend has only `to`
  unicode::Form form = unicode::Form::kC;
};

struct HfSplitStep {
  enum class Kind { kGpt2, kPattern, kText, kDigits, kEachDigit, kMetaspace };
  enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class Prepend { kNever, kFirst, kAlways };
  Kind kind;
  Behavior behavior = Behavior::kIsolated;
  bool invert = false;                       // `behavior` applies to the text between matches
  std::shared_ptr<const Pattern> pattern{};  // kPattern
  std::string text{};                        // kText; kMetaspace: the string that stands for a blank
  Prepend prepend = Prepend::kNever;         // kMetaspace
  bool split = true;                         // kMetaspace
};

struct HfMerge {
  std::int32_t left, right, product;
};

struct HfDescription {
  std::vector<std::pair<std::string, std::int32_t>> tokens;  // as written in the file
  std::vector<HfMerge> merges;
  std::int32_t unknown = -1;  // unk_token; -1: none
  std::int64_t ids = 0;       // the largest id, plus one
  bool byte_fallback = false, fuse_unknown = false, ignore_merges = false;

  std::vector<HfNormalizerStep> normalizer;
  std::vector<HfSplitStep> splits;
  bool bytes = false;         // tokens stand for bytes, written in GPT-2's way
  bool prefix_space = false;  // with `bytes`: a text that begins without a blank gets one

  std::vector<AddedToken> added;
  std::vector<std::int32_t> begin, end;  // tokens that the template puts before and after a text

  std::vector<std::pair<std::string, std::string>> replaced;  // replacements that the decoder makes
  bool strip_blank = false;                                   // the decoder removes one leading blank
  bool blanks_between = false;  // there is no decoder: tokens are joined with blanks
};

// Reads a file that need not be trusted. Sizes, numbers and depth are bounded, so that reading the file and
// using the description take time and memory in proportion to the text. Throws Error(kUsage), which names the
// place in the file, its content, and the values that are supported.
HfDescription read_hf_tokenizer(std::string_view json, const std::string& name);

}  // namespace zg
