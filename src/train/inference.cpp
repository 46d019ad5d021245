#include "train/inference.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

// A pass over this many tokens takes about as long as a pass over one token, since both read all weights
// once. So new tokens are computed one by one only if there are at most 1 / kOneByOne as many of them as
// tokens in all.
constexpr std::int64_t kOneByOne = 8;

}  // namespace

Inference::Inference(const std::string& directory, std::int64_t memory, const std::string& adapters)
    : model_(read_hf_config(directory), DType::kF32, host_ops()),
      weights_(directory, model_, memory, adapters),
      stream_("generate", HostStream::Mode::kInline),
      past_(static_cast<std::size_t>(model_.config().layers)) {}

void Inference::make_room(std::int64_t tokens) {
  if (tokens <= room_) return;
  const std::int64_t row = model_.past_columns() * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t room = std::min(round_up(tokens, 256), longest());
  for (Buffer& past : past_) {
    Buffer larger(room * row);
    if (!known_.empty()) {
      std::memcpy(larger.data(), past.data(), known_.size() * static_cast<std::size_t>(row));
    }
    past = std::move(larger);
  }
  room_ = room;
}

View Inference::pass(std::span<const std::int32_t> ids, std::int64_t first) {
  const ModelConfig& c = config();
  const auto time = static_cast<std::int64_t>(ids.size());
  BatchShape shape{1, time};
  shape.first = first;
  make_room(first + time);
  known_.resize(static_cast<std::size_t>(first));  // the pass overwrites the keys of later tokens
  x_.reserve(model_.checkpoint_bytes(shape));
  y_.reserve(model_.checkpoint_bytes(shape));
  saved_.reserve(model_.saved_bytes(shape));
  routing_.reserve(model_.routing_bytes(shape));
  sums_.reserve(model_.expert_sums_bytes(shape));
  workspace_.reserve(std::max({model_.block_workspace_bytes(shape), model_.head_workspace_bytes(shape),
                               model_.embedding_workspace_bytes(shape)}));
  View in(x_.data(), DType::kF32, time, c.width), out(y_.data(), DType::kF32, time, c.width);
  const View tokens(const_cast<std::int32_t*>(ids.data()), DType::kI32, 1, time);
  model_.run(stream_, ModelCall::kEmbedding,
             {.shape = shape,
              .weights = weights_.use(0),
              .ids = tokens,
              .output = in,
              .workspace = workspace_.data()});
  for (std::int64_t l = 0; l < c.layers; ++l) {
    const View past(past_[static_cast<std::size_t>(l)].data(), DType::kF32, room_, model_.past_columns());
    UnitCall call{.shape = shape,
                  .layer = l,
                  .weights = weights_.use(model_.unit_of(l)),
                  .experts = {.routing = routing_.data(),
                              .sums = sums_.data(),
                              .choice_bias = weights_.choice_bias(l)},
                  .input = in,
                  .output = out,
                  .saved = saved_.data(),
                  .workspace = workspace_.data(),
                  .past = past};
    model_.run(stream_, ModelCall::kBlockNext, call);
    if (c.has_experts(l)) add_experts(call);
    std::swap(in, out);
  }
  known_.insert(known_.end(), ids.begin(), ids.end());
  computed_ += time;
  return in;
}

// Of the layer's experts only those are fetched that some token has chosen; the last ones end the layer.
void Inference::add_experts(UnitCall call) {
  const View numbers = model_.starts_in(call.shape, call.experts.routing);
  const auto* const starts = static_cast<const std::int32_t*>(numbers.data);
  call.experts.starts = starts;
  const std::size_t block = model_.unit_of(call.layer), end = model_.unit_of(call.layer + 1);
  for (std::size_t u = block + 1; u < end; ++u) {
    const Unit& unit = model_.units()[u];
    const bool idle = starts[unit.first_expert] == starts[unit.first_expert + unit.expert_count];
    if (idle && u + 1 < end) continue;
    call.experts.group = static_cast<std::int64_t>(u - block - 1);
    call.weights = idle ? View() : weights_.use(u);
    model_.run(stream_, ModelCall::kExperts, call);
  }
}

UnitCall Inference::head_call(const View& rows) {
  const std::size_t head = model_.units().size() - 1;
  return {.shape = {1, rows.rows},
          .weights = weights_.use(head),
          .input = rows,
          .workspace = workspace_.data(),
          .table = weights_.use(config().tied ? 0 : head)};
}

std::vector<float> Inference::logits_after(std::span<const std::int32_t> ids, std::int64_t room) {
  const ModelConfig& c = config();
  ids = ids.last(std::min(ids.size(), static_cast<std::size_t>(longest())));
  const auto all = static_cast<std::int64_t>(ids.size());
  auto shared = static_cast<std::int64_t>(
      std::mismatch(ids.begin(), ids.end(), known_.begin(), known_.end()).first - ids.begin());
  shared = std::min(shared, all - 1);  // the head needs the last token's row
  const std::int64_t most = weights_.read_anew() > 0 ? 1 : std::max<std::int64_t>(1, all / kOneByOne);
  if (all - shared > most) shared = 0;
  make_room(std::min(std::max(room, all), longest()));
  View rows;
  if (shared == 0) {
    rows = pass(ids, 0);
  } else {
    for (std::int64_t i = shared; i < all; ++i) rows = pass(ids.subspan(static_cast<std::size_t>(i), 1), i);
  }
  std::vector<float> logits(static_cast<std::size_t>(c.vocab_size));
  UnitCall call = head_call(rows.row_range(rows.rows - 1, 1));
  call.logits = View(logits.data(), DType::kF32, 1, c.vocab_size);
  model_.run(stream_, ModelCall::kHeadLogits, call);
  for (float& logit : logits) {  // a logit that is not finite stays so, for the caller to check
    if (std::isfinite(logit)) logit = static_cast<float>(capped_logit(c, static_cast<double>(logit)));
  }
  return logits;
}

double Inference::loss_of(std::span<const std::int32_t> ids, std::span<const std::int32_t> targets) {
  ZG_ASSERT_EQ(ids.size(), targets.size());
  const View rows = pass(ids, 0);
  double loss = 0;
  UnitCall call = head_call(rows);
  call.targets = View(const_cast<std::int32_t*>(targets.data()), DType::kI32, 1, rows.rows);
  call.loss_sum = View(&loss, DType::kF64, 1, 1);
  model_.run(stream_, ModelCall::kHeadLoss, call);
  return loss;
}

}  // namespace zg
