// The configuration of a run: one JSON file (comments allowed), or several of which later ones win, plus
// overrides "a.b=c". DeepSpeed's sections and keys mean what they mean in DeepSpeed. All types here are plain
// values; load_config() may be called from any thread.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/config/checkpoint.hpp"
#include "ziggurat/data/options.hpp"
#include "ziggurat/device/options.hpp"
#include "ziggurat/io/options.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/config.hpp"
#include "ziggurat/optim/group_rule.hpp"
#include "ziggurat/optim/loss_scale.hpp"
#include "ziggurat/optim/schedule.hpp"
#include "ziggurat/step/options.hpp"
#include "ziggurat/store/options.hpp"

namespace zg {

// Parameters whose update differs from that of the others. The first group that matches a name applies.
struct ParamGroup {
  std::vector<std::string> patterns;  // of names as in the weight files; * and ? match as in a shell
  GroupRule rule;
  bool frozen = false;  // never updated, and without state
};

// How the optimizer's state is kept ("state"). In brackets: bytes of Adam's state per parameter, beside the
// weight.
//   kFull   "fp32"   master, m and v in fp32 (12)
//   kSplit  "split"  the bf16 weight is the master's high half; the same results, to the bit (10)
//   kBf16   "bf16"   m and v in bf16, rounded stochastically (6 with bf16 weights, which are split; else 8)
//   kInt8   "int8"   m and v in 8 bits, block by block (4; else 6)
enum class StatePrecision { kFull, kSplit, kBf16, kInt8 };

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdam;
  // DeepSpeed's defaults; Lion's are lr 1e-4 and beta2 0.99.
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = true;  // weight decay as in AdamW; false: Adam with "adam_w_mode": false
  bool bias_correction = true;
  double momentum = 0, dampening = 0;  // SGD
  bool nesterov = false;
  bool decay_all = false;  // "decay": "matrices", or "all", which decays norms and biases too
  StatePrecision state = StatePrecision::kFull;
  bool overlap = true;  // updates run beside forward or backward; false: in a phase of their own afterwards
  std::vector<ParamGroup> groups;
};

struct AioConfig {
  io::Backend backend = io::Backend::kAuto;
  bool require = false;  // the file names a back end, so there is no fall-back
  std::int64_t block_size = 1 << 20;
  int queue_depth = 0;  // 0: io::queue_depth_within()
  int queues = 1;       // rings, each with an I/O thread, per drive
  int threads = 4;      // "intra_op_parallelism" ("thread_count"): threads per queue of kThreads
  bool sqpoll = false, iopoll = false;  // options of io_uring
  bool verify = true;                   // compares checksums of what is read back from NVMe
};

struct TierConfig {
  std::optional<std::int64_t> device, host;  // budgets in bytes; none: no limit but the machine's
  // Empty: there is no NVMe tier. A drive with 0 bytes, as from DeepSpeed's nvme_path, which states no size,
  // gives as much as the run needs; the caller computes that.
  std::vector<io::DriveOptions> nvme;
  io::RamModel ram;  // for aio.backend "ram" (tests, benchmarks)
  // Operations of the program that are decided ahead. How much is fetched early is bounded by the budgets.
  int prefetch_depth = kPrefetchDepth;
  // Share of each budget that stays free for segments on their way in or out, so that a fetch need not wait
  // for the write-back that makes room for it. The rest of the budget is for what stays. None:
  // read_ahead_of() finds it.
  std::optional<double> read_ahead;
  // Whether layers and tables are in tiles (Model): where whole ones do not fit, always, or never.
  enum class Tiles { kAuto, kOn, kOff };
  Tiles tiles = Tiles::kAuto;
};

struct ThreadsConfig {
  std::optional<int> compute;   // compute threads in all; none: one for each core that is not reserved
  std::optional<int> reserved;  // reserved cores of each NUMA node; none: assign_cores() decides
  Binding bind = Binding::kAuto;
};

struct DeviceConfig {
  enum class Kind { kHost, kCuda };
  Kind kind = Kind::kHost;
  int ranks = 1;                // of each process, each with a device of its own
  std::vector<int> gpus = {0};  // kCuda: those of the ranks, as CUDA counts them
  // See CudaOptions.
  bool deterministic = true, tf32 = false, pin = true, graphs = false;
  AttentionKernel attention = AttentionKernel::kAuto;
  // Whether drives read and write the GPU's memory directly (GPUDirect Storage).
  //   kAuto  where that is there and spares host memory
  //   kOn    always; an error where it is not there
  //   kOff   never
  enum class Direct { kAuto, kOn, kOff };
  Direct direct = Direct::kAuto;
};

struct ParallelConfig {
  double timeout_seconds = 600;              // that a collective waits for the other ranks; above 0
  std::int64_t quantized_gradient_bits = 4;  // of RunConfig::quantize_gradients, 4 or 8
  // Degrees of the parallelism that spreads the model (ParallelDegrees); their product divides the ranks.
  int tensor = 1, context = 1, pipeline = 1;
  bool sequence = false;  // TensorShard::sequence, with tensor above 1
  ContextMethod context_method = ContextMethod::kRing;
  // How the stages of a pipeline work (PipelineOptions); without effect with one.
  PipelineSchedule pipeline_schedule = PipelineSchedule::kBreadthFirst;
  int chunks = 1, pipeline_group = 0;
  // LayoutOptions::stage_layers, one number for each chunk of a stage.
  std::vector<std::int32_t> stage_layers;
};

