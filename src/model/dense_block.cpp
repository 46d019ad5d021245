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

// Matrices of products with the same input.
struct Products {
  std::vector<std::size_t> matrices;
  bool first = false;  // of a branch: their gradients of weights are computed while their input's is summed
};

// The matrices of a block in the order of its forward.
std::vector<Products> products_of(const ModelConfig& c, std::int64_t layer) {
  const BlockParams p(c, layer);
  std::vector<Products> all;
  if (c.block.latent) {
    all.push_back({{p.q, p.k}, true});
    if (p.q_b != BlockParams::kNone) all.push_back({{p.q_b}});
    all.push_back({{p.kv_b}});
  } else {
    all.push_back({c.form().joint_qkv ? std::vector{p.q} : std::vector{p.q, p.k, p.v}, true});
  }
  all.push_back({{p.o}});
  if (p.gate == BlockParams::kNone) return all;
  all.push_back({c.form().gated ? std::vector{p.gate, p.up} : std::vector{p.gate}, true});
  all.push_back({{p.down}});
  return all;
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
  if (shard.degree == 1 && shard.experts.degree == 1) return calls;
  const std::int64_t elements = residual_rows(shard, batch) * shape_.whole.width;
  const AdapterList adapters(shape_.whole, layer());
  const auto sum = [&] {
    if (shard.degree > 1) calls.push_back(sum_over_parts(shard, elements, shape_.dtype));
  };
  const auto of_experts = [&](TensorParallelCall::Kind kind, std::int64_t columns, DType dtype) {
    if (shard.experts.degree > 1) calls.push_back({kind, batch.rows() * columns, dtype, true});
  };
  const auto gather = [&] {
    if (shard.sequence) calls.push_back({TensorParallelCall::Kind::kAllGather, elements, shape_.dtype});
  };
  // The branch of the MLP, or of the router, and then the branch of attention.
  const DType accumulator = accumulator_of(shape_.dtype);
  const std::int64_t per_token = shape_.whole.experts.router.per_token;
  const auto numbers = [&](std::int64_t columns) {
    if (shard.degree > 1)
      calls.push_back({TensorParallelCall::Kind::kAllReduce, batch.rows() * columns, accumulator});
  };
  const auto router = [&] {
    of_experts(TensorParallelCall::Kind::kReduceScatter, shape_.whole.width, accumulator);
    of_experts(TensorParallelCall::Kind::kReduceScatter, per_token, accumulator);
    numbers(per_token);
    if (shape_.whole.experts.shared_gate) numbers(1);
    sum();
  };
  switch (call) {
    case kBlock:
    case kBlockAgain:
      gather(), sum(), gather();
      if (routes() && call == kBlock) {
        of_experts(TensorParallelCall::Kind::kAllGather, shape_.whole.width, shape_.dtype);
        of_experts(TensorParallelCall::Kind::kAllGather, per_token, DType::kI32);
        of_experts(TensorParallelCall::Kind::kAllGather, per_token, accumulator);
      }
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
      for (const auto input :
           {AdapterInput::kQkv, AdapterInput::kO, AdapterInput::kGateUp, AdapterInput::kDown}) {
        if (!shape_.whole.lora.on() || adapters.has(input)) gather();
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
    const bool has_mlp = BlockParams(shape_.whole, layer()).gate != BlockParams::kNone;
    if (call == kBlockAgain && has_mlp && !shape_.whole.norms_after()) products.pop_back();
    for (const auto& [matrices, first] : products) add(matrices, kWeight);
    return uses;
  }
  const bool input = call == kBlockBackward || call == kBlockBackwardFrozen || call == kBlockBackwardInput;
  const bool weight = call == kBlockBackward || call == kBlockBackwardWeight;
  for (std::size_t i = products.size(); i-- > 0;) {
    const auto& [matrices, first] = products[i];
    if (weight && !first) add(matrices, kGradient);
    if (input) add(matrices, kWeight);
    if (weight && first) add(matrices, kGradient);
  }
  return uses;
}

double DenseBlock::forward_products(std::int64_t time) const {
  const ModelConfig& c = shape_.whole;
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const auto results = number(c.result_columns());
  const double mlp_matrices = c.form().gated ? 3 : 2;
  const Experts& e = c.experts;
  const double inside = routes() ? mlp_matrices * static_cast<double>(e.shared_inner) +
                                       static_cast<double>(e.count + (e.shared_gate ? 1 : 0))
                                 : mlp_matrices * static_cast<double>(c.inner);
  double weights = number(c.width) * (number(first_columns(c)) + results + inside);
  if (c.block.latent) {
    weights += number(c.block.latent->q_rank) * number(c.query_columns()) +
               number(c.block.latent->kv_rank) * number(c.latent_heads().joint_columns());
  }
  const auto seen = static_cast<double>(c.has_window(layer()) ? std::min(c.block.window, time) : time);
  return weights + (number(c.query_columns()) + results) / 2 * seen * (2 - seen / number(time));
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
