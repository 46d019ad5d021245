// A model with all its tensors in plain memory: a training step without store, tiers or schedule.
//
// Buffers are exactly as large as the model says, and hold NaN before each use, so that a read of what
// was never written shows in the results (and a write past the end under a sanitizer). Single-threaded.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg::test {

class Bytes {
 public:
  explicit Bytes(std::int64_t size) : size_(size) {
    data_ = ::operator new (static_cast<std::size_t>(size), std::align_val_t{kAlign});
    poison();
  }
  Bytes(Bytes&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  Bytes& operator=(Bytes&&) = delete;
  ~Bytes() { ::operator delete (data_, std::align_val_t{kAlign}); }

  void* data() const { return data_; }
  std::int64_t size() const { return size_; }
  void poison() { std::memset(data_, 0xff, static_cast<std::size_t>(size_)); }  // NaN in every float type
  void clear() { std::memset(data_, 0, static_cast<std::size_t>(size_)); }
  bool operator==(const Bytes& other) const {
    return size_ == other.size_ && std::memcmp(data_, other.data_, static_cast<std::size_t>(size_)) == 0;
  }

 private:
  static constexpr std::size_t kAlign = 256;
  void* data_;
  std::int64_t size_;
};

inline double load(const View& x, std::int64_t row, std::int64_t column) {
  const std::int64_t i = row * x.ld + column;
  switch (x.dtype) {
    case DType::kF64:
      return x.as<double>()[i];
    case DType::kF32:
      return static_cast<double>(x.as<float>()[i]);
    case DType::kBF16:
      return static_cast<double>(static_cast<float>(x.as<bf16>()[i]));
    case DType::kF16:
      return static_cast<double>(static_cast<float>(x.as<fp16>()[i]));
    default:
      ZG_ASSERT(false, "{}", name_of(x.dtype));
  }
  return 0;
}

inline void store(const View& x, std::int64_t row, std::int64_t column, double value) {
  const std::int64_t i = row * x.ld + column;
  switch (x.dtype) {
    case DType::kF64:
      x.as<double>()[i] = value;
      return;
    case DType::kF32:
      x.as<float>()[i] = static_cast<float>(value);
      return;
    case DType::kBF16:
      x.as<bf16>()[i] = bf16(static_cast<float>(value));
      return;
    case DType::kF16:
      x.as<fp16>()[i] = fp16(static_cast<float>(value));
      return;
    default:
      ZG_ASSERT(false, "{}", name_of(x.dtype));
  }
}

struct Batch {
  BatchShape shape;
  std::vector<std::int32_t> ids, targets;    // targets: negative where ignored
  std::vector<std::int32_t> documents = {};  // where the shape says that there are some: see Model
};

enum class Recompute { kNo, kYes };

// The tiles of a unit, one at a time in one place, which has nothing of it between two of them: NaN before a
// gradient is overwritten, and a sum is put back when the next tile is asked for. For streams that run their
// work at once.
class TileRoom final : public TileAccess {
 public:
  // weights, grads: flat, of the whole unit.
  TileRoom(const Unit& unit, const View& weights, const View& grads, Gradients into)
      : unit_(unit), weights_(weights), grads_(grads), into_(into) {}
  ~TileRoom() override { put_back(); }

  View next(const TileUse& use) override {
    put_back();
    const bool reads = use.kind == TileUse::Kind::kWeight;
    const Tile& tile = unit_.tiles[static_cast<std::size_t>(use.tile)];
    place_ = (reads ? weights_ : grads_).col_range(tile.first, tile.count);
    room_ = std::make_unique<Bytes>(bytes());
    writes_ = !reads;
    const bool again = writes_ && !written_.insert(use.tile).second;
    if (reads || again || into_ == Gradients::kAdd) std::memcpy(room_->data(), place_.data, size());
    return {room_->data(), place_.dtype, 1, tile.count};
  }

 private:
  std::int64_t bytes() const { return place_.cols * static_cast<std::int64_t>(size_of(place_.dtype)); }
  std::size_t size() const { return static_cast<std::size_t>(bytes()); }
  void put_back() {
    if (writes_) std::memcpy(place_.data, room_->data(), size());
    writes_ = false;
  }

