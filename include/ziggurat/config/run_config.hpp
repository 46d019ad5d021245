// The configuration of a run: one JSON file (comments allowed), or several, where later files override
// earlier ones, plus overrides "a.b=c". DeepSpeed's sections and keys have the same meaning as in DeepSpeed.
// All types here are plain values; load_config() may be called from any thread.
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
#include "ziggurat/model/saved_code.hpp"
#include "ziggurat/optim/group_rule.hpp"
#include "ziggurat/optim/loss_scale.hpp"
#include "ziggurat/optim/schedule.hpp"
#include "ziggurat/step/options.hpp"
#include "ziggurat/store/options.hpp"

namespace zg {

// Parameters that are updated by a rule of their own. The first group that matches a name applies.
struct ParamGroup {
  std::vector<std::string> patterns;  // match parameter names of the weight files; * and ? as in a shell
  GroupRule rule;
  bool frozen = false;  // never updated; no optimizer state
};

// How the optimizer's state is kept ("state"). In brackets: bytes of Adam's state per parameter, not counting
// the weight.
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
  bool overlap = true;  // updates run concurrently with forward or backward; false: in a phase after them
  std::vector<ParamGroup> groups;
};

struct AioConfig {
  io::Backend backend = io::Backend::kAuto;
  bool require = false;  // the file names a back end: if it is missing, fail instead of falling back
  std::int64_t block_size = 1 << 20;
  int queue_depth = 0;  // 0: io::queue_depth_within() chooses
  int queues = 1;       // rings, each with an I/O thread, per drive
  int threads = 4;      // "intra_op_parallelism" ("thread_count"): threads per queue of kThreads
  bool sqpoll = false, iopoll = false;  // options of io_uring
  bool verify = true;                   // check the checksums of data read back from NVMe
};

struct TierConfig {
  std::optional<std::int64_t> device, host;  // budgets in bytes; none: limited only by the machine
  // Empty: no NVMe tier. A drive of 0 bytes gives as much space as the run needs, which the caller computes;
  // DeepSpeed's nvme_path yields one, since it states no size.
  std::vector<io::DriveOptions> nvme;
  io::RamModel ram;  // for aio.backend "ram" (tests, benchmarks)
  // How many operations ahead the store decides its moves. The budgets bound how much is fetched early.
  int prefetch_depth = kPrefetchDepth;
  // Share of each budget that is left free for segments in transit, so that a fetch need not wait for the
  // write-back that makes room for it. Resident segments get the rest of the budget. None: read_ahead_of()
  // computes the share.
  std::optional<double> read_ahead;
  // Whether layers and embedding tables are split into tiles (Model). kAuto: if whole ones do not fit; kOn:
  // always; kOff: never.
  enum class Tiles { kAuto, kOn, kOff };
  Tiles tiles = Tiles::kAuto;
  StoredWeights weights = StoredWeights::kComputed;
};

struct ThreadsConfig {
  std::optional<int> compute;   // total compute threads; none: one for each core that is not reserved
  std::optional<int> reserved;  // reserved cores per NUMA node; none: assign_cores() decides
  Binding bind = Binding::kAuto;
};

struct DeviceConfig {
  enum class Kind { kHost, kCuda };
  Kind kind = Kind::kHost;
  int ranks = 1;                // ranks per process, each with a device of its own
  std::vector<int> gpus = {0};  // kCuda: one GPU per rank, by CUDA's index
  // See CudaOptions.
  bool deterministic = true, tf32 = false, pin = true, graphs = false;
  AttentionKernel attention = AttentionKernel::kAuto;
  // Whether drives read and write the GPU's memory directly (GPUDirect Storage).
  //   kAuto  if it is available and saves host memory
  //   kOn    always; an error if it is not available
  //   kOff   never
  enum class Direct { kAuto, kOn, kOff };
  Direct direct = Direct::kAuto;
};

struct ParallelConfig {
  double timeout_seconds = 600;              // how long a collective waits for the other ranks; above 0
  std::int64_t quantized_gradient_bits = 4;  // 4 or 8, for RunConfig::quantize_gradients
  // Degrees of model parallelism (ParallelDegrees); their product divides the number of ranks.
  int tensor = 1, context = 1, pipeline = 1;
  bool sequence = false;  // TensorShard::sequence; needs tensor above 1
  ContextMethod context_method = ContextMethod::kRing;
  // How pipeline stages are scheduled (PipelineOptions); no effect with a single stage.
  PipelineSchedule pipeline_schedule = PipelineSchedule::kBreadthFirst;
  int chunks = 1, pipeline_group = 0;
  // LayoutOptions::stage_layers: one entry for each chunk of a stage.
  std::vector<std::int32_t> stage_layers;
  int experts = 1;  // ranks that divide the experts of a layer among them (ExpertShard)
};

// LoRA adapters, trained instead of the model's weights (Lora).
struct LoraConfig {
  // How the matrices of a base whose files have them in 4 or 8 bits are kept.
  enum class Base { kElements, kCodes };
  Base base = Base::kElements;
  std::int64_t rank = 0;             // 0: no adapters, unless `from` names some
  std::optional<double> alpha = {};  // none: equal to the rank
  double dropout = 0;
  bool rslora = false;
  std::vector<std::string> targets = {"all-linear"};  // module names; patterns as in a shell
  std::vector<std::string> parameters = {};  // the same for parameters that hold all experts of a layer
  std::string from = {};                     // directory of adapters to start from
  bool on() const { return rank > 0 || !from.empty(); }
};

