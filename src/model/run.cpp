// Model::run(): checks the operands of a call, and passes them to the embedding, the block or the head.
#include "model/embedding.hpp"
#include "model/head.hpp"
#include "model/structure.hpp"
#include "model/units.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {
namespace {

using enum ModelCall;

// The operands of UnitCall that only some calls use, as bits.
enum Operands : unsigned {
  kWeights = 1u << 0,
  kGrads = 1u << 1,
  kIds = 1u << 2,
  kInput = 1u << 3,
  kOutput = 1u << 4,
  kActivationGradient = 1u << 5,
  kSaved = 1u << 6,
  kWorkspace = 1u << 7,
  kPast = 1u << 8,
  kTable = 1u << 9,
  kTableGrads = 1u << 10,
  kTargets = 1u << 11,
  kLossSum = 1u << 12,
  kLogits = 1u << 13,
  kAdapterWeights = 1u << 14,
  kAdapterGrads = 1u << 15,
  kExpertOperands = 1u << 16
};

enum class Part { kEmbedding, kBlock, kExperts, kHead };  // the kinds of units

// The operands that a kind of call needs, and those that it may have in addition. Adapters are needed if the
// block has some.
struct CallForm {
  const char* name;
  Part part;
  unsigned needs, may;
};
CallForm form_of(ModelCall kind) {
  constexpr unsigned kBackward = kWeights | kInput | kActivationGradient | kSaved | kWorkspace;
  constexpr unsigned kHead = kWeights | kTable | kInput | kWorkspace;
  switch (kind) {
    case kEmbedding:
      return {"embedding", Part::kEmbedding, kWeights | kIds | kOutput, kWorkspace};
    case kEmbeddingBackward:
      return {"backward of the embedding", Part::kEmbedding, kGrads | kIds | kActivationGradient, kWorkspace};
    case kBlock:
      return {"block", Part::kBlock, kWeights | kInput | kOutput | kSaved | kWorkspace, kAdapterWeights};
    case kBlockAgain:
      return {"block again", Part::kBlock, kWeights | kInput | kSaved | kWorkspace, kAdapterWeights};
    case kBlockNext:
      return {"next tokens of a block", Part::kBlock,
              kWeights | kInput | kOutput | kSaved | kWorkspace | kPast, kAdapterWeights};
    case kBlockBackward:
      return {"backward of a block", Part::kBlock, kBackward | kGrads, kAdapterWeights};
    case kBlockBackwardFrozen:
      return {"backward of a frozen block", Part::kBlock, kBackward, kAdapterWeights | kAdapterGrads};
    case kBlockBackwardInput:
      return {"first half of a backward", Part::kBlock, kBackward, kAdapterWeights};
    case kBlockBackwardWeight:
      return {"second half of a backward", Part::kBlock, kInput | kSaved | kWorkspace,
              kGrads | kAdapterGrads};
    case kExperts:
      return {"experts", Part::kExperts, kWorkspace | kExpertOperands, kWeights | kOutput | kAdapterWeights};
    case kExpertsBackward:
      return {"backward of experts", Part::kExperts,
              kWeights | kGrads | kActivationGradient | kWorkspace | kExpertOperands, 0};
    case kExpertsBackwardFrozen:
      return {"backward of frozen experts", Part::kExperts,
              kWeights | kActivationGradient | kWorkspace | kExpertOperands, kAdapterWeights | kAdapterGrads};
    case kHeadLoss:
      return {"loss", Part::kHead, kHead | kTargets | kLossSum, 0};
    case kHeadLossAndGradient:
      return {"loss and its gradient", Part::kHead, kHead | kTargets | kLossSum | kActivationGradient,
              kGrads | kTableGrads};
    case kHeadLogits:
      return {"logits", Part::kHead, kHead | kLogits, 0};
  }
  ZG_ASSERT(false, "call {}", static_cast<int>(kind));
  return {};
}

struct NamedView {
  Operands operand;
  const char* name;
  View& (*of)(UnitCall&);
};
constexpr NamedView kViews[] = {
    {kWeights, "weights", [](UnitCall& c) -> View& { return c.weights; }},
    {kGrads, "grads", [](UnitCall& c) -> View& { return c.grads; }},
    {kIds, "ids", [](UnitCall& c) -> View& { return c.ids; }},
    {kInput, "input", [](UnitCall& c) -> View& { return c.input; }},
    {kOutput, "output", [](UnitCall& c) -> View& { return c.output; }},
    {kActivationGradient, "activation_gradient", [](UnitCall& c) -> View& { return c.activation_gradient; }},
    {kPast, "past", [](UnitCall& c) -> View& { return c.past; }},
    {kTable, "table", [](UnitCall& c) -> View& { return c.table; }},
    {kTableGrads, "table_grads", [](UnitCall& c) -> View& { return c.table_grads; }},
    {kTargets, "targets", [](UnitCall& c) -> View& { return c.targets; }},
    {kLossSum, "loss_sum", [](UnitCall& c) -> View& { return c.loss_sum; }},
    {kLogits, "logits", [](UnitCall& c) -> View& { return c.logits; }},
    {kAdapterWeights, "adapters.weights", [](UnitCall& c) -> View& { return c.adapters.weights; }},
    {kAdapterGrads, "adapters.grads", [](UnitCall& c) -> View& { return c.adapters.grads; }}};

// The call without the operands that its kind ignores. Operands that the kind needs must not be null.
UnitCall only_taken(const CallForm& form, UnitCall c) {
  const auto expect = [&](Operands operand, const char* name, bool given) {
    ZG_ASSERT(given || (form.needs & operand) == 0, "{}: the operand {} is missing", form.name, name);
  };
  for (const NamedView& named : kViews) {
    View& view = named.of(c);
    expect(named.operand, named.name, static_cast<bool>(view));
    if (((form.needs | form.may) & named.operand) == 0) view = {};
  }
  expect(kSaved, "saved", c.saved != nullptr);
  expect(kWorkspace, "workspace", c.workspace != nullptr);
  expect(kExpertOperands, "experts.routing", c.experts.routing != nullptr);
  expect(kExpertOperands, "experts.sums", c.experts.sums != nullptr);
  expect(kExpertOperands, "experts.starts", c.experts.starts != nullptr);
  return c;
}

// Checks the sizes and types of a call's operands, after only_taken().
class Checks {
 public:
  Checks(const Model& model, ModelCall kind, const CallForm& form, const UnitCall& call)
      : model_(model),
        kind_(kind),
        form_(form),
        call_(call),
        t_(model.dtype()),
        a_(model.accumulator_dtype()) {}

