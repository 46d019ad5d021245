// The tensors of a training run, how they are cut into segments, and to which tier each may be demoted.
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "ziggurat/model/model.hpp"
#include "ziggurat/model/param_code.hpp"
#include "ziggurat/optim/state.hpp"
#include "ziggurat/step/balance.hpp"
#include "ziggurat/step/pipeline.hpp"
#include "ziggurat/step/schedule.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

inline constexpr int kFrozen = -1;  // the group of a parameter that is not trained and has no state

inline constexpr std::int32_t kAllUnits = std::numeric_limits<std::int32_t>::max();

struct LayoutOptions {
  BatchShape micro_batch;          // the layout sets its sequence_shard
  std::int64_t micro_batches = 1;  // per step
  Accumulation accumulation = Accumulation::kLayerMajor;
  bool recompute = true;          // keep only each block's input, and run its forward again in backward
  DType gradient = DType::kBF16;  // type of the gradients that the optimizer reads
  OffloadTarget weights = OffloadTarget::kAuto, optimizer = OffloadTarget::kAuto,
                activations = OffloadTarget::kAuto;
  StateFormat state = {};  // `full` is ignored: the model's accumulator type is used
  // [unit][parameter]: the parameter's group (an index into UpdateRule::groups), or kFrozen. Empty: all
  // parameters are in group 0.
  std::vector<std::vector<int>> groups = {};
  // [unit][parameter]: how the files' matrix is coded that has the parameter, if its codes are kept and not
  // its elements; only of parameters that are not trained. All parts that ranks and tiles have of it must
  // have a code_of_part(). Empty: all parameters are kept as elements.
  std::vector<std::vector<std::optional<ParamCode>>> codes = {};
  // kFp8: no layer may have frozen parameters or adapters, and masters are whole (MasterFormat::kFull).
  StoredWeights stored_weights = StoredWeights::kComputed;
  // Units [0, device_updates) are updated on the device, the others on the host; an update uses its state
  // there. The next forward waits for the first units first.
  std::int32_t device_updates = 0;
  std::int64_t state_segment_bytes = 12 << 20;  // an update works on one segment at a time
  int state_versions = 1;  // versions of state on NVMe; with 2, a write-back keeps the previous one whole
  int drives = 0;          // of the NVMe tier; 0: no NVMe tier
  Sharding sharding = {};
  ParallelDegrees parts = {};
  PipelineOptions pipeline = {};  // used if parts.stages > 1; needs kLayerMajor
  // The number of layers of each chunk of the pipeline, in order; they add up to the model's layers. Empty:
  // the layers are split by their cost.
  std::vector<std::int32_t> stage_layers = {};
  // Bits per weight and per gradient element when ranks exchange them, 8 or 4; 0: they are not quantized.
  int weight_bits = 0, gradient_bits = 0;
  std::int64_t device_granule = 4096;  // Arena::granule() of the device
  BalanceOptions balance = {};         // of routers, in training
  bool saves = false;                  // the run may save its state between steps (StepExecutor::save_state)
  bool pins = false;                   // the run may do so with state on NVMe (StepExecutor::write_state)

  RankPlace place() const { return {sharding, parts}; }
  SequenceShard sequence_shard() const {
    return {parts.context, place().context_part(), parts.context_method};
  }
  // The number of micro-batches that pass through each layer before the next layer. Without a pipeline, the
  // activations of that many micro-batches exist at the same time.
  std::int64_t live_micro_batches() const {
    return accumulation == Accumulation::kLayerMajor ? micro_batches : 1;
  }
  bool is_pipeline() const { return parts.stages > 1; }
  PipelineShape pipeline_shape() const {
    return {parts.stages, pipeline.chunks, static_cast<int>(micro_batches), pipeline.schedule,
            pipeline.group};
  }
  bool in_halves() const { return is_pipeline() && pipeline.schedule == PipelineSchedule::kZeroBubble; }
  Backward backward() const { return in_halves() ? Backward::kInHalves : Backward::kWhole; }
};

// A stage of a pipeline has the tensors of its own units only. With a tied embedding, the last stage also has
// the embedding's weight, which it receives from the first stage, and an accumulator for it.
struct Layout {
  Layout(const Model& model, const LayoutOptions& options);

  static constexpr TensorId kNone = -1;
  // Consecutive elements of a trained parameter, with the gap after it. Begins at a multiple of kQuantBlock
  // in the unit and in the state.
  struct StateRange {
    std::int32_t param = 0;  // its index in the unit
    int group = 0;
    std::int64_t unit_first = 0, state_first = 0, count = 0;
    std::int64_t param_first = 0;  // index in the parameter; not 0 if the shard begins within it
  };
  // Consecutive elements of a parameter, in a tile whose stored form has codes: as `code` says or, without
  // one, as elements of the model's type.
  struct CodedRun {
    std::int32_t param = 0;  // its index in the unit
    std::int64_t first = 0;  // index in the parameter
    // The shape of the coded matrix: whole rows of the parameter, or one row of consecutive elements, perhaps
    // with the gap after the parameter.
    std::int64_t rows = 0, cols = 0;
    std::optional<ParamCode> code = {};
    CodePlaces places = {};  // of elements: `codes` alone