  const Unit& unit_;
  const View weights_, grads_;
  const Gradients into_;
  View place_ = {};
  std::unique_ptr<Bytes> room_;
  bool writes_ = false;
  std::set<std::int32_t> written_;  // the tiles whose gradients have been written
};

class ModelRunner {
 public:
  // logits_bytes, part, blocks: as of Model. exchange: with the other parts, if there are any.
  ModelRunner(const ModelConfig& config, DType dtype, Ops& ops, Stream& stream, std::int64_t logits_bytes = 0,
              const TensorShard& part = {}, TensorParallelGroup* exchange = nullptr,
              BlockTiling blocks = BlockTiling::kWhole)
      : model_(config, dtype, ops, logits_bytes, part, blocks), stream_(stream) {
    if (exchange != nullptr) model_ = model_.with(exchange);
    for (const Unit& unit : model_.units()) {
      weights_.emplace_back(unit.count * bytes_of(dtype));
      weights_.back().clear();
      grads_.emplace_back(unit.count * bytes_of(model_.accumulator_dtype()));
      grads_.back().clear();
    }
  }

  Model& model() { return model_; }
  const std::vector<Unit>& units() const { return model_.units(); }
  View weights(std::size_t unit) const { return flat(weights_, unit, model_.dtype()); }
  View grads(std::size_t unit) const { return flat(grads_, unit, model_.accumulator_dtype()); }
  // The first tile of a unit with adapters or in tiles. The adapters, its last tile; null: there are none.
  View own(std::size_t unit) const { return first_tile(weights(unit), unit); }
  View own_grads(std::size_t unit) const { return first_tile(grads(unit), unit); }
  View adapters(std::size_t unit) const { return last_tile(weights(unit), unit); }
  View adapter_grads(std::size_t unit) const { return last_tile(grads(unit), unit); }
  View weight(std::size_t unit, const Param& p) const { return part(weights(unit), p); }
  View grad(std::size_t unit, const Param& p) const { return part(grads(unit), p); }

  // Sets each element to value(param, row, column), by its place in the whole parameter.
  void fill(const std::function<double(const Param&, std::int64_t, std::int64_t)>& value) {
    for (std::size_t u = 0; u < units().size(); ++u) {
      for (const Param& p : units()[u].params) {
        const View w = weight(u, p);
        for (std::int64_t r = 0; r < w.rows; ++r) {
          for (std::int64_t c = 0; c < w.cols; ++c) {
            const std::int64_t element = p.whole_element(r * w.cols + c);
            store(w, r, c, value(p, element / p.whole_cols, element % p.whole_cols));
          }
        }
      }
      const Unit& unit = units()[u];
      if (!unit.choice_bias) continue;
      for (std::int64_t e = 0; e < unit.choice_bias->cols; ++e)
        store(choice_bias(static_cast<std::size_t>(unit.layer)), 0, e, value(*unit.choice_bias, 0, e));
    }
  }
  // From here on, passes are those of a step of training, which drop by the configuration's rates.
  void drop_as(std::uint64_t seed, std::int64_t step, std::int64_t first_sequence) {
    places_.clear();
    for (std::size_t u = 0; u < units().size(); ++u)
      places_.push_back(
          {model_.dropout_keys(seed, u), model_.adapter_dropout_key(seed, u), step, first_sequence});
  }
  const DropoutPlace* place(std::size_t unit) const { return places_.empty() ? nullptr : &places_[unit]; }
  void clear_grads() {
    for (Bytes& g : grads_) g.clear();
  }
  void poison_grads() {
    for (Bytes& g : grads_) g.poison();
  }

  // Sum of the losses of all valid targets.
  double loss(const Batch& batch) {
    const Bytes x = forward(batch);
    Bytes workspace(model_.head_workspace_bytes(batch.shape));
    double sum = 0;
    UnitCall call = head_call(batch, x, workspace);
    call.targets = targets(batch);
    call.loss_sum = View(&sum, DType::kF64, 1, 1);
    model_.run(stream_, ModelCall::kHeadLoss, call);
    stream_.synchronize();
    return sum;
  }