  // unit: the call's; table: the unit with the output matrix.
  void run(const Unit& unit, const Unit& table) const {
    shape();
    flat(call_.weights, unit, t_);
    flat(call_.grads, unit, a_);
    flat(call_.table, table, t_);
    flat(call_.table_grads, table, a_);
    for (const View& v : {call_.input, call_.output, call_.activation_gradient})
      rows(v, model_.residual_rows(call_.shape), model_.config().width, t_);
    ZG_ASSERT(!call_.input ||
              (call_.input.data != call_.output.data && call_.input.data != call_.activation_gradient.data));
    for (const View& v : {call_.ids, call_.targets}) ints(v, call_.shape.rows());
    ZG_ASSERT(!call_.documents || call_.shape.documents, "the shape says that there are no documents");
    if (call_.shape.documents) ints(call_.documents, call_.shape.document_numbers());
    if (form_.part == Part::kBlock) return block(unit);
    if (form_.part == Part::kExperts) return experts(unit);
    if (form_.part == Part::kHead) return head(table);
    ZG_ASSERT_EQ(unit.in_tiles(), call_.tiles != nullptr);
  }

 private:
  void shape() const {
    const BatchShape& s = call_.shape;
    ZG_ASSERT_LE(1, s.sequences);
    ZG_ASSERT_LE(1, s.time);
    ZG_ASSERT_LE(s.first + s.time * s.sequence_shard.degree, model_.config().longest_sequence());
    const TensorShard& shard = model_.shard();
    ZG_ASSERT(!shard.sequence || s.rows() % shard.degree == 0, "{} rows for {} tensor shards", s.rows(),
              shard.degree);
  }
  void flat(const View& view, const Unit& unit, DType dtype) const {
    if (view) elements(view, unit, unit.tiles.front(), dtype);
  }
  void elements(const View& view, const Unit& unit, const Tile& tile, DType dtype) const {
    ZG_ASSERT(view.rows == 1 && view.cols == tile.count && view.dtype == dtype,
              "{}: {} has {} elements of {}, given {} x {} of {}", form_.name, unit.name, tile.count,
              name_of(dtype), view.rows, view.cols, name_of(view.dtype));
  }
  void rows(const View& x, std::int64_t rows, std::int64_t columns, DType dtype) const {
    ZG_ASSERT(!x || (x.rows == rows && x.cols == columns && x.dtype == dtype),
              "{}: {} x {} of {}, not {} x {} of {}", form_.name, x.rows, x.cols, name_of(x.dtype), rows,
              columns, name_of(dtype));
  }
  void ints(const View& view, std::int64_t count) const { rows(view, 1, count, DType::kI32); }

