// What a Hugging Face tokenizer.json says, as plain values: byte-pair encodings over bytes (GPT-2, Llama 3,
// Qwen, OLMo, ...) and over characters with U+2581 for blanks (Llama 2, Mistral, Gemma, Phi-3).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/added_tokens.hpp"
#include "data/pattern.hpp"

namespace zg {

struct HfNormalizerStep {
  enum class Kind { kNfc, kPrepend, kReplace };
  Kind kind;
  std::string from{}, to{};  // kReplace; kPrepend has `to` alone
};

struct HfSplitStep {
  enum class Kind { kGpt2, kPattern, kText, kDigits, kEachDigit, kMetaspace };
  enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class Prepend { kNever, kFirst, kAlways };
  Kind kind;
  Behavior behavior = Behavior::kIsolated;
  bool invert = false;                       // what does not match is what behavior is about
  std::shared_ptr<const Pattern> pattern{};  // kPattern
  std::string text{};                        // kText; kMetaspace: what stands for a blank
  Prepend prepend = Prepend::kNever;         // kMetaspace
  bool split = true;                         // kMetaspace
};

struct HfDescription {
  std::vector<std::pair<std::string, std::int32_t>> tokens;  // as written in the file
  std::vector<std::pair<std::string, std::string>> merges;
  std::string unknown;  // unk_token; empty: none
  bool byte_fallback = false, fuse_unknown = false, ignore_merges = false;

  std::vector<HfNormalizerStep> normalizer;
  std::vector<HfSplitStep> splits;
  bool bytes = false;         // tokens stand for bytes, in GPT-2's way of writing them
  bool prefix_space = false;  // with `bytes`: a text that begins without a blank gets one

  std::vector<AddedToken> added;
  std::vector<std::int32_t> begin, end;  // what the template puts around a text

  std::vector<std::pair<std::string, std::string>> replaced;  // by the decoder
  bool strip_blank = false;                                   // the decoder takes one blank off the beginning
};

// Throws Error(kUsage), which names the place in the file, what is there, and what is known.
HfDescription read_hf_tokenizer(std::string_view json, const std::string& name);

}  // namespace zg