// Quantises the model of RunConfig::model_from before the run, once ("model.quantize").
struct QuantizeConfig {
  std::optional<SavedCode> code;  // none: the model is taken as it is
  std::string cache;              // directory of quantised models; empty: in the user's cache
  // The directory that was quantised, after RunConfig::model_from has come to name the result
  // (with_quantized_base); empty: none.
  std::string of;
};

struct RunConfig {
  std::string model_from;            // Hugging Face directory to start from; empty: initialise `model`
  QuantizeConfig quantize;           // only with `lora`
  std::optional<ModelConfig> model;  // the model that the file describes; vocab_size 0: the tokenizer's size
  DropoutRates dropout;              // for a model from either source
  LoraConfig lora;
  BalanceOptions balance;  // of routers; only with a mixture of experts
  DataConfig data;
  std::int64_t steps = 0;
  std::uint64_t seed = 1337;
  std::int64_t eval_every = 0, eval_batches = 20;  // eval_every 0: only at the end of the run
  // micro_batch counts sequences. train_batch_size = micro_batch * accumulation_steps * data_ranks().
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
  // Where tensors go that no offload section places: kAuto when the files have "tiers", else kDevice as in
  // DeepSpeed.
  OffloadTarget offload_param = OffloadTarget::kAuto, offload_optimizer = OffloadTarget::kAuto;
  OffloadTarget offload_activation = OffloadTarget::kAuto;
  std::int64_t zero_stage = 0;  // ZeRO stage: which tensors are sharded over ranks
  int shard_group = 0;          // ranks of a ZeRO shard group, which holds one full copy; 0: all ranks
  // Whether ranks exchange weights in 8 bits, and gradients in ParallelConfig::quantized_gradient_bits.
  bool quantize_weights = false, quantize_gradients = false;
  // offload_optimizer's "ratio": the share of parameters that are updated on the host, if the optimizer state
  // may leave the device. As many whole units as fit into the remaining share are updated on the device.
  double host_update_share = 1;
  DeviceConfig device;
  int processes = 1;  // started by the launcher; see Machine
  ParallelConfig parallel;
  AioConfig aio;
  TierConfig tiers;
  ThreadsConfig threads;
  CheckpointConfig checkpoint;
  std::string output_dir;          // default: "runs/" plus the name of the first file
  std::int64_t sample_tokens = 0;  // tokens of text generated at the end; 0: none
  std::string sample_prompt;

  // Lines "file: key: has no effect: reason", and lines with the value chosen for each "auto".
  std::vector<std::string> warnings;
  std::string resolved_json;  // the merged configuration, for the record

  // The base's directory as the user gave it (model.from).
  const std::string& base_name() const { return quantize.of.empty() ? model_from : quantize.of; }
  // Directory that the trained model or adapter is saved to.
  std::string model_dir() const { return output_dir + (lora.on() ? "/adapter" : "/model"); }
  int ranks() const { return processes * device.ranks; }  // in all processes
  // sharding_ranks(): ranks that compute with the same weights. data_ranks(): data-parallel ranks, which read
  // different sequences. Both are at least 1, even if the degrees do not divide the ranks; such a run is
  // refused elsewhere.
  int sharding_ranks() const { return std::max(1, ranks() / (parallel.tensor * parallel.pipeline)); }
  int data_ranks() const { return sharding_ranks() / parallel.context; }
  // Which shards rank `rank` of the world holds; a single rank holds everything.
  RankPlace place_of(int rank) const {
    const int tensor = parallel.tensor, same = sharding_ranks();
    const int shards = zero_stage == 0 || same == 1 ? 1 : shard_group > 0 ? shard_group : same;
    return {{same, rank / tensor % same, shards, zero_stage < 3},
            {tensor, parallel.context, parallel.pipeline, rank % tensor, rank / (tensor * same),
             parallel.context_method, parallel.experts}};
  }
};

struct ConfigSource {
  std::vector<std::string> files;
  std::vector<std::string> overrides;  // "a.b=c"; c is JSON if it parses as such, else text
};

// Facts about the machine that resolve "auto" values of the configuration. An empty function means "no".
struct Machine {
  std::function<bool()> has_gpu;                   // for "devices": whether this build can use a GPU
  std::function<int()> gpu_count;                  // for "cuda:all": number of such GPUs; empty: 0
  std::function<bool()> has_bf16;                  // for "bf16.enabled": the processor has bf16 instructions
  std::function<std::string()> bf16_instructions;  // the name of these instructions, for the notice
  int processes = 1;                               // of the run; each has a rank per device in `devices`
};

// Merges, checks and interprets the files and overrides. Throws Error(kUsage) that names file and key, the
// value found, the value expected, and how to mend it. Reads only the configuration files: whether the data
// and directories named in them exist is checked by the code that opens them.
RunConfig load_config(const ConfigSource& source, const Machine& machine);

}  // namespace zg
