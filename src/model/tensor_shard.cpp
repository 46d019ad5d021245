#include "model/tensor_shard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "model/head.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/attention_heads.hpp"

namespace zg {
namespace {

// The length of a run: the query heads of one rank that share a key and value head.
std::int64_t run_of_heads(const ModelConfig& whole, std::int64_t parts) {
  return std::gcd(whole.heads / whole.kv_heads, whole.heads / parts);
}

std::string divisors_of(std::int64_t n) {
  std::string text;
  for (std::int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", d);
  }
  return text;
}

}  // namespace

void validate_parts(const ModelConfig& c, int parts) {
  constexpr const char* kKey = "parallel.tensor";
  std::int64_t most = std::gcd(c.heads, c.inner);
  if (c.experts.on()) most = std::gcd(most, std::gcd(c.experts.inner, c.experts.shared_inner));
  const auto divides = [&](std::int64_t n, const char* what) {
    if (n % parts == 0) return;
    throw Error(Errc::kUsage, kKey, fmt::format("{} parts do not divide the {} {}", parts, n, what),
                fmt::format("heads and inner width are divided by {}", divisors_of(most)));
  };
  if (parts > 1 && c.block.head_norms == HeadNorms::kAll) {
    throw Error(
        Errc::kUsage, kKey,
        fmt::format("{} normalises queries and keys over all heads together, of which a shard has some",
                    title_of(c.arch)),
        "set parallel.tensor to 1, and spread the model by zero_optimization.stage 3 or "
        "parallel.pipeline");
  }
  divides(c.heads, "heads of attention");
  divides(c.inner, "elements of the inner width");
  if (c.experts.on()) {
    divides(c.experts.inner, "elements of the width inside an expert");
    divides(c.experts.shared_inner, "elements of the width inside the shared expert");
  }
  if (model::tokens_of(c, {parts, parts - 1}).count > 0) return;
  throw Error(Errc::kUsage, kKey,
              fmt::format("of {} parts the last has no token of a vocabulary of {}", parts, c.vocab_size),
              "lower parallel.tensor");
}

void validate_expert_ranks(const ModelConfig& c, int ranks) {
  constexpr const char* kKey = "parallel.experts";
  if (ranks > 1 && !c.experts.on()) {
    throw Error(
        Errc::kUsage, kKey,
        fmt::format("is {}, and a {} has no experts that ranks could divide", ranks, title_of(c.arch)),
        "remove the key; zero_optimization.stage 3 or parallel.tensor spread a dense model");
  }
  if (ranks == 1 || c.experts.count % ranks == 0) return;
  throw Error(Errc::kUsage, kKey,
              fmt::format("{} ranks do not divide the {} experts of a layer", ranks, c.experts.count),
              fmt::format("the experts are divided by {}", divisors_of(c.experts.count)));
}

AttentionHeads heads_of_part(const ModelConfig& c, int parts) {
  const std::int64_t heads = c.heads / parts;
  return {heads, heads / run_of_heads(c, parts)};
}

namespace model {

ModelConfig shard_config(const ModelConfig& whole, const TensorShard& shard) {
  ModelConfig c = whole;
  const AttentionHeads heads = heads_of_part(whole, shard.degree);
  c.heads = heads.queries, c.kv_heads = heads.keys;
  c.inner = whole.inner / shard.degree;
  c.experts.inner = whole.experts.inner / shard.degree;
  c.experts.shared_inner = whole.experts.shared_inner / shard.degree;
  c.vocab_size = (whole.vocab_size + shard.degree - 1) / shard.degree;
  return c;
}

Tokens tokens_of(const ModelConfig& whole, const TensorShard& shard) {
  const std::int64_t each = shard_config(whole, shard).vocab_size, first = shard.index * each;
  return {first, std::min(each, whole.vocab_size - first)};
}

std::int64_t kv_head_of(const ModelConfig& whole, const TensorShard& shard, std::int64_t i) {
  const std::int64_t query =
      shard.index * (whole.heads / shard.degree) + i * run_of_heads(whole, shard.degree);
  return query / (whole.heads / whole.kv_heads);
}

std::vector<Band> all_lines(const TensorShard& shard, std::int64_t lines) {
  return {{0, 0, lines, shard.index == 0}};
}

std::vector<Band> piece_of_lines(const TensorShard& shard, std::int64_t lines, std::int64_t blocks) {
  std::vector<Band> bands;
  const std::int64_t piece = lines / shard.degree;
  if (shard.degree == 1) return {{0, 0, blocks * lines}};
  for (std::int64_t b = 0; b < blocks; ++b)
    bands.push_back({b * piece, b * lines + shard.index * piece, piece});
  return bands;
}

std::vector<Band> kv_lines(const ModelConfig& whole, const TensorShard& shard) {
  if (whole.kv_heads % shard.degree == 0) return piece_of_lines(shard, whole.kv_heads * whole.head_size);
  std::vector<Band> bands;
  // A head is counted by the first rank that holds it, and there only in its first band.
  std::int64_t before =
      shard.index == 0 ? -1
                       : (shard.index * (whole.heads / shard.degree) - 1) / (whole.heads / whole.kv_heads);
  for (std::int64_t i = 0; i < shard_config(whole, shard).kv_heads; ++i) {
    const std::int64_t head = kv_head_of(whole, shard, i);
    bands.push_back({i * whole.head_size, head * whole.head_size, whole.head_size, head != before});
    before = head;
  }
  return bands;
}

}  // namespace model

std::vector<TensorParallelCall> Model::exchanges_of(std::size_t unit, ModelCall call,
                                                    BatchShape shape) const {
  std::vector<TensorParallelCall> calls;
  if (shard().degree == 1 && shard().experts.degree == 1) return calls;
  const std::int64_t elements = residual_rows(shape) * config().width;
  const auto sum = [&] { calls.push_back(model::sum_over_parts(shard(), elements, dtype())); };
  const auto gather = [&] {
    if (shard().sequence) calls.push_back({TensorParallelCall::Kind::kAllGather, elements, dtype()});
  };
  switch (call) {
    case ModelCall::kEmbedding:
      sum();
      break;
    case ModelCall::kEmbeddingBackward:
      gather();
      break;
    case ModelCall::kHeadLogits:
      break;  // for whole models only
    case ModelCall::kHeadLoss:
    case ModelCall::kHeadLossAndGradient: {
      gather();
      const std::int64_t chunk = head_chunk_rows(shape), tiles = std::max<std::int64_t>(1, head_room().tiles);
      for (std::int64_t first = 0; first < shape.rows(); first += chunk)
        calls.push_back({TensorParallelCall::Kind::kAllGather,
                         3 * tiles * std::min(chunk, shape.rows() - first), accumulator_dtype()});
      if (call == ModelCall::kHeadLossAndGradient) sum();
      break;
    }
    default:
      return block_of(unit).exchanges(call, shape);
  }
  return calls;
}

}  // namespace zg
