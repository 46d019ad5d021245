// The two tiny models whose losses, logits, gradients and AdamW steps PyTorch computed: weights and data
// by formula, and the digest that the files hold of each tensor. See tests/reference/README.md.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/model_runner.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/model/model.hpp"

namespace zg::test {

inline std::uint64_t reference_hash(std::string_view name, std::uint64_t i) {
  std::uint64_t z = fnv1a64(name) + (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline ModelConfig reference_gpt2() {
  ModelConfig c;
  c.arch = Arch::kGpt2;
  c.vocab_size = 257;
  c.context = 40;
  c.width = 172;
  c.layers = 3;
  c.heads = c.kv_heads = 4;
  c.head_size = 43;
  c.inner = 688;
  return c;
}

inline ModelConfig reference_llama() {
  ModelConfig c;
  c.arch = Arch::kLlama;
  c.vocab_size = 257;
  c.context = 40;
  c.width = 176;
  c.layers = 5;
  c.heads = 8;
  c.kv_heads = 4;
  c.head_size = 22;
  c.inner = 172;
  c.tied = false;
  return c;
}

// Every option of a block that can be had with parts of layers; layers differ.
inline ModelConfig with_every_option(ModelConfig c) {
  c.arch = Arch::kGemma3;
  BlockDescription& b = c.block;
  b.norms = NormPlacement::kBoth;
  b.norm_weight = NormWeight::kPlusOne;
  b.head_norms = HeadNorms::kEach;
  b.qkv_bias = b.o_bias = b.mlp_bias = b.sinks = true;
  b.gate = Gate::kGeluTanh;
  b.query_pre_attn_scalar = 5;
  b.attention_softcap = 2, b.final_softcap = 3;
  b.scaled_embedding = true;
  b.window = 3;
  for (std::int64_t l = 0; l < c.layers; ++l) b.windowed.push_back(l % 2 == 0);
  b.rope.theta = 1000;
  b.rope.scaling = {.kind = RopeScaling::Kind::kYarn, .factor = 4, .original = 8};
  b.window_rope = Rope{.theta = 50, .partial = 0.2};
  return c;
}

// Norms behind the branches alone, and over all heads together.
inline ModelConfig with_norms_after(ModelConfig c) {
  c.arch = Arch::kOlmo2;
  c.block.norms = NormPlacement::kAfter;
  c.block.head_norms = HeadNorms::kAll;
  c.block.rope.scaling = {.kind = RopeScaling::Kind::kLinear, .factor = 3};
  return c;
}

// With adapters beside all matrices of its blocks, which training drops some of the inputs of.
inline ModelConfig with_adapters(ModelConfig c, double dropout = 0) {
  c.lora = {.rank = 3, .alpha = 5, .dropout = dropout, .modules = match_modules(c, "all-linear")};
  return c;
}

// The files of Phi-3, which have q, k and v as one matrix, and gate and up.
inline ModelConfig with_fused_matrices(ModelConfig c) {
  c.arch = Arch::kPhi3, c.block.fused = true;
  return c;
}

// The position in the Hugging Face tensor of element (row, column) of ours, of the whole parameter.
inline std::int64_t file_index(const Param& p, std::int64_t row, std::int64_t column) {
  return p.conv1d ? column * p.whole_rows + row : row * p.whole_cols + column;
}

inline double reference_weight(const Param& p, std::int64_t row, std::int64_t column) {
  const std::uint64_t hash = reference_hash(p.name, static_cast<std::uint64_t>(file_index(p, row, column)));
  const double u = static_cast<double>(hash >> 40) * 0x1p-24 - 0.5;
  const double value = p.init == Init::kOne ? 1 + 0.4 * u : 0.2 * u;
  return static_cast<double>(static_cast<float>(value));
}

// The four ragged micro-batches of 2 x 32; 172 valid targets together.
inline std::vector<Batch> reference_batches() {
  constexpr std::int64_t kRows = 64;
  constexpr std::int64_t kValid[] = {61, 49, 37, 25};
  std::vector<Batch> batches;
  for (std::int64_t m = 0; m < 4; ++m) {
    Batch b{{2, 32}, {}, {}};
    for (std::int64_t i = 0; i < kRows; ++i) {
      const auto n = static_cast<std::uint64_t>(m * kRows + i);
      b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", n) % 257));
      b.targets.push_back(i < kValid[m] ? static_cast<std::int32_t>(reference_hash("targets", n) % 257)
                                        : -100);
    }
    batches.push_back(std::move(b));
  }
  return batches;
}
inline constexpr double kReferenceValid = 172;

// What the files keep of a tensor.
struct Digest {
  double norm = 0, sum = 0, signs[3] = {}, largest = 0;
  std::vector<double> samples;
};

inline Digest digest(const Param& p, const View& view, double scale) {
  std::vector<double> x(static_cast<std::size_t>(p.count()));
  for (std::int64_t r = 0; r < p.rows; ++r) {
    for (std::int64_t c = 0; c < p.cols; ++c) {
      x[static_cast<std::size_t>(file_index(p, r, c))] = load(view, r, c) * scale;
    }
  }
  // In long double, so that what the digest itself rounds does not count.
  long double square = 0, sum = 0, signs[3] = {};
  Digest d;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const long double value = x[i];
    square += value * value;
    sum += value;
    for (int j = 0; j < 3; ++j) {
      const std::string name = {'s', 'i', 'g', 'n', static_cast<char>('0' + j)};
      signs[j] += (reference_hash(name, i) >> 63) != 0 ? -value : value;
    }
    if (std::abs(x[i]) > std::abs(d.largest)) d.largest = x[i];
  }
  d.norm = static_cast<double>(std::sqrt(square));
  d.sum = static_cast<double>(sum);
  for (int j = 0; j < 3; ++j) d.signs[j] = static_cast<double>(signs[j]);
  const std::size_t stride = std::max<std::size_t>(1, x.size() / 64);
  for (std::size_t i = 0; i < x.size() && d.samples.size() < 64; i += stride) d.samples.push_back(x[i]);
  return d;
}

// Reads a digest from the 7 + min(64, n) values that a file holds of a tensor.
inline Digest stored_digest(const double* values, std::int64_t count) {
  Digest d;
  d.norm = values[0];
  d.sum = values[1];
  for (int j = 0; j < 3; ++j) d.signs[j] = values[2 + j];
  d.largest = values[5];
  d.samples.assign(values + 7, values + count);
  return d;
}

}  // namespace zg::test
