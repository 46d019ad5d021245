// The run configuration: one JSON file (comments allowed), or several of which later ones win, plus
// overrides "a.b=c". DeepSpeed's sections and keys mean what they mean there. Plain values; load_config() may
// be called from any thread, and keeps nothing.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/data/options.hpp"
#include "ziggurat/device/options.hpp"
#include "ziggurat/engine/options.hpp"
#include "ziggurat/io/options.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/config.hpp"
#include "ziggurat/optim/group_rule.hpp"
#include "ziggurat/optim/loss_scale.hpp"
#include "ziggurat/optim/schedule.hpp"

namespace zg {

// Parameters for which something differs. The first group that matches a name holds.
struct ParamGroup {
  std::vector<std::string> patterns;  // of names as in the weight files; * and ? match as in a shell
  GroupRule rule;
  bool frozen = false;  // keeps its value, and has no state
};

// How the optimizer's state is kept ("state"): bytes of Adam's per parameter in brackets, beside the weight.
//   kFull   "fp32"   master, m and v in fp32 (12)
//   kSplit  "split"  the bf16 weight is the master's high half; the same results, to the bit (10)
//   kBf16   "bf16"   m and v in bf16, rounded stochastically (6 with bf16 weights, which are split; else 8)
//   kInt8   "int8"   m and v in 8 bits, block by block (4; else 6)
enum class StatePrecision { kFull, kSplit, kBf16, kInt8 };

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdam;
  // DeepSpeed's defaults; Lion's are lr 1e-4 and beta2 0.99.
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = true;  // AdamW; Adam with "adam_w_mode": false
  bool bias_correction = true;
  double momentum = 0, dampening = 0;  // SGD
  bool nesterov = false;
  bool decay_all = false;  // "decay": "matrices" (default) or "all"
  StatePrecision state = StatePrecision::kFull;
  bool overlap = true;  // false: a phase of its own after backward
  std::vector<ParamGroup> groups;
};

struct AioConfig {
  io::Backend backend = io::Backend::kAuto;
  bool require = false;  // "backend" named: no fall-back
  std::int64_t block_size = 1 << 20;
  int queue_depth = 0;          // 0: io::default_queue_depth()
  bool adaptive_depth = false;  // looks for the shallowest depth that loses little, from queue_depth on
  int max_queue_depth = 256;    // its cap
  int queues = 1;               // rings and I/O threads a drive
  int threads = 4;              // "intra_op_parallelism" (alias "thread_count"), of the thread-pool back end
  bool sqpoll = false, iopoll = false;  // of io_uring
  bool verify = true;                   // checksums of what comes back from NVMe
};

struct TierConfig {
  std::optional<std::int64_t> device, host;  // budgets in bytes; none: no limit but the machine's
  // Empty: no NVMe tier. DriveOptions::bytes 0: as much as the run needs, which the caller computes (so with
  // DeepSpeed's nvme_path, which has no size).
  std::vector<io::DriveOptions> nvme;
  io::RamModel ram;  // for aio.backend "ram" (tests, benchmarks)
  int prefetch_depth =
      256;  // operations of the program decided ahead; what is fetched early is bounded by the budgets
  // Share of each budget that stays free for what is on its way in or out, so that a fetch need not wait for
  // the write-back that makes room for it. The rest is for what stays. None: read_ahead_of() finds it.
  std::optional<double> read_ahead;
};

struct ThreadsConfig {
  std::optional<int> compute;   // in all; none: one for each core that is not reserved
  std::optional<int> reserved;  // cores of each NUMA node; none: assign_cores() decides
  Binding bind = Binding::kAuto;
};

struct DeviceConfig {
  enum class Kind { kHost, kCuda };
  Kind kind = Kind::kHost;
  int index = 0;  // of the GPU
  // Of CUDA (CudaOptions).
  bool deterministic = true, tf32 = false, pin = true, graphs = false;
  AttentionKernel attention = AttentionKernel::kAuto;
  // Drives that reach its memory: where that spares the host's, also where it does not (and else an error),
  // never.
  enum class Direct { kAuto, kOn, kOff };
  Direct direct = Direct::kAuto;
};

struct RunConfig {
  // model
  std::string model_from;            // Hugging Face directory; empty: `model` from scratch
  std::optional<ModelConfig> model;  // given in the file; vocab_size 0: the tokenizer's
  DataConfig data;
  std::int64_t steps = 0;
  std::uint64_t seed = 1337;
  std::int64_t eval_every = 0, eval_batches = 20;        // every 0: only at the end
  std::int64_t micro_batch = 1, accumulation_steps = 1;  // train_batch_size = product
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  double gradient_clipping = 0;  // 0: off
  DType dtype = DType::kF32;     // kF32, kBF16, kF16; kF64 only for tests ("fp64": {"enabled": true})
  // Of gradients on their way to the host: "communication_data_type", by default as `dtype`; kF64 with kF64,
  // kF16 only with kF16.
  DType gradient_dtype = DType::kF32;
  LossScaleConfig loss_scale;  // with kF16
  bool recompute = true;       // activation_checkpointing.recompute
  Accumulation accumulation = Accumulation::kLayerMajor;
  // Of what no offload section places: kAuto when the files have "tiers", else kDevice as in DeepSpeed.
  Placement offload_param = Placement::kAuto, offload_optimizer = Placement::kAuto;
  Placement offload_activation = Placement::kAuto;
  // "ratio" of offload_optimizer, when the state may leave the device: the share of the parameters that is
  // updated on the host. As many whole units as are in the rest of them are updated on the device.
  double host_update_share = 1;
  DeviceConfig device;
  AioConfig aio;
  TierConfig tiers;
  ThreadsConfig threads;
  std::string output_dir;          // "runs/" + name of the first file, unless given
  std::int64_t sample_tokens = 0;  // of text generated at the end ("sample": {"tokens": 300, "prompt": ""})
  std::string sample_prompt;

  // "file: key: has no effect: reason", and what was taken for each "auto".
  std::vector<std::string> warnings;
  std::string resolved_json;  // the merged configuration, for the record
};

struct ConfigSource {
  std::vector<std::string> files;
  std::vector<std::string> overrides;  // "a.b=c"; c is JSON where it parses, else text
};

// What a configuration asks of the machine that it is read for, where it says "auto". An empty function: no.
struct Machine {
  std::function<bool()> has_gpu;                   // one that this build can use; asked for "devices"
  std::function<bool()> has_bf16;                  // instructions of the processor; asked for "bf16.enabled"
  std::function<std::string()> bf16_instructions;  // their name, for the notice
};

// Throws Error(kUsage) naming file and key: what was found, what was expected, how to mend it. Reads nothing
// but the files of the configuration: that the data and directories it names exist is for those who open
// them.
RunConfig load_config(const ConfigSource& source, const Machine& machine);

}  // namespace zg
