#include "ziggurat/checkpoint/model_bits.hpp"

#include <fmt/format.h>

#include <charconv>
#include <initializer_list>
#include <map>

#include "ziggurat/base/error.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

constexpr const char* kForeign = "no version of this program has written this checkpoint";

BlockDescription plain_block(const ModelConfig& m) {
  BlockDescription plain;
  plain.rope.theta = m.block.rope.theta;
  return plain;
}

// Exactly the settings that decide how blocks compute.
std::string block_text(const ModelConfig& m) {
  ModelConfig block = m;
  block.init_std = 0, block.dropout = {};
  std::string line = write_hf_config(block);
  std::erase(line, '\n');
  return line;
}

}  // namespace

BitKeys model_bits(const ModelConfig& m) {
  BitKeys keys;
  const auto add = [&](const std::string& key, const auto& value) {
    keys.emplace_back(key, fmt::format("{}", value));
  };
  add("model.arch", name_of(m.arch));
  for (const auto& [key, value] :
       std::initializer_list<std::pair<const char*, std::int64_t>>{{"layers", m.layers},
                                                                   {"width", m.width},
                                                                   {"inner", m.inner},
                                                                   {"heads", m.heads},
                                                                   {"kv_heads", m.kv_heads},
                                                                   {"head_size", m.head_size},
                                                                   {"vocab_size", m.vocab_size},
                                                                   {"context", m.context}})
    add(std::string("model.") + key, value);
  add("model.norm_eps", m.norm_eps);
  add("model.rope_theta", m.block.rope.theta);
  add("model.tied", m.tied);
  // A checkpoint without this key has GPT-2 or a plain Llama.
  if ((m.arch != Arch::kGpt2 && m.arch != Arch::kLlama) || m.block != plain_block(m))
    add(kBlockKey, block_text(m));
  // A checkpoint without these keys was written by a run without dropout.
  if (m.dropout.embedding > 0) add(kEmbeddingDropoutKey, m.dropout.embedding);
  if (m.dropout.residual > 0) add(kResidualDropoutKey, m.dropout.residual);
  // A checkpoint without these keys was written by a run that trains the model itself.
  if (m.lora.on()) add(kLoraKey, shape_of(m.lora)), add(kLoraArithmeticKey, arithmetic_of(m.lora));
  return keys;
}

ModelConfig model_of(const BitKeys& bits, const std::string& where) {
  const std::map<std::string, std::string> keys(bits.begin(), bits.end());
  const auto text = [&](const char* key) {
    const auto it = keys.find(std::string("model.") + key);
    if (it == keys.end())
      throw Error(Errc::kUsage, where, fmt::format("does not say model.{}", key), kForeign);
    return it->second;
  };
  const auto read = [&](const char* key, auto& out) {
    const std::string value = text(key);
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
    if (error != std::errc() || end != value.data() + value.size())
      throw Error(Errc::kUsage, where, fmt::format("has \"{}\" as model.{}", value, key), kForeign);
  };
  ModelConfig m;
  if (keys.count(kBlockKey) > 0) {
    m = parse_hf_config(keys.at(kBlockKey), where + ": " + kBlockKey);
    m.init_std = ModelConfig{}.init_std;
  } else {
    m.arch = text("arch") == "gpt2" ? Arch::kGpt2 : Arch::kLlama;
  }
  read("layers", m.layers), read("width", m.width), read("inner", m.inner), read("heads", m.heads);
  read("kv_heads", m.kv_heads), read("head_size", m.head_size), read("vocab_size", m.vocab_size);
  read("context", m.context), read("norm_eps", m.norm_eps), read("rope_theta", m.block.rope.theta);
  m.tied = text("tied") == "true";
  if (keys.count(kEmbeddingDropoutKey) > 0) read("dropout.embedding", m.dropout.embedding);
  if (keys.count(kResidualDropoutKey) > 0) read("dropout.residual", m.dropout.residual);
  if (keys.count(kLoraKey) > 0) {
    const auto it = keys.find(kLoraArithmeticKey);
    const auto lora = parse_lora(keys.at(kLoraKey), it == keys.end() ? "" : it->second);
    if (!lora)
      throw Error(Errc::kUsage, where, fmt::format("has \"{}\" as {}", keys.at(kLoraKey), kLoraKey),
                  kForeign);
    m.lora = *lora;
  }
  validate(m);
  return m;
}

}  // namespace zg
