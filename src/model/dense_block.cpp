#include "model/dense_block.hpp"

#include <algorithm>

#include "model/adapters.hpp"
#include "model/block_attention.hpp"
#include "model/dense_buffers.hpp"
#include "model/dense_pass.hpp"
#include "model/units.hpp"

namespace zg::model {
namespace {

using enum ModelCall;

// The matrices of a block in the order of its forward. For each branch: the matrices of the first products,
// and then the matrix of the last product.
std::vector<std::vector<std::size_t>> products_of(const ModelConfig& c, std::int64_t layer) {
  const BlockParams p(c, layer);
  const auto qkv = c.form().joint_qkv ? std::vector{p.q} : std::vector{p.q, p.k, p.v};
  if (p.gate == BlockParams::kNone) return {qkv, {p.o}};
  const auto mlp = c.form().gated ? std::vector{p.gate, p.up} : std::vector{p.gate};
  return {qkv, {p.o}, mlp, {p.down}};
}

}  // namespace

std::int64_t DenseBlock::saved_bytes(BatchShape batch, Backward how) const {
  return DenseSaved({config(), shape_.shard, shape_.dtype, batch, how, layer()}, nullptr).bytes;
}

std::int64_t DenseBlock::scratch_bytes(BatchShape batch, Backward how) const {
  const AttentionRule rule = attention_rule(shape_.whole, layer(), batch);
  return DenseWorkspace({config(), shape_.shard, shape_.dtype, batch, how, layer()}, rule, *shape_.sizes,
                        nullptr)
      .bytes;
}

std::int64_t DenseBlock::workspace_bytes(BatchShape batch, Backward how) const {
  const View sums = tile_sums(batch, nullptr);
  return scratch_bytes(batch, how) + sums.count() * static_cast<std::int64_t>(size_of(sums.dtype));
}

View DenseBlock::tile_sums(BatchShape batch, void* at) const {
  const DType accumulator = accumulator_of(shape_.dtype);
  if (!unit().in_tiles() || shape_.dtype == accumulator) return {};
  std::int64_t widest = 0;
  for (const Param& p : unit().params) {
    if (!p.vector) widest = std::max(widest, p.cols);
  }
  return {at, accumulator, batch.rows(), widest};
}

std::vector<TensorParallelCall> DenseBlock::exchanges(ModelCall call, BatchShape batch) const {
  std::vector<TensorParallelCall> calls;
  const TensorShard& shard = shape_.shard;
  if (shard.degree == 1) return calls;
  const std::int64_t elements = residual_rows(shard, batch) * shape_.whole.width;
  const AdapterList adapters(shape_.whole, layer());
  const auto sum = [&] { calls.push_back(sum_over_parts(shard, elements, shape_.dtype)); };
  const auto gather = [&] {
    if (shard.sequence) calls.push_back({TensorParallelCall::Kind::kAllGather, elements, shape_.dtype});
  };
  // The branch of the MLP, or of the router, and then the branch of attention.
  const auto numbers = [&](std::int64_t columns) {
    calls.push_back(
        {TensorParallelCall::Kind::kAllReduce, batch.rows() * columns, accumulator_of(shape_.dtype)});
  };
  const auto router = [&] {
    numbers(shape_.whole.experts.router.per_token);
    if (shape_.whole.experts.shared_gate) numbers(1);
    sum();
  };
  switch (call) {
    case kBlock:
    case kBlockAgain:
      gather(), sum(), gather();
      if (!routes() && (call == kBlock || shape_.whole.norms_after())) sum();
      break;
    case kBlockBackward:
      routes() ? router() : (gather(), gather(), sum());
      gather(), gather(), sum();
      break;
    case kBlockBackwardFrozen:  // adapters, too, need the inputs of a branch's first products
      for (const auto input : {AdapterInput::kGateUp, AdapterInput::kQkv}) {
        if (routes() && input == AdapterInput::kGateUp) {
          router();
          continue;
        }
        gather();
        if (adapters.has(input)) gather();
        sum();
      }
      break;
    case kBlockBackwardInput:
      for (int branch = 0; branch < 2; ++branch) gather(), sum();
      break;
    case kBlockBackwardWeight:
      for (int input = 0; input < kAdapterInputs; ++input) {
        if (!shape_.whole.lora.on() || adapters.has(static_cast<AdapterInput>(input))) gather();
      }
      break;
    default:
      break;  // kBlockNext is for whole models only
  }
  return calls;
}

std::vector<ContextCall> DenseBlock::context_calls(BatchShape batch, Direction direction) const {
  return model::context_calls(config(), shape_.dtype, batch, direction);
}

std::vector<TileUse> DenseBlock::tile_uses(ModelCall call) const {
  using enum TileUse::Kind;
  std::vector<TileUse> uses;
  if (!unit().in_tiles()) return uses;
  const auto add = [&](const std::vector<std::size_t>& matrices, TileUse::Kind kind) {
    for (const std::size_t matrix : matrices) add_tile_uses(unit(), matrix, {kind}, uses);
  };
  auto products = products_of(shape_.whole, layer());
  if (call == kBlock || call == kBlockAgain) {
    const bool has_mlp = products.size() == 4;
    if (call == kBlockAgain && has_mlp && !shape_.whole.norms_after()) products.pop_back();
    for (const auto& matrices : products) add(matrices, kWeight);
    return uses;
  }
  const bool input = call == kBlockBackward || call == kBlockBackwardFrozen || call == kBlockBackwardInput;
  const bool weight = call == kBlockBackward || call == kBlockBackwardWeight;
  for (std::size_t i = products.size(); i-- > 0;) {
    const bool of_input = i % 2 == 0;  // first products: their sum overlaps the weights' gradients
    if (weight && !of_input) add(products[i], kGradient);
    if (input) add(products[i], kWeight);
    if (weight && of_input) add(products[i], kGradient);
  }
  return uses;
}

double DenseBlock::forward_products(std::int64_t time) const {
  const ModelConfig& c = shape_.whole;
  const auto q = static_cast<double>(c.heads * c.head_size),
             kv = static_cast<double>(c.kv_heads * c.head_size);
  const double mlp_matrices = c.form().gated ? 3 : 2;
  const Experts& e = c.experts;
  const double inside = routes() ? mlp_matrices * static_cast<double>(e.shared_inner) +
                                       static_cast<double>(e.count + (e.shared_gate ? 1 : 0))
                                 : mlp_matrices * static_cast<double>(c.inner);
  const double weights = static_cast<double>(c.width) * (2 * q + 2 * kv + inside);
  const auto seen = static_cast<double>(c.has_window(layer()) ? std::min(c.block.window, time) : time);
  return weights + q * seen * (2 - seen / static_cast<double>(time));
}

void DenseBlock::run(const Call& given) const {
  Call call = given;
  call.rule = attention_rule(shape_.whole, layer(), call.shape);
  call.rope = rope_;
  switch (call.model_call) {
    case kBlock:
    case kBlockAgain:
    case kBlockNext:
      return dense_forward(call);
    case kBlockBackward:
    case kBlockBackwardFrozen:
    case kBlockBackwardInput: {
      const std::int64_t scratch = scratch_bytes(call.shape, sizes_of(call.model_call));
      call.sums = tile_sums(call.shape, static_cast<char*>(call.workspace) + scratch);
      return dense_backward(call);
    }
    case kBlockBackwardWeight:
      return dense_backward_weight(call);
    default:
      ZG_ASSERT(false, "call {} is none of a block", static_cast<int>(call.model_call));
  }
}

}  // namespace zg::model