    std::int64_t count() const { return rows * cols; }
  };
  // The tensors of one tile; a unit that is not cut is one tile. TensorSpec has the type and the number of
  // elements of each tensor, and `sharding` says which elements of the tile this rank's shard has.
  struct TileTensors {
    std::int32_t unit = 0;
    std::int64_t first = 0, count = 0;  // the tile's elements of the unit
    Sharding sharding = {};
    // weight: the form that matrix products read; accumulator: the sum of gradients. Both are flat, and
    // padded to a whole number of pieces (Sharding). kNone: another stage has the unit, or, for the
    // accumulator, it is frozen.
    TensorId weight = kNone, accumulator = kNone;
    // The form of the weight that is kept between uses and that the update writes: this rank's shard of the
    // weight, the tile's codes or this rank's shard of them, from which OpKind::kMaterialize makes the
    // weight, or the weight itself.
    TensorId stored = kNone;
    // All codes of a tile of which each rank stores a shard, one shard after the other. They are there while
    // the weight is made of them.
    TensorId gathered = kNone;
    // All parameters of a tile that is kept in codes, with their places in all codes; else empty. If the tile
    // is trained, each shard has runs of its own, and ranges[i] is in run `first_run` + i.
    std::vector<CodedRun> coded;
    std::size_t first_run = 0;
    std::int64_t piece = 0;                    // elements
    TensorId gradient = kNone, state = kNone;  // kNone: no parameter of the unit is trained
    std::vector<StateRange> ranges;  // of this rank's shard, in ascending order in the unit and in the state
    // Elements [first, second) that another tensor-parallel rank counts for the gradient norm; ascending.
    std::vector<std::pair<std::int64_t, std::int64_t>> uncounted;
    std::int64_t state_elements = 0;

    bool is_sharded() const { return sharding.shards > 1; }
    bool is_coded() const { return !coded.empty(); }
    bool is_materialized() const { return stored != weight; }
  };

  const Model* model;
  LayoutOptions options;
  TensorTable table;
  // The tensors of all tiles (Unit::tiles). Unit u has the tiles [first_tile(u), first_tile(u + 1)). Where no
  // unit is in tiles, a tile has the same number as its unit.
  std::vector<TileTensors> tiles;
  // [layer][micro-batch]: the input of block `layer` (the last entry is the head's input), and the saved
  // activations that the block's backward also needs. Empty if another stage has the block, unless this stage
  // makes its input. With recomputation, `saved` holds only micro-batches that are between the two halves of
  // a backward.
  std::vector<std::vector<TensorId>> activation, saved;
  // [layer][micro-batch], of layers with experts: Model::routing_bytes() from the forward to the backward;
  // and [micro-batch]: Model::expert_sums_bytes() within a layer's forward or backward.
  std::vector<std::vector<TensorId>> routing;
  // [layer][micro-batch]: Model::expert_saved_bytes() from the forward to the backward of the layer's
  // experts. Empty with recomputation, and in layers that no backward passes.
  std::vector<std::vector<TensorId>> expert_saved;
  std::vector<TensorId> expert_sums;
  std::vector<TensorId> activation_gradient;  // [micro-batch], for one chunk of the stage after another
  std::vector<std::int32_t> first_layer;      // of each chunk of the pipeline; then the number of layers

