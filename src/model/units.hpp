// The units of a model: their parameters, in which order, and where each lies.
//
// The enumerations are indices into Unit::params, in the order in which make_units() adds the parameters.
#pragma once
#include <cstddef>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg::model {

namespace embedding {
enum Index : std::size_t { kTokens, kPositions /* GPT-2 only */ };
}
namespace gpt2 {
enum Index : std::size_t {
  kLn1Weight,
  kLn1Bias,
  kQkvWeight,
  kQkvBias,
  kAttProjWeight,
  kAttProjBias,
  kLn2Weight,
  kLn2Bias,
  kFcWeight,
  kFcBias,
  kMlpProjWeight,
  kMlpProjBias,
  kCount
};
}
namespace llama {
enum Index : std::size_t { kNorm1, kQ, kK, kV, kO, kNorm2, kGate, kUp, kDown, kCount };
}
namespace head {
enum Index : std::size_t { kNormWeight, kNormBias /* GPT-2 only */ };
}

// Unit 0 is the embedding, units 1..layers are the blocks, the last unit is the head. Behind the output
// matrix is a gap so large that it can be read as a matrix of `table_rows` rows, at least V; as all gaps it
// is zero. `config`: of the whole model, of which the units hold what the part has.
std::vector<Unit> make_units(const ModelConfig& config, const ModelPart& part, std::int64_t table_rows,
                             Blocks blocks);

// Lays the unit's vectors out in front of its matrices, and cuts these into tiles of whole rows.
void cut_into_tiles(Unit& unit);

// The output matrix [V, C] in the unit that holds it: the embedding when tied, else the head.
const Param& table_param(const ModelConfig& config, const std::vector<Unit>& units);

// Zeroes a unit's gradients, of which `grads` is the flat tensor, but for the parameters whose bits, by
// index, are set in `overwritten`. Stretches of one length at equal distances are one op. Of a unit in tiles
// `grads` is the first one, of which all is zeroed.
void clear_gradients(Ops& ops, Stream& stream, const View& grads, const Unit& unit,
                     std::uint32_t overwritten);

}  // namespace zg::model
