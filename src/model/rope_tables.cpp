#include "model/rope_tables.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ziggurat/kernels/rope.hpp"

namespace zg::model {
namespace {

double& frequency(RopeTable& table, std::int64_t pair) {
  return table.frequency[static_cast<std::size_t>(pair)];
}

// Llama 3.1: pairs that rotate at least `high` times within the original context keep their frequency, pairs
// that rotate fewer than `low` times get theirs divided by the factor, and in between the frequency is
// interpolated.
void scale_as_llama3(const RopeScaling& s, RopeTable& table) {
  const double original = static_cast<double>(s.original);
  for (std::int64_t i = 0; i < table.pairs; ++i) {
    double& f = frequency(table, i);
    const double length = 2 * std::numbers::pi / f;
    if (length < original / s.high_freq_factor) continue;
    if (length > original / s.low_freq_factor) {
      f /= s.factor;
      continue;
    }
    const double smooth = (original / length - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
    f = (1 - smooth) * f / s.factor + smooth * f;
  }
}

// YaRN (Peng et al., 2023): a ramp over the pairs between the plain frequency and the divided one, and an
// amplitude that makes up for the flatter softmax.
void scale_as_yarn(const RopeScaling& s, double theta, RopeTable& table) {
  const double columns = static_cast<double>(2 * table.pairs);
  const auto pair_that_turns = [&](double times) {
    return columns * std::log(static_cast<double>(s.original) / (times * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  double low = pair_that_turns(s.beta_fast), high = pair_that_turns(s.beta_slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, columns - 1);
  if (low == high) high += 0.001;
  for (std::int64_t i = 0; i < table.pairs; ++i) {
    double& f = frequency(table, i);
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    f = f / s.factor * ramp + f * (1 - ramp);
  }
  const auto amplitude = [&](double scale) {
    return s.factor <= 1 ? 1.0 : 0.1 * scale * std::log(s.factor) + 1;
  };
  table.amplitude = s.attention_factor > 0                 ? s.attention_factor
                    : s.mscale > 0 && s.mscale_all_dim > 0 ? amplitude(s.mscale) / amplitude(s.mscale_all_dim)
                                                           : amplitude(1);
}

// LongRoPE (Ding et al., 2024), for sequences up to the original context.
void scale_as_longrope(const RopeScaling& s, RopeTable& table) {
  for (std::int64_t i = 0; i < table.pairs; ++i)
    frequency(table, i) /= s.short_factor[static_cast<std::size_t>(i)];
  table.amplitude = s.attention_factor > 0 ? s.attention_factor
                    : s.factor <= 1
                        ? 1
                        : std::sqrt(1 + std::log(s.factor) / std::log(static_cast<double>(s.original)));
}

}  // namespace

std::int64_t rope_pairs(const Rope& rope, std::int64_t head_size) {
  return static_cast<std::int64_t>(static_cast<double>(head_size) * rope.partial) / 2;
}

RopeTable rope_table_of(const Rope& rope, std::int64_t head_size) {
  using enum RopeScaling::Kind;
  RopeTable table = rope_table(rope.theta, rope_pairs(rope, head_size));
  table.interleaved = rope.interleaved;
  const RopeScaling& s = rope.scaling;
  switch (s.kind) {
    case kNone:
      break;
    case kLinear:
      for (std::int64_t i = 0; i < table.pairs; ++i) frequency(table, i) /= s.factor;
      break;
    case kLlama3:
      scale_as_llama3(s, table);
      break;
    case kYarn:
      scale_as_yarn(s, rope.theta, table);
      break;
    case kLongRope:
      scale_as_longrope(s, table);
      break;
  }
  return table;
}

}  // namespace zg::model
