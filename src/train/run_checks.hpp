// What a configuration and the sizes of its model tell of whether a run can be. Pure functions, for any
// thread; all throw Error(kUsage), which names the key and the nearest that can be.
#pragma once
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {

// `model` is complete, with its vocabulary.
void check_run(const RunConfig& config, const ModelConfig& model);
// Where only the data may tell the vocabulary: so no text is tokenised for a run that cannot be.
void check_run_without_data(const RunConfig& config, ModelConfig model);

}  // namespace zg
