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

// Opens the files of the model and the adapters that the run starts from, so that a text is not tokenised
// before a damaged one is found. A model without weights, of which a plan can be made, is no error yet.
void check_files(const RunConfig& config, const ModelConfig& model);

}  // namespace zg
