// The units of a model: their parameters, the order of these, and the place of each in memory.
//
// The enumerations are indices into Unit::params, in the order in which make_units() adds the parameters.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg::model {

namespace embedding {
enum Index : std::size_t { kTokens, kPositions /* unless heads rotate */ };
}
// The indices, ascending, of a block's parameters that are weights or biases of norms, or sinks. A backward
// adds to their gradients; the gradients of all other parameters are written by matrix products, which can
// overwrite.
class NormList {
 public:
  void add(std::size_t param) { params_[count_++] = param; }
  std::span<const std::size_t> all() const { return {params_.data(), count_}; }
  std::size_t size() const { return count_; }
  std::int64_t row_of(std::size_t param) const {
    const auto list = all();
    const auto at = std::find(list.begin(), list.end(), param);
    ZG_ASSERT(at != list.end(), "parameter {} is no norm", param);
    return at - list.begin();
  }
  // A bit for each parameter that is not in the list.
  std::uint64_t others() const {
    std::uint64_t bits = ~std::uint64_t{0};
    for (const std::size_t param : all()) bits &= ~(std::uint64_t{1} << param);
    return bits;
  }

 private:
  std::array<std::size_t, 9> params_{};
  std::size_t count_ = 0;
};

// The parameters of a block; the model's form and description say which of them it has.
struct BlockParams {
  static constexpr std::size_t kNone = ~std::size_t{0};
  std::size_t norm1 = kNone, norm2 = kNone;  // before attention, and before the MLP
  std::size_t norm1_bias = kNone, norm2_bias = kNone;
  // The first products of attention. If q, k and v are one matrix, all three indices are that matrix's. In
  // latent attention q makes the queries' latent, or the queries, and k, which is also v, the latent of keys
  // and values. Without a gate `up` equals `gate`.
  std::size_t q = kNone, k = kNone, v = kNone, o = kNone, gate = kNone, up = kNone, down = kNone;
  std::size_t q_bias = kNone, o_bias = kNone;        // the biases of k and v follow q's
  std::size_t gate_bias = kNone, down_bias = kNone;  // the bias of up follows gate's
  // The norms of queries and keys, or of the two latents; the products that read the latents.
  std::size_t q_norm = kNone, k_norm = kNone, q_b = kNone, kv_b = kNone, sinks = kNone;
  std::size_t after1 = kNone, after2 = kNone;  // norms of the outputs of attention and of the MLP
  // In a layer with experts. gate, up and down are then of the MLP that all tokens pass, or kNone.
  std::size_t router = kNone, router_bias = kNone, shared_gate = kNone;
  std::size_t count = 0;

  BlockParams(const ModelConfig& config, std::int64_t layer);
  NormList norms() const;
};

// The parameters of an expert, which is number `i` of its unit. Where gate and up are one matrix, `up` equals
// `gate`.
struct ExpertParams {
  std::size_t gate = BlockParams::kNone, up = BlockParams::kNone, down = BlockParams::kNone;
  std::size_t gate_bias = BlockParams::kNone, down_bias = BlockParams::kNone;
  std::size_t begin = 0, end = 0;  // all of them

  ExpertParams(const ModelConfig& config, std::int64_t i);
};
// Whether gate and up of each expert are one matrix, whose rows are theirs in turn.
inline bool experts_in_pairs(const ModelConfig& config) {
  return config.block.gate == Gate::kClampedPairs;
}
namespace head {
enum Index : std::size_t { kNormWeight, kNormBias /* of a LayerNorm */ };
}

// Unit 0 is the embedding, the last unit is the head, and between them are the layers: of each the block, and
// then its units with experts. After the output matrix
// there is a gap, so that it can be read as a matrix of `table_rows` rows, at least V; like all gaps, this
// one is zero. `config` is the whole model's; the units hold the shard's elements.
std::vector<Unit> make_units(const ModelConfig& config, const TensorShard& shard, std::int64_t table_rows,
                             BlockTiling blocks);

// Moves the parameters that are not cut to the front of the unit, and cuts the other matrices into tiles of
// whole rows. Adapters follow last, uncut. table: index of the only matrix to cut, and the number of rows
// that it has room for on each rank; without it, all matrices of a block are cut, but for the router and the
// gate of the MLP that all tokens pass.
struct TableRows {
  std::size_t table = 0;
  std::int64_t rows = 0;
};
void cut_into_tiles(Unit& unit, std::optional<TableRows> table = {});

// Appends the uses of a matrix's tiles, without the unit's first tile; for each tile all `kinds` in turn.
void add_tile_uses(const Unit& unit, std::size_t matrix, std::initializer_list<TileUse::Kind> kinds,
                   std::vector<TileUse>& uses);

// The output matrix [V, C] in the unit that holds it: the embedding when tied, else the head.
std::size_t table_index(const ModelConfig& config, const std::vector<Unit>& units);
const Param& table_param(const ModelConfig& config, const std::vector<Unit>& units);

// Zeroes a unit's gradients, except the parameters whose bit (by index) is set in `overwritten`. `grads` is
// the unit's flat tensor. Ranges of one length at equal distances are zeroed by one op. In a unit in tiles
// `grads` is the first tile, all of which is zeroed.
void clear_gradients(Ops& ops, Stream& stream, const View& grads, const Unit& unit,
                     std::uint64_t overwritten);
// Zeroes the gaps between the parameters of a unit that is whole.
void clear_gaps(Ops& ops, Stream& stream, const View& grads, const Unit& unit);

}  // namespace zg::model
