// The sections of the configuration, each read into its part of RunConfig. Every function marks its keys in
// `root` as known; load_config() calls them all, in this order. Private to src/config.
#pragma once
#include "config/reader.hpp"

namespace zg::config {

// Whether the files speak of tiers: then what is not placed goes wherever there is room; without them an
// absent offload section means device memory, as in DeepSpeed.
bool has_tiers(Section& root);

// deepspeed.cpp
void read_batch(Section& root, RunConfig& run);
void read_precision(Section& root, const Machine& machine, RunConfig& run);
void read_activation_checkpointing(Section& root, RunConfig& run);
void read_aio(Section& root, RunConfig& run);

// zero.cpp. After read_tiers(): offloading to NVMe may bring the path of the tier.
void read_zero(Section& root, RunConfig& run);

// optimizer.cpp. After "steps" and read_precision().
void read_optimizer(Section& root, RunConfig& run);
void read_scheduler(Section& root, RunConfig& run);

// devices.cpp
void read_devices(Section& root, const Machine& machine, RunConfig& run);

// threads.cpp
void read_threads(Section& root, RunConfig& run);

// other.cpp: what DeepSpeed has and this engine has not: refused where it would change what is
// computed, else a warning.
void read_other_deepspeed(Section& root);

}  // namespace zg::config
