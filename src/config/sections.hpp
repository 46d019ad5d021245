// Readers of the configuration's sections; each fills its members of RunConfig. load_config() calls all of
// these functions, in an order that it explains. Next to each reader is the function that returns the rows of
// its keys. Private to src/config.
#pragma once
#include "config/reader.hpp"

namespace zg::config {

// Whether the files have a section "tiers". With it, tensors that no offload section places go wherever there
// is room; without it they stay in device memory, as in DeepSpeed.
bool has_tiers(Section& root);

// Reasons why some of DeepSpeed's keys have no effect.
inline constexpr const char* kOwnCheckpoints =
    "checkpoint.every asks for checkpoints, which have a form of their own";
inline constexpr const char* kTrace = "log.jsonl has the phases of every step, and a trace shows each block";

// run_config.cpp
std::vector<Key> run_keys();

// deepspeed.cpp
std::vector<Key> batch_keys();
std::vector<Key> precision_keys();
void read_batch(Section& root, RunConfig& run);
void read_precision(Section& root, const Machine& machine, RunConfig& run);

// memory.cpp. read_zero() comes after read_tiers(): offloading to NVMe may give the tier its path.
std::vector<Key> memory_keys();
void read_activation_checkpointing(Section& root, RunConfig& run);
void read_aio(Section& root, RunConfig& run);
void read_tiers(Section& root, RunConfig& run);

// zero.cpp
const Keys& zero_keys();
void read_zero(Section& root, RunConfig& run);

// optimizer.cpp and schedule.cpp. Call after "steps" was read, and after read_precision().
std::vector<Key> optimizer_root_keys();
void read_optimizer(Section& root, RunConfig& run);
const Keys& schedule_keys();
void read_scheduler(Section& root, RunConfig& run);

// parallel.cpp
const Keys& parallel_keys();
void read_parallel(Section& root, RunConfig& run);

// checkpoint.cpp. Call after "output" was read.
const Keys& checkpoint_keys();
void read_checkpoint(Section& root, RunConfig& run);

// router.cpp
const Keys& router_keys();
void read_router(Section& root, RunConfig& run);

// lora.cpp
const Keys& lora_keys();
void read_lora(Section& root, RunConfig& run);

// devices.cpp and threads.cpp
std::vector<Key> device_keys();
void read_devices(Section& root, const Machine& machine, RunConfig& run);
const Keys& threads_keys();
void read_threads(Section& root, RunConfig& run);

// Call last. Settings that have no effect in combination with the rest of the run are reset, with a warning;
// combinations that are not supported are refused.
void settle_composition(Section& root, RunConfig& run);

// idle_keys.cpp: warns of keys that are set and do nothing in this run.
void warn_of_idle_keys(Section& root, const RunConfig& run);

// other.cpp: DeepSpeed's sections that this engine lacks.
std::vector<Key> other_deepspeed_keys();
void read_other_deepspeed(Section& root);

}  // namespace zg::config
