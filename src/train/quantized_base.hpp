// The model that a run quantises before it begins (model.quantize), kept in a cache for later runs. Private
// to src/train.
//
// An entry of the cache is a directory as quantize_model() writes it. Its name has a hash of what it was made
// of, so a model that has changed gets another entry, and an old one is never wrong. An entry has its name
// only when it is complete. A locked file beside it, NAME.lock, lets one process at a time make it; the
// others wait, and use it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "train/checkpointer.hpp"
#include "ziggurat/comm/processes.hpp"
#include "ziggurat/config/run_config.hpp"

namespace zg {

// The directory of the quantised model of `config`, which asks for one; made if it is not in the cache yet.
// The making and the wait end with Error(kInterrupted) once `stop` (null: never) returns true. `free_bytes`
// tells the free space at a path. Throws Error(kUsage) as quantize_model() does, and if the cache has no
// place or no room; Error(kIo).
std::string quantized_base(
    const RunConfig& config, const std::function<bool()>& stop = {},
    const std::function<std::int64_t(const std::string& path)>& free_bytes = free_bytes_at);

// The run that `config` asks for, with model_from and quantize.of set if the model is to be quantised. To be
// called in all processes: the first one of each machine makes the entry, and the others find it.
RunConfig with_quantized_base(RunConfig config, Processes& processes, const std::function<bool()>& stop);

}  // namespace zg