  void block(const Unit& unit) const {
    const bool second_half = kind_ == kBlockBackwardWeight;
    ZG_ASSERT_EQ(unit.in_tiles() && (!second_half || call_.grads), call_.tiles != nullptr);
    ZG_ASSERT(call_.shape.sequence_shard.degree == 1 || call_.context != nullptr || second_half,
              "a part of {} of each sequence, and no others", call_.shape.sequence_shard.degree);
    adapters(unit);
    ZG_ASSERT(!second_half || unit.adapted || call_.grads, "{} has no gradients", unit.name);
    if (model_.config().has_experts(unit.layer)) {
      ZG_ASSERT(call_.experts.routing != nullptr && call_.experts.sums != nullptr,
                "{}: {} has experts, and no operands of experts", form_.name, unit.name);
      ZG_ASSERT(kind_ != kBlockBackwardInput && !second_half,
                "a layer with experts has no halves of a backward");
    }
    if (kind_ == kBlockNext) next(unit);
  }
  void experts(const Unit& unit) const {
    ZG_ASSERT(unit.is_experts(), "{}: {} has no experts", form_.name, unit.name);
    ZG_ASSERT(!unit.in_tiles() && call_.tiles == nullptr, "{}: {} is cut", form_.name, unit.name);
    adapters(unit);
  }
  // The adapters are a tile of their own, the last one, and the only parameters of their unit that are
  // trained.
  void adapters(const Unit& unit) const {
    const auto check = [&](Operands operand, const View& view, DType dtype) {
      if ((form_.may & operand) == 0) return;
      ZG_ASSERT_EQ(unit.adapted, static_cast<bool>(view));
      if (view) elements(view, unit, unit.tiles.back(), dtype);
    };
    check(kAdapterWeights, call_.adapters.weights, t_);
    check(kAdapterGrads, call_.adapters.grads, a_);
    ZG_ASSERT(!unit.adapted || !call_.grads, "{} has adapters, and its own gradients", unit.name);
  }
  void next(const Unit& unit) const {
    const BatchShape& s = call_.shape;
    rows(call_.past, call_.past.rows, model_.past_columns(), t_);
    ZG_ASSERT(model_.shard().degree == 1 && !unit.in_tiles() && s.sequence_shard.degree == 1 &&
              s.sequences == 1);
    ZG_ASSERT(s.first == 0 || s.time == 1, "{} tokens behind {}", s.time, s.first);
    ZG_ASSERT_EQ(t_, a_);
    ZG_ASSERT_LE(s.first + s.time, call_.past.rows);
  }
  void head(const Unit& table) const {
    ZG_ASSERT_EQ(table.in_tiles(), call_.tiles != nullptr);
    rows(call_.loss_sum, 1, 1, DType::kF64);
    rows(call_.logits, call_.shape.rows(), model_.config().vocab_size, a_);
    ZG_ASSERT(kind_ != kHeadLogits || (model_.shard().degree == 1 && !table.in_tiles()),
              "a shard, or a tile, has the logits of some tokens alone");
  }