  // Logits [N, V], row-major.
  std::vector<double> logits(const Batch& batch) {
    const Bytes x = forward(batch);
    const std::int64_t v = model_.config().vocab_size, ld = v + 3;
    Bytes workspace(model_.head_workspace_bytes(batch.shape));
    const Bytes out(batch.shape.rows() * ld * bytes_of(model_.accumulator_dtype()));
    const View view(out.data(), model_.accumulator_dtype(), batch.shape.rows(), v, ld);
    UnitCall call = head_call(batch, x, workspace);
    call.logits = view;
    model_.run(stream_, ModelCall::kHeadLogits, call);
    stream_.synchronize();
    std::vector<double> result;
    for (std::int64_t r = 0; r < view.rows; ++r) {
      for (std::int64_t c = 0; c < v; ++c) result.push_back(capped_logit(model_.config(), load(view, r, c)));
    }
    return result;
  }

  // Computes the gradients of the sum of losses, times the scale; returns that sum. In halves, the second
  // ones of all blocks come after the first ones. Frozen, only the embedding's and the adapters' are
  // computed; beside adapters only these are, in halves too.
  double forward_backward(const Batch& batch, Recompute recompute = Recompute::kNo, double loss_scale = 1,
                          Gradients into = Gradients::kAdd, Backward how = Backward::kWhole) {
    const BatchShape shape = batch.shape;
    const bool adapted = model_.config().lora.on(), frozen = adapted || how == Backward::kFrozen;
    const bool in_halves = how == Backward::kInHalves;
    if (frozen && !in_halves) how = Backward::kFrozen;
    const bool all_saved = in_halves || recompute == Recompute::kNo;
    std::vector<Bytes> xs, saved, routing;
    Bytes sums(model_.expert_sums_bytes(shape));
    xs.emplace_back(model_.checkpoint_bytes(shape));
    embed(batch, xs.back());
    Bytes workspace(model_.block_workspace_bytes(shape, how));
    const std::size_t layers = layer_count();
    for (std::size_t l = 0; l < layers; ++l) {
      if (all_saved || saved.empty()) saved.emplace_back(model_.saved_bytes(shape, how));
      routing.emplace_back(model_.routing_bytes(shape));
      xs.emplace_back(model_.checkpoint_bytes(shape));
      workspace.poison(), sums.poison();
      UnitCall call = block_call(l, batch, xs[l], saved.back(), workspace);
      call.experts = {.routing = routing[l].data(), .sums = sums.data(), .choice_bias = choice_bias(l)};
      call.output = rows(xs[l + 1], batch);
      model_.run(stream_, ModelCall::kBlock, call);
      stream_.synchronize();
      run_experts(call, ModelCall::kExperts, workspace);
    }
    double sum = 0;
    const Bytes dx(model_.checkpoint_bytes(shape));
    Bytes head_workspace(
        model_.head_workspace_bytes(shape, frozen ? HeadGradients::kFrozen : HeadGradients::kAll));
    UnitCall of_head = head_call(batch, xs.back(), head_workspace, into);
    of_head.targets = targets(batch);
    of_head.loss_sum = View(&sum, DType::kF64, 1, 1);
    of_head.activation_gradient = rows(dx, batch);
    if (!frozen) of_head.grads = own_grads(head()), of_head.table_grads = own_grads(table());
    of_head.loss_scale = loss_scale;
    model_.run(stream_, ModelCall::kHeadLossAndGradient, of_head);
    for (std::size_t l = layers; l-- > 0;) {
      Bytes& mine = all_saved ? saved[l] : saved.back();
      const ExpertOperands experts{
          .routing = routing[l].data(), .sums = sums.data(), .choice_bias = choice_bias(l)};
      const bool halves = in_halves && !has_experts(l);
      sums.poison();
      UnitCall of_experts = block_call(l, batch, xs[l], mine, workspace, into);
      of_experts.experts = experts;
      of_experts.activation_gradient = rows(dx, batch);
      run_experts(of_experts, frozen ? ModelCall::kExpertsBackwardFrozen : ModelCall::kExpertsBackward,
                  workspace);
      if (recompute == Recompute::kYes) {
        mine.poison();
        UnitCall again = block_call(l, batch, xs[l], mine, workspace);
        again.experts = experts;
        model_.run(stream_, ModelCall::kBlockAgain, again);
      }
      stream_.synchronize();
      workspace.poison();
      UnitCall call = block_call(l, batch, xs[l], mine, workspace, into);
      call.experts = experts;
      call.activation_gradient = rows(dx, batch);
      if (!frozen) call.grads = own_grads(model_.unit_of(static_cast<std::int64_t>(l)));
      model_.run(stream_,
                 halves   ? ModelCall::kBlockBackwardInput
                 : frozen ? ModelCall::kBlockBackwardFrozen
                          : ModelCall::kBlockBackward,
                 call);
      stream_.synchronize();
    }
    for (std::size_t l = 0; in_halves && l < layers; ++l) {
      if (has_experts(l)) continue;
      workspace.poison();
      const std::size_t u = model_.unit_of(static_cast<std::int64_t>(l));
      UnitCall call = block_call(l, batch, xs[l], saved[l], workspace, into);
      if (adapted) {
        call.tiles = nullptr;
      } else {
        call.grads = own_grads(u);
      }
      model_.run(stream_, ModelCall::kBlockBackwardWeight, call);
      stream_.synchronize();
    }
    tiles_.reset();
    if (adapted) return sum;
    // A tied head has written to the embedding's gradients before.
    const Bytes embedding_workspace(model_.embedding_workspace_bytes(shape));
    const Gradients into_embedding = model_.config().tied && !frozen ? Gradients::kAdd : into;
    model_.run(stream_, ModelCall::kEmbeddingBackward,
               {.shape = shape,
                .grads = own_grads(0),
                .into = into_embedding,
                .tiles = tiles(0, into_embedding),
                .ids = ids(batch),
                .activation_gradient = rows(dx, batch),
                .workspace = embedding_workspace.data(),
                .documents = documents(batch),
                .dropout = place(0)});
    stream_.synchronize();
    tiles_.reset();
    return sum;
  }

