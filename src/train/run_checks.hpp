// Checks, from a configuration and the sizes of its model, that a run is possible. Any thread may call. All
// functions throw Error(kUsage), which names the key and the nearest possible value.
#pragma once
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {

// `model` is complete, with its vocabulary.
void check_run(const RunConfig& config, const ModelConfig& model);
// check_run() for a vocabulary that may be known only from the data. Called before a text is tokenised, so
// that none is for a run that is impossible.
void check_run_without_data(const RunConfig& config, ModelConfig model);

// Opens the files of the model and the adapters that the run starts from, so that a damaged file is found
// before a text is tokenised. A model without weights is no error here, since it can be planned.
void check_files(const RunConfig& config, const ModelConfig& model);

}  // namespace zg
