// Checks that the sizes and the description of a model fit together.
#include <fmt/format.h>

#include <cmath>

#include "model/families/family.hpp"
#include "model/rope_tables.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/model/config.hpp"

namespace zg {
namespace {

using model::SizeNames;

// Token ids have 32 bits. The other limits keep every product of sizes far below 2^63.
constexpr std::int64_t kMaxVocabulary = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxWidth = std::int64_t{1} << 24;
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 16;

void check_size(const char* key, std::int64_t value, std::int64_t limit) {
  if (value < 1 || value > limit) {
    throw Error(Errc::kUsage, key, fmt::format("{} is not between 1 and {}", value, limit));
  }
}

void check_positive(const char* key, double value) {
  if (!std::isfinite(value) || value <= 0) {
    throw Error(Errc::kUsage, key, fmt::format("{} is not a positive number", value));
  }
}

void check_rate(const char* key, double value) {
  if (!(value >= 0 && value < 1)) {
    throw Error(Errc::kUsage, key, fmt::format("{} is not a number from 0 to below 1", value));
  }
}

void check_heads_without_rotation(const ModelConfig& c, const SizeNames& keys) {
  if (c.width % c.heads != 0) {
    throw Error(Errc::kUsage, keys.heads,
                fmt::format("{} heads do not divide {} = {}", c.heads, keys.width, c.width));
  }
  if (c.head_size * c.heads != c.width) {
    throw Error(Errc::kUsage, "head_size",
                fmt::format("{} heads of {} are not {} = {}", c.heads, c.head_size, keys.width, c.width));
  }
  if (c.kv_heads != c.heads) {
    throw Error(Errc::kUsage, "kv_heads",
                fmt::format("{}, but {} has one key and value head for each of its {} heads", c.kv_heads,
                            title_of(c.arch), c.heads));
  }
}

void check_heads(const ModelConfig& c, const SizeNames& keys) {
  if (c.heads % c.kv_heads != 0) {
    throw Error(Errc::kUsage, keys.kv_heads,
                fmt::format("{} does not divide {} = {}", c.kv_heads, keys.heads, c.heads));
  }
  if (c.block.latent) return;  // check_latent()
  if (c.head_size % 2 != 0) {
    throw Error(Errc::kUsage, "head_dim",
                fmt::format("{} is odd, but rotary embeddings turn pairs of elements", c.head_size),
                fmt::format("{} / {} must be even unless head_dim is given", keys.width, keys.heads));
  }
}

void check_rope(const Rope& rope, std::int64_t head_size) {
  using enum RopeScaling::Kind;
  check_positive("rope_theta", rope.theta);
  const bool share = rope.partial > 0 && rope.partial <= 1;
  const std::int64_t pairs = share ? model::rope_pairs(rope, head_size) : 0;
  const auto turned = share ? static_cast<std::int64_t>(static_cast<double>(head_size) * rope.partial) : 0;
  if (turned % 2 != 0 || pairs < 1 || pairs > kMaxRopePairs) {
    throw Error(Errc::kUsage, "partial_rotary_factor",
                fmt::format("{} of the {} columns of a head turn, which are no pairs, or more than {}",
                            rope.partial, head_size, kMaxRopePairs));
  }
  const RopeScaling& s = rope.scaling;
  if (s.kind == kNone) return;
  check_positive("rope_scaling: factor", s.factor);
  if (s.kind == kLinear) return;
  if (s.original < 2) {
    throw Error(Errc::kUsage, "rope_scaling: original_max_position_embeddings",
                fmt::format("{} is no number of positions", s.original));
  }
  if (s.kind == kLlama3) {
    check_positive("rope_scaling: low_freq_factor", s.low_freq_factor);
    if (s.high_freq_factor > s.low_freq_factor) return;
    throw Error(Errc::kUsage, "rope_scaling: high_freq_factor",
                fmt::format("{} is not above low_freq_factor, {}", s.high_freq_factor, s.low_freq_factor));
  }
  if (s.kind == kYarn) {
    check_positive("rope_scaling: beta_fast", s.beta_fast);
    check_positive("rope_scaling: beta_slow", s.beta_slow);
    return;
  }
  if (static_cast<std::int64_t>(s.short_factor.size()) != pairs) {
    throw Error(
        Errc::kUsage, "rope_scaling: short_factor",
        fmt::format("has {} numbers for {} pairs of columns that turn", s.short_factor.size(), pairs));
  }
  for (const double factor : s.short_factor) check_positive("rope_scaling: short_factor", factor);
}

// Extreme values, each of them allowed, may give frequencies or an amplitude that are not finite.
void check_rope_table(const Rope& rope, std::int64_t head_size) {
  const RopeTable table = model::rope_table_of(rope, head_size);
  bool finite = std::isfinite(table.amplitude) && table.amplitude > 0;
  for (std::int64_t i = 0; i < table.pairs; ++i)
    finite = finite && std::isfinite(table.frequency[static_cast<std::size_t>(i)]);
  if (finite) return;
  throw Error(Errc::kUsage, rope.scaling.kind == RopeScaling::Kind::kNone ? "rope_theta" : "rope_scaling",
              "its numbers give angles that are not finite", "correct them, or remove the scaling");
}

// Counts in floating point, since sizes that are allowed one by one may have a product that no integer holds.
void check_parameters(const ModelConfig& c, const SizeNames& keys) {
  constexpr double kMost = 1e15;
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double heads = number(c.query_columns() + c.key_columns() + c.value_columns() + c.result_columns());
  const Experts& e = c.experts;
  const double inside =
      e.on() ? std::max(number(c.inner), number(e.count) * number(e.inner) + number(e.shared_inner))
             : number(c.inner);
  const double block = number(c.width) * (heads + (c.form().gated ? 3 : 2) * inside);
  const double all = number(c.layers) * block + number(c.width) * number(c.vocab_size);
  if (all <= kMost) return;
  throw Error(Errc::kUsage, keys.layers,
              fmt::format("the model would have {:.1e} parameters; {:.0e} at most are expected", all, kMost),
              fmt::format("correct {}, {}, {} or vocab_size", keys.layers, keys.width, keys.inner));
}

void check_description(const ModelConfig& c) {
  const BlockDescription& block = c.block;
  for (const Rope* rope : {&block.rope, block.window_rope ? &*block.window_rope : nullptr}) {
    if (rope == nullptr) continue;
    check_rope(*rope, c.rotary_size());
    check_rope_table(*rope, c.rotary_size());
  }
  if (!block.windowed.empty() && static_cast<std::int64_t>(block.windowed.size()) != c.layers) {
    throw Error(Errc::kUsage, "layer_types",
                fmt::format("has {} layers of {}", block.windowed.size(), c.layers));
  }
  if (c.any_window()) check_size("sliding_window", block.window, kMaxWidth);
  for (const auto& [key, value] : {std::pair("query_pre_attn_scalar", block.query_pre_attn_scalar),
                                   {"attn_logit_softcapping", block.attention_softcap},
                                   {"final_logit_softcapping", block.final_softcap}}) {
    if (value != 0) check_positive(key, value);
  }
}

void check_latent(const ModelConfig& c) {
  if (!c.block.latent) return;
  const LatentAttention& latent = *c.block.latent;
  if (latent.q_rank != 0) check_size("q_lora_rank", latent.q_rank, kMaxWidth);
  check_size("kv_lora_rank", latent.kv_rank, kMaxWidth);
  check_size("qk_rope_head_dim", latent.rope, kMaxWidth / c.heads);
  check_size("qk_nope_head_dim", c.head_size - latent.rope, kMaxWidth / c.heads);
  check_size("v_head_dim", latent.value_size, kMaxWidth / c.heads);
  if (latent.rope % 2 != 0) {
    throw Error(Errc::kUsage, "qk_rope_head_dim",
                fmt::format("{} is odd, but rotary embeddings turn pairs of elements", latent.rope));
  }
  if (c.kv_heads != c.heads) {
    throw Error(Errc::kUsage, "num_key_value_heads",
                fmt::format("{}, but latent attention has keys and values for each of its {} heads",
                            c.kv_heads, c.heads),
                "set it to num_attention_heads, or remove it");
  }
  if (latent.q_rank == 0 && c.qkv_bias()) {
    throw Error(Errc::kUsage, "attention_bias", "biases without q_lora_rank are not supported",
                "set attention_bias to false, or q_lora_rank to a number");
  }
  ZG_ASSERT(c.form().rotates && !c.form().joint_qkv && !c.block.fused && c.block.rope.partial == 1 &&
                c.block.head_norms == HeadNorms::kNone,
            "latent attention in blocks of {}", name_of(c.arch));
}

void check_experts(const ModelConfig& c) {
  const Experts& e = c.experts;
  if (!e.on()) return;
  check_size("the number of experts", e.count, kMaxExperts);
  check_size("num_experts_per_tok", e.router.per_token, e.count);
  check_size("the width inside an expert", e.inner, kMaxWidth);
  if (e.shared_inner != 0) check_size("the width inside the shared expert", e.shared_inner, kMaxWidth);
  ZG_ASSERT(c.form().gated && c.form().rotates && !c.norms_after() && !c.mlp_bias() && !c.block.fused,
            "experts in blocks of {}", name_of(c.arch));
  ZG_ASSERT(c.block.gate != Gate::kClampedPairs || (e.dense.empty() && e.shared_inner == 0),
            "gates in pairs outside of experts, in blocks of {}", name_of(c.arch));
}

void check_lora(const ModelConfig& c) {
  if (!c.lora.on()) return;
  check_size("lora.rank", c.lora.rank, kMaxWidth);
  check_positive("lora.alpha", c.lora.alpha);
  check_rate("lora.dropout", c.lora.dropout);
  ZG_ASSERT(c.lora.modules != 0, "adapters of no module of {}", name_of(c.arch));
}

}  // namespace

void validate(const ModelConfig& c) {
  const SizeNames& keys = model::family_of(c.arch).sizes;
  check_size("vocab_size", c.vocab_size, kMaxVocabulary);
  check_size(keys.context, c.context, kMaxWidth);
  check_size(keys.width, c.width, kMaxWidth);
  check_size(keys.layers, c.layers, kMaxLayers);
  check_size(keys.heads, c.heads, kMaxWidth);
  check_size(keys.kv_heads, c.kv_heads, kMaxWidth);
  check_size(keys.inner, c.inner, kMaxWidth);
  if (!c.form().rotates) {
    check_heads_without_rotation(c, keys);
  } else {
    check_size("head_dim", c.head_size, kMaxWidth / c.heads);
    check_heads(c, keys);
    check_latent(c);
    check_description(c);
  }
  check_parameters(c, keys);
  check_positive(keys.eps, c.norm_eps);
  check_rate("dropout.embedding", c.dropout.embedding);
  check_rate("dropout.residual", c.dropout.residual);
  check_lora(c);
  check_experts(c);
  if (!std::isfinite(c.init_std) || c.init_std < 0) {
    throw Error(Errc::kUsage, "initializer_range", fmt::format("{} is no standard deviation", c.init_std));
  }
}

}  // namespace zg