  // The residual stream after the last block.
  Bytes forward(const Batch& batch) {
    const BatchShape shape = batch.shape;
    Bytes x(model_.checkpoint_bytes(shape)), next(model_.checkpoint_bytes(shape));
    Bytes saved(model_.saved_bytes(shape)), workspace(model_.block_workspace_bytes(shape));
    Bytes routing(model_.routing_bytes(shape)), sums(model_.expert_sums_bytes(shape));
    embed(batch, x);
    for (std::size_t l = 0; l < layer_count(); ++l) {
      Bytes& from = l % 2 == 0 ? x : next;
      Bytes& to = l % 2 == 0 ? next : x;
      for (Bytes* const bytes : {&saved, &to, &routing, &sums}) bytes->poison();
      UnitCall call = block_call(l, batch, from, saved, workspace);
      call.experts = {.routing = routing.data(), .sums = sums.data(), .choice_bias = choice_bias(l)};
      call.output = rows(to, batch);
      model_.run(stream_, ModelCall::kBlock, call);
      stream_.synchronize();
      run_experts(call, ModelCall::kExperts, workspace);
    }
    return std::move(layer_count() % 2 == 0 ? x : next);
  }

  View rows(const Bytes& x, const Batch& batch) const {
    return {x.data(), model_.dtype(), model_.residual_rows(batch.shape), model_.config().width};
  }
  static View ids(const Batch& batch) { return ints(batch.ids); }
  static View targets(const Batch& batch) { return ints(batch.targets); }
  static View documents(const Batch& batch) { return batch.shape.documents ? ints(batch.documents) : View(); }
  std::size_t head() const { return units().size() - 1; }
  std::size_t table() const { return model_.config().tied ? 0 : head(); }  // the unit of the output matrix