// Adapters that are trained in place of the model (Lora).
struct LoraConfig {
  std::int64_t rank = 0;             // 0: none, unless `from` names some
  std::optional<double> alpha = {};  // none: the rank
  double dropout = 0;
  bool rslora = false;
  std::vector<std::string> targets = {"all-linear"};  // names of modules, patterns as in a shell
  std::string from = {};                              // directory of adapters to start from
  bool on() const { return rank > 0 || !from.empty(); }
};

struct RunConfig {
  std::string model_from;            // Hugging Face directory to start from; empty: a new `model`
  std::optional<ModelConfig> model;  // a model that the file describes; vocab_size 0: as the tokenizer's
  DropoutRates dropout;              // of either
  LoraConfig lora;
  DataConfig data;
  std::int64_t steps = 0;
  std::uint64_t seed = 1337;
  std::int64_t eval_every = 0, eval_batches = 20;  // eval_every 0: at the end of the run alone
  // Sequences; train_batch_size is their product, times data_ranks().
  std::int64_t micro_batch = 1, accumulation_steps = 1;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  double gradient_clipping = 0;  // largest global norm of the gradient; 0: off
  DType dtype = DType::kF32;     // kF32, kBF16, kF16; kF64 only for tests ("fp64": {"enabled": true})
  // "communication_data_type": the type of gradients on their way to the host, by default `dtype`. Always
  // kF64 with kF64; kF16 only with kF16.
  DType gradient_dtype = DType::kF32;
  LossScaleConfig loss_scale;  // used with kF16
  bool recompute = true;       // activation_checkpointing.recompute
  Accumulation accumulation = Accumulation::kLayerMajor;
  // For tensors that no offload section places: kAuto when the files have "tiers", else kDevice as in
  // DeepSpeed.
  OffloadTarget offload_param = OffloadTarget::kAuto, offload_optimizer = OffloadTarget::kAuto;
  OffloadTarget offload_activation = OffloadTarget::kAuto;
  std::int64_t zero_stage = 0;  // what several ranks shard
  int shard_group = 0;          // ranks that hold everything once together; 0: all
  // Whether ranks exchange weights in 8 bits, and gradients in ParallelConfig's.
  bool quantize_weights = false, quantize_gradients = false;
  // "ratio" of offload_optimizer: the share of the parameters that is updated on the host, when the state may
  // leave the device. As many whole units as fit into the remaining share are updated on the device.
  double host_update_share = 1;
  DeviceConfig device;
  int processes = 1;  // that a launcher has started; see Machine
  ParallelConfig parallel;
  AioConfig aio;
  TierConfig tiers;
  ThreadsConfig threads;
  CheckpointConfig checkpoint;
  std::string output_dir;          // by default "runs/" and the name of the first file
  std::int64_t sample_tokens = 0;  // tokens of text generated at the end; 0: none
  std::string sample_prompt;

  // "file: key: has no effect: reason", and the value that was taken for each "auto".
  std::vector<std::string> warnings;
  std::string resolved_json;  // the merged configuration, for the record

  // Directory that what was trained is saved to.
  std::string model_dir() const { return output_dir + (lora.on() ? "/adapter" : "/model"); }
  int ranks() const { return processes * device.ranks; }  // of all processes
  // Ranks that compute with the same weights, and those among them that have sequences of their own. At least
  // 1, though the degrees may not divide the ranks, for which the run is refused.
  int sharding_ranks() const { return std::max(1, ranks() / (parallel.tensor * parallel.pipeline)); }
  int data_ranks() const { return sharding_ranks() / parallel.context; }
  // What rank `rank` of all holds; one rank alone holds everything.
  RankPlace place_of(int rank) const {
    const int tensor = parallel.tensor, same = sharding_ranks();
    const int shards = zero_stage == 0 || same == 1 ? 1 : shard_group > 0 ? shard_group : same;
    return {{same, rank / tensor % same, shards, zero_stage < 3},
            {tensor, parallel.context, parallel.pipeline, rank % tensor, rank / (tensor * same),
             parallel.context_method}};
  }
};

struct ConfigSource {
  std::vector<std::string> files;
  std::vector<std::string> overrides;  // "a.b=c"; c is JSON where it parses, else text
};

// Answers what a configuration leaves to the machine by "auto". An empty function stands for no.
struct Machine {
  std::function<bool()> has_gpu;                   // for "devices": a GPU that this build can use
  std::function<int()> gpu_count;                  // for "cuda:all": how many of them; empty stands for none
  std::function<bool()> has_bf16;                  // for "bf16.enabled": the processor has bf16 instructions
  std::function<std::string()> bf16_instructions;  // the name of these instructions, for the notice
  int processes = 1;                               // of the run, each with as many ranks as `devices` names
};

// Merges, checks and interprets the files and overrides. Throws Error(kUsage) naming file and key: what was
// found, what was expected, how to mend it. Reads nothing but the files of the configuration: whether the
// data and the directories that it names exist is checked by those who open them.
RunConfig load_config(const ConfigSource& source, const Machine& machine);

}  // namespace zg