  std::int64_t layers() const { return model->config().layers; }
  std::int32_t head_unit() const { return static_cast<std::int32_t>(model->units().size()) - 1; }
  // The unit's layer; the embedding has -1, the head the number of layers.
  std::int32_t layer_of(std::int32_t unit) const {
    return unit == head_unit() ? static_cast<std::int32_t>(layers())
                               : model->units()[static_cast<std::size_t>(unit)].layer;
  }
  // Whether the layer has experts.
  bool routes(std::int32_t layer) const {
    return layer >= 0 && layer < layers() && model->config().has_experts(layer);
  }
  // The last unit of a layer.
  std::int32_t last_unit_of(std::int32_t layer) const {
    return static_cast<std::int32_t>(model->unit_of(layer + 1)) - 1;
  }
  // The chunk of the pipeline that has the unit, and the stage that holds the unit, its gradient and its
  // state.
  int chunk_of(std::int32_t unit) const;
  int stage_of(std::int32_t unit) const { return chunk_of(unit) % options.parts.stages; }
  bool has_unit(std::int32_t unit) const { return stage_of(unit) == options.parts.stage; }
  // Whether this rank writes its elements of the unit to checkpoints and saved models. If several ranks hold
  // the same elements, only the first of them does.
  bool gives(std::int32_t unit) const {
    return has_unit(unit) && tile(first_tile(unit)).sharding.replica() == 0;
  }
  // The tensor for micro-batch `m`. Micro-batches whose tensors are never live at the same time share one.
  TensorId activation_of(std::int32_t layer, std::int32_t m) const;
  TensorId saved_of(std::int32_t layer, std::int32_t m) const;
  TensorId routing_of(std::int32_t layer, std::int32_t m) const;
  TensorId expert_saved_of(std::int32_t layer, std::int32_t m) const;
  TensorId expert_sums_of(std::int32_t m) const;
  TensorId activation_gradient_of(std::int32_t unit, std::int32_t m) const;
  SegmentId whole(TensorId id) const;  // the only segment of a tensor that is not cut into several
  std::int32_t first_tile(std::int32_t unit) const { return first_tile_[static_cast<std::size_t>(unit)]; }
  bool in_tiles(std::int32_t unit) const { return model->units()[static_cast<std::size_t>(unit)].in_tiles(); }
  // The tile with the unit's adapters; -1: it has no adapters.
  std::int32_t adapter_tile(std::int32_t unit) const {
    const Unit& u = model->units()[static_cast<std::size_t>(unit)];
    return u.adapted ? first_tile(unit) + static_cast<std::int32_t>(u.tiles.size()) - 1 : -1;
  }
  // The tile that has `param`; the unit must not be in tiles.
  std::int32_t tile_of(std::int32_t unit, const Param& param) const {
    return param.adapter ? adapter_tile(unit) : first_tile(unit);
  }
  const TileTensors& tile(std::int32_t t) const { return tiles[static_cast<std::size_t>(t)]; }
  // The tensors of a unit's first tile, which is its only tile unless the unit is in tiles or has adapters.
  const TileTensors& unit(std::int32_t u) const { return tile(first_tile(u)); }
  const StateLayout& state() const { return state_; }
  std::int32_t state_segments(std::int32_t tile) const;
  std::int64_t unit_state_elements(std::int32_t unit) const;  // summed over its tiles
  struct Elements {
    std::int64_t first = 0, count = 0;
  };
  // The elements of the tile's state that its segment `i` holds.
  Elements state_elements(std::int32_t tile, std::int32_t i) const;
  SegmentId state_segment(std::int32_t tile, std::int32_t i) const;
  // When the weights of a unit are made from their stored forms; the same for all of its tiles.
  Materialize materialize(std::int32_t unit) const;
  bool is_sharded(std::int32_t unit) const { return tile(first_tile(unit)).is_sharded(); }
  std::int64_t largest_copy() const { return largest_copy_; }  // elements of the largest CopySum with bands
  Tier update_at(std::int32_t unit) const {
    return unit < options.device_updates ? Tier::kDevice : Tier::kHost;
  }
  // Whether the update rebuilds the whole weight of the tile from its master, so that the weight's content
  // may be dropped before the update.
  bool update_rebuilds_weight(std::int32_t tile) const;

  // Whether some parameter of the unit is not trained.
  bool has_frozen(std::int32_t unit) const;
  // Whether none of the unit's own parameters is trained. Their gradients are then not computed, and the
  // unit's own tiles have no accumulators.
  bool is_frozen(std::int32_t unit) const { return frozen_[static_cast<std::size_t>(unit)]; }
  // Whether the unit's own parameters are kept in the codes of the model's files, by whatever rank has the
  // unit. Their content is in these files, so no checkpoint has it.
  bool has_codes(std::int32_t unit) const;
  // Whether the tile itself is in the codes of the model's files: it is not one of adapters.
  bool is_of_files(std::int32_t t) const { return tile(t).is_coded() && has_codes(tile(t).unit); }
  // Whether the unit is a trained layer whose matrices are kept in FP8 (StoredWeights).
  bool is_encoded(std::int32_t unit) const {
    return options.stored_weights == StoredWeights::kFp8 && unit > 0 && unit < head_unit() &&
           !is_frozen(unit);
  }
  // Whether anything in the unit is trained: its adapters or its own parameters.
  bool is_trained(std::int32_t unit) const { return !is_frozen(unit) || adapter_tile(unit) >= 0; }
  // The tile whose gradient the unit's last backward completes: the adapters' tile, or the first tile.
  std::int32_t trained_tile(std::int32_t unit) const {
    const std::int32_t adapters = adapter_tile(unit);
    return adapters >= 0 ? adapters : first_tile(unit);
  }
  // The first unit in which anything is trained. A backward ends there.
  std::int32_t first_trained() const { return first_trained_; }

  // Device memory besides the tensors: scratch for the largest operation, tokens, scalars.
  std::int64_t workspace_bytes() const;
  // workspace_bytes() rounded up to the arena's granule, as charged to the device's budget.
  std::int64_t workspace_charge() const;
  // Bytes of weights, gradients and optimizer state together.
  std::int64_t state_bytes() const;

 private:
  class Builder;

  std::vector<std::int32_t> first_tile_;  // by unit; then the number of tiles
  std::vector<bool> frozen_;              // by unit
  std::int32_t first_trained_ = 0;
  std::vector<std::int64_t> chunk_gradients_;  // by chunk of this stage: its tensors in activation_gradient
  StateLayout state_;
  std::int64_t largest_copy_ = 0;
  std::int64_t segment_elements_;  // in a state segment
};

}  // namespace zg