 private:
  std::size_t layer_count() const { return static_cast<std::size_t>(model_.config().layers); }
  // The choice bias of a layer's router, zero until fill(); null if the model has none.
  View choice_bias(std::size_t layer) const {
    const Experts& experts = model_.config().experts;
    if (!experts.choice_bias) return View();
    const std::int64_t n = experts.count, layers = model_.config().layers;
    choice_biases_.resize(static_cast<std::size_t>(n * layers));
    const View all(choice_biases_.data(), model_.accumulator_dtype(), layers, n);
    return all.row_range(static_cast<std::int64_t>(layer), 1);
  }
  bool has_experts(std::size_t layer) const {
    return model_.config().has_experts(static_cast<std::int64_t>(layer));
  }
  // Runs a kind of call on all units with experts of the layer that `call`, on its block, is for: forwards in
  // ascending order, backwards in descending order.
  void run_experts(UnitCall call, ModelCall kind, Bytes& workspace) {
    const std::int64_t groups = model_.config().expert_units(call.layer);
    if (groups == 0) return;
    const View starts = model_.starts_in(call.shape, call.experts.routing);
    call.experts.starts = static_cast<const std::int32_t*>(starts.data);
    call.tiles = nullptr;
    for (std::int64_t i = 0; i < groups; ++i) {
      call.experts.group = kind == ModelCall::kExperts ? i : groups - 1 - i;
      const std::size_t unit = model_.unit_of(call.layer) + 1 + static_cast<std::size_t>(call.experts.group);
      call.weights = own(unit);
      call.adapters = {adapters(unit), adapter_grads(unit)};
      if (kind == ModelCall::kExpertsBackward) call.grads = own_grads(unit);
      workspace.poison();
      model_.run(stream_, kind, call);
      stream_.synchronize();
    }
  }
  // What all calls on a layer's block need. One at a time: it makes the block's tiles.
  UnitCall block_call(std::size_t layer, const Batch& batch, const Bytes& x, const Bytes& saved,
                      const Bytes& workspace, Gradients into = Gradients::kAdd) {
    const std::size_t unit = model_.unit_of(static_cast<std::int64_t>(layer));
    return {.shape = batch.shape,
            .layer = static_cast<std::int64_t>(layer),
            .weights = own(unit),
            .into = into,
            .adapters = {adapters(unit), adapter_grads(unit)},
            .tiles = tiles(unit, into),
            .input = rows(x, batch),
            .saved = saved.data(),
            .workspace = workspace.data(),
            .documents = documents(batch),
            .dropout = place(unit)};
  }
  // What all calls of the head need.
  UnitCall head_call(const Batch& batch, const Bytes& x, const Bytes& workspace,
                     Gradients into = Gradients::kAdd) {
    return {.shape = batch.shape,
            .weights = own(head()),
            .into = into,
            .tiles = tiles(table(), into),
            .input = rows(x, batch),
            .workspace = workspace.data(),
            .table = own(table())};
  }
  void embed(const Batch& batch, const Bytes& x) {
    const Bytes workspace(model_.embedding_workspace_bytes(batch.shape));
    model_.run(stream_, ModelCall::kEmbedding,
               {.shape = batch.shape,
                .weights = own(0),
                .tiles = tiles(0),
                .ids = ids(batch),
                .output = rows(x, batch),
                .workspace = workspace.data(),
                .documents = documents(batch),
                .dropout = place(0)});
    stream_.synchronize();
  }
  // For one call; null: the unit is whole.
  TileAccess* tiles(std::size_t unit, Gradients into = Gradients::kAdd) {
    tiles_.reset();
    if (!units()[unit].in_tiles()) return nullptr;
    tiles_ = std::make_unique<TileRoom>(units()[unit], weights(unit), grads(unit), into);
    return tiles_.get();
  }
  static std::int64_t bytes_of(DType t) { return static_cast<std::int64_t>(size_of(t)); }
  View flat(const std::vector<Bytes>& all, std::size_t unit, DType t) const {
    return {all[unit].data(), t, 1, units()[unit].count};
  }
  View first_tile(const View& all, std::size_t unit) const {
    return all.col_range(0, units()[unit].tiles.front().count);
  }
  View last_tile(const View& all, std::size_t unit) const {
    const Tile& tile = units()[unit].tiles.back();
    return units()[unit].adapted ? all.col_range(tile.first, tile.count) : View();
  }
  static View part(const View& flat, const Param& p) {
    return {flat.col_range(p.offset, p.count()).data, flat.dtype, p.rows, p.cols};
  }
  static View ints(const std::vector<std::int32_t>& v) {
    return {const_cast<std::int32_t*>(v.data()), DType::kI32, 1, static_cast<std::int64_t>(v.size())};
  }

  Model model_;
  Stream& stream_;
  std::vector<Bytes> weights_, grads_;
  mutable std::vector<double> choice_biases_;  // room for accumulators
  std::vector<DropoutPlace> places_;           // by unit; empty: nothing is dropped
  std::unique_ptr<TileRoom> tiles_;            // of the call under way
};

}  // namespace zg::test
