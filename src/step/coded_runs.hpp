// Where the codes of a tile lie that is kept in codes: a pure function of the tile's elements and of how many
// ranks have shards of it.
#pragma once
#include "ziggurat/step/layout.hpp"

namespace zg {

struct CodedRuns {
  std::vector<Layout::CodedRun> runs;
  std::size_t first_run = 0;  // of this rank's shard
  std::int64_t bytes = 0;     // of all shards, which are equally long
};

// The parameters of a tile in the codes of the model's files: `codes` has those of each parameter of the
// unit. A shard is any part of the bytes.
CodedRuns runs_of_files(const Model& model, const std::vector<std::optional<ParamCode>>& codes,
                        const Layout::TileTensors& tile);

// The shards of a trained tile whose matrices are in kFp8Weights; vectors are elements. A shard of codes has
// the elements of the shard of weights. Shards begin at multiples of kQuantBlock elements of each parameter,
// so no border cuts a block, and the blocks do not depend on the number of ranks.
CodedRuns runs_of_shards(const Model& model, const Layout::TileTensors& tile);

}  // namespace zg