  const Model& model_;
  const ModelCall kind_;
  const CallForm& form_;
  const UnitCall& call_;
  const DType t_, a_;
};

// The unit of a call on a block.
std::size_t block_unit(const Model& model, const CallForm& form, const UnitCall& call) {
  const std::size_t unit = model.unit_of(call.layer);
  if (form.part == Part::kBlock) return unit;
  ZG_ASSERT(call.experts.group >= 0 &&
                unit + 1 + static_cast<std::size_t>(call.experts.group) < model.unit_of(call.layer + 1),
            "{}: unit {} with experts of layer {}", form.name, call.experts.group, call.layer);
  return unit + 1 + static_cast<std::size_t>(call.experts.group);
}

}  // namespace

void Model::run(Stream& s, ModelCall kind, const UnitCall& given) const {
  const model::Call call = call_of(s, kind, given);
  switch (kind) {
    case kEmbedding:
      return model::embedding_forward(call);
    case kEmbeddingBackward:
      return model::embedding_backward(call);
    case kHeadLoss:
    case kHeadLossAndGradient:
    case kHeadLogits:
      return model::run_head(call, table_call(call));
    default:
      return block_of(block_unit(*this, form_of(kind), given)).run(call);
  }
}

// The call in the form in which it is computed. The operands have been checked.
model::Call Model::call_of(Stream& s, ModelCall kind, const UnitCall& given) const {
  const model::ModelShape& m = structure_->shape;
  ZG_ASSERT(ops_ != nullptr, "a model that was made to plan with cannot compute");
  ZG_ASSERT((m.shard.degree == 1 || exchange_ != nullptr) &&
                (m.shard.experts.degree == 1 || expert_exchange_ != nullptr),
            "a shard computes with the others of its group alone");
  const CallForm form = form_of(kind);
  const UnitCall taken = only_taken(form, given);
  const bool is_block = form.part == Part::kBlock || form.part == Part::kExperts;
  const Block* const block = is_block ? &block_of(block_unit(*this, form, taken)) : nullptr;
  const Unit& unit = is_block                        ? block->unit()
                     : form.part == Part::kEmbedding ? units().front()
                                                     : units().back();
  Checks(*this, kind, form, taken).run(unit, output_unit());
  const std::int64_t workspace = form.part == Part::kEmbedding ? embedding_workspace_bytes(taken.shape) : 0;
  ZG_ASSERT(workspace == 0 || taken.workspace != nullptr, "{}: no workspace", form.name);
  return {taken,
          kind,
          *ops_,
          s,
          is_block ? block->config() : m.here,
          m.dtype,
          unit,
          logits_bytes_,
          m.shard,
          model::tokens_of(m.whole, m.shard),
          m.whole.vocab_size,
          exchange_,
          expert_exchange_};
}

model::Call Model::table_call(const model::Call& head) const {
  UnitCall operands = head;
  operands.weights = head.table, operands.grads = head.table_grads;
  model::Call call{operands,
                   head.model_call,
                   head.ops,
                   head.stream,
                   head.config,
                   head.dtype,
                   output_unit(),
                   head.logits_bytes,
                   head.shard,
                   head.tokens,
                   head.whole_vocabulary,
                   head.exchange,
                   head.expert_exchange};
  call.matrix = model::table_index(config(), units());
  call.matrix_rows = model::head_columns(structure_->shape.here, *structure_->shape.sizes);
  return call;
}

}  // namespace zg
