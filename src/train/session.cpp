#include "ziggurat/train/session.hpp"

#include <algorithm>
#include <cmath>

#include "train/drives.hpp"
#include "train/optimizer_setup.hpp"
#include "train/watch.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/memory_limits.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

Session::Session(const RunConfig& config, Trace* trace, Watchdog* watchdog)
    : config_(config), trace_(trace), watchdog_(watchdog) {
  if (config_.dtype == DType::kF16) scaler_.emplace(config_.loss_scale);
  resolve_model();
  open_device();
  // Small budgets want small logits.
  const std::int64_t logits = ops().logits_bytes();
  model_ = std::make_unique<Model>(model_config_, config_.dtype, ops(),
                                   std::min(logits, std::max(32 * kMiB, device_limit() / 8)));
  make_layout();
  resolve_budgets();
  check_plan();
  assign_threads();
}

Session::~Session() = default;

// A GPU is there from the start: it says how much memory it has. Its arena takes none before it is used.
void Session::open_device() {
  if (config_.device.kind == DeviceConfig::Kind::kHost) return;
  const DeviceConfig& d = config_.device;
  CudaOptions options{.device = d.index,
                      .budget = config_.tiers.device.value_or(0),
                      .deterministic = d.deterministic,
                      .tf32 = d.tf32,
                      .attention = d.attention,
                      .pin = d.pin,
                      .graphs = d.graphs,
                      .trace = trace_};
  if (options.budget == 0) {
    for (const Gpu& gpu : list_gpus(nullptr)) {
      if (gpu.device == d.index) options.budget = std::max<std::int64_t>(0, gpu.free - kGpuReserve);
    }
  }
  device_ = make_cuda_device(options);
  open_direct_storage();
}

// Before anything is planned: what goes past the host needs no room there.
void Session::open_direct_storage() {
  using Direct = DeviceConfig::Direct;
  const Direct wanted = config_.device.direct;
  if (wanted == Direct::kOff) return;
  std::string why;
  if (config_.tiers.nvme.empty()) {
    why = "no drive is named in tiers.nvme";
  } else if (config_.aio.backend == io::Backend::kRam) {
    why = "aio.backend is ram, which has no files";
  } else {
    direct_ = device_->direct_storage(wanted == Direct::kOn, &why);
    for (const io::DriveOptions& drive : config_.tiers.nvme) {
      if (direct_ == nullptr) break;
      const std::string refusal = io::why_not_direct(*direct_, drive.path);
      if (refusal.empty()) continue;
      why = fmt::format("{}: {}", drive.path, refusal);
      direct_.reset();
    }
  }
  if (direct_ != nullptr) return;
  if (wanted == Direct::kOn)
    throw Error(Errc::kUsage, "cuda.gpudirect_storage",
                "is asked for (aio.use_gds asks, too), but cannot be had: " + why,
                "install it and name drives that it supports (NVIDIA's gdscheck -p tells), or say \"auto\"");
  if (!config_.tiers.nvme.empty()) log::debug("drives move bytes by way of host memory: {}", why);
}

Ops& Session::ops() {
  return device_ != nullptr ? device_->ops() : host_ops();
}

// What the device tier may be at most. The host device shares the machine's memory with the host tier.
std::int64_t Session::device_limit() const {
  if (device_ != nullptr) return device_->arena().budget();
  return config_.tiers.device.value_or(available_memory() / 2);
}

void Session::resolve_model() {
  if (!config_.model_from.empty()) {
    model_config_ = read_hf_config(config_.model_from);
  } else {
    model_config_ = *config_.model;
  }
  data_ = std::make_unique<DataSet>(config_.data, config_.output_dir + "/tokens", model_config_.vocab_size);
  if (model_config_.vocab_size == 0) model_config_.vocab_size = data_->vocab_size();
  if (model_config_.vocab_size == 0) {
    throw Error(Errc::kUsage, "model.vocab_size",
                "is not given, and token files without a tokenizer do not tell it",
                "add \"vocab_size\" to the model section");
  }
  if (config_.data.seq_len > model_config_.context) {
    throw Error(
        Errc::kUsage, "data.seq_len",
        fmt::format("is {}, but the model has {} positions", config_.data.seq_len, model_config_.context),
        "lower data.seq_len");
  }
  validate(model_config_);
}

void Session::make_layout() {
  LayoutOptions o;
  o.micro_batch = {config_.micro_batch, config_.data.seq_len};
  o.micro_batches = config_.accumulation_steps;
  o.accumulation = config_.accumulation;
  o.recompute = config_.recompute;
  o.gradient = config_.gradient_dtype;
  o.weights = config_.offload_param;
  o.optimizer = config_.offload_optimizer;
  o.activations = config_.offload_activation;
  o.drives = static_cast<int>(config_.tiers.nvme.size());
  if (device_ != nullptr) o.device_granule = device_->arena().granule();
  o.state = state_format(config_.optimizer, config_.dtype);
  o.groups = parameter_groups(config_.optimizer, *model_);
  // Small budgets want small pieces: a few of them must fit at once.
  const std::int64_t host = config_.tiers.host.value_or(kGiB);
  o.state_segment_bytes = std::clamp<std::int64_t>(host / 24 / 65536 * 65536, 3 * 65536, 12 * kMiB);
  layout_ = std::make_unique<Layout>(*model_, o);
  o.device_updates = device_updates();
  if (o.device_updates > 0) layout_ = std::make_unique<Layout>(*model_, o);
  if (o.drives > 0 && config_.aio.backend != io::Backend::kRam) {
    o.state_versions = 2;
    auto twice = std::make_unique<Layout>(*model_, o);
    if (drives_have_room(twice->table.nvme_bytes())) layout_ = std::move(twice);
  }
  programs_ = std::make_unique<StepPrograms>(*layout_, update_timing());
}

UpdateTiming Session::update_timing() const {
  if (!config_.optimizer.overlap) return UpdateTiming::kSeparate;
  // A clip factor, and whether a step is left out, take all gradients.
  const bool verdict = config_.gradient_clipping > 0 || scaler_.has_value();
  return verdict ? UpdateTiming::kDeferred : UpdateTiming::kEarly;
}

// Of each budget: for what is on its way. From sizes alone, so that a plan made anywhere foretells the run's
// bytes.
Budgets Session::read_ahead(const Budgets& budgets, const StepPrograms& programs) const {
  if (const std::optional<double> share = config_.tiers.read_ahead) {
    const auto of = [&](std::int64_t bytes) {
      return static_cast<std::int64_t>(*share * static_cast<double>(bytes));
    };
    return {of(budgets.device), of(budgets.host), budgets.direct};
  }
  const AioConfig& aio = config_.aio;
  const std::int64_t depth = aio.queue_depth > 0 ? aio.queue_depth : io::default_queue_depth(aio.block_size);
  const auto drives = static_cast<std::int64_t>(config_.tiers.nvme.size());
  return read_ahead_of(layout_->table, programs, budgets,
                       {2 * TensorStore::kCopiesInFlight, depth * aio.block_size * drives});
}

// The optimizer works where its state is. That is the device if the user wants it there, or if everything
// fits it; else the units that the next forward waits for: by a share of the parameters, or as many as there
// is room beside all that is used more often for its bytes: weights, gradients and activations.
std::int32_t Session::device_updates() const {
  const Placement wanted = config_.offload_optimizer;
  const std::int32_t units = layout_->head_unit() + 1;
  if (wanted == Placement::kDevice) return units;
  if (wanted != Placement::kAuto) return units_within(1 - config_.host_update_share);
  const std::int64_t device = device_limit();
  const auto state_of = [&](std::int32_t u) {
    std::int64_t charge = 0;
    for (std::int32_t i = 0; i < layout_->state_segments(u); ++i) {
      charge += layout_->table.segment(layout_->state_segment(u, i)).device_charge;
    }
    return charge;
  };
  std::int64_t used = layout_->workspace_charge() + layout_->table.total_charge(Tier::kDevice);
  for (std::int32_t u = 0; u < units; ++u) used -= state_of(u);
  const std::int64_t room = device - read_ahead({device, 0}, StepPrograms(*layout_, update_timing())).device;
  std::int32_t n = 0;
  for (; n < units; ++n) {
    used += state_of(n);
    if (used > (n + 1 == units ? device : room)) break;
  }
  return n;
}

// The first units that have no more than this share of the optimizer's state.
std::int32_t Session::units_within(double share) const {
  const std::int32_t units = layout_->head_unit() + 1;
  std::int64_t all = 0, sum = 0;
  for (std::int32_t u = 0; u < units; ++u) all += layout_->unit(u).state_elements;
  const std::int64_t most = std::llround(share * static_cast<double>(all));
  std::int32_t n = 0;
  if (most == 0) return n;  // frozen units, which have no state, are none of it
  while (n < units && (sum += layout_->unit(n).state_elements) <= most) ++n;
  return n;
}

// Budgets that hold all tensors.
Budgets Session::everything() const {
  return {layout_->table.total_charge(Tier::kDevice), layout_->table.total_charge(Tier::kHost)};
}

void Session::resolve_budgets() {
  const Budgets all = everything();
  const std::int64_t workspace = layout_->workspace_charge();
  // Without a budget a tier takes what the run can use, as far as the machine has it.
  const MemoryLimits limits = read_memory_limits();
  const std::int64_t available = limits.left();
  const std::int64_t host = config_.tiers.host.value_or(0);
  if (device_ != nullptr) {
    budgets_.device = config_.tiers.device.value_or(std::min(all.device + workspace, device_limit()));
    budgets_.host = config_.tiers.host.value_or(std::min(all.host, available / 4 * 3));
    check_memory(limits, {.name = "tiers.host", .bytes = host});
  } else {
    budgets_.device = config_.tiers.device.value_or(std::min(all.device + workspace, available / 2));
    budgets_.host = config_.tiers.host.value_or(std::min(all.host, available / 3));
    // Together, before either is taken: each alone may fit.
    check_memory(limits,
                 {.name = "tiers.device and tiers.host", .bytes = config_.tiers.device.value_or(0) + host});
  }
  check_stated_sizes(config_.tiers.nvme, layout_->table.nvme_bytes());
}

void Session::check_plan() {
  const std::int64_t workspace = layout_->workspace_charge();
  const Budgets inside{budgets_.device - workspace, budgets_.host, direct_ != nullptr};
  const Budgets all = everything();
  const Budgets ahead = read_ahead(inside, *programs_);
  // Less of it where the budgets are too small.
  for (std::int64_t part = 1; part <= 32; part *= 2) {
    // A tier that holds everything needs no room for comings and goings.
    const auto rest = [&](std::int64_t bytes, std::int64_t everything, std::int64_t free) {
      return bytes >= everything || part == 32 ? bytes : bytes - free / part;
    };
    resident_ = {rest(inside.device, all.device, ahead.device), rest(inside.host, all.host, ahead.host),
                 inside.direct};
    plan_ = make_plan(*layout_, *programs_, resident_);
    if (plan_.fits) return;
  }
  const auto least = smallest_budgets(*layout_, *programs_, inside.device, inside.direct);
  if (!least) {
    throw Error(Errc::kMemory, "tiers",
                "this run fits no budgets: what may not leave the device or the host is too much",
                "allow more to sink (zero_optimization.offload_param and offload_optimizer), or name a drive "
                "in tiers.nvme");
  }
  const std::int64_t device = least->device + workspace;
  throw Error(
      Errc::kMemory, fmt::format("tiers.{}", plan_.obstacle->tier == Tier::kDevice ? "device" : "host"),
      fmt::format("the run does not fit device {} and host {} (no room for {}, {})",
                  format_bytes(budgets_.device), format_bytes(budgets_.host),
                  layout_->table.segment_name(plan_.obstacle->segment), format_bytes(plan_.obstacle->needed)),
      fmt::format("the smallest budgets that do: tiers.device={} ({}), and with device {} tiers.host={} ({})",
                  device, format_bytes(device), format_bytes(std::max(budgets_.device, device)), least->host,
                  format_bytes(least->host)));
}

// The host device computes where it is asked to, so that none of its threads drives it: it needs no core. A
// GPU has one thread that learns what it has done.
void Session::assign_threads() {
  CoreWishes wishes{
      .compute = config_.threads.compute, .reserved = config_.threads.reserved, .bind = config_.threads.bind};
  for (const io::DriveOptions& drive : config_.tiers.nvme)
    wishes.drives.push_back(config_.aio.backend == io::Backend::kRam ? -1 : io::node_of_drive(drive.path));
  if (device_ != nullptr) wishes.devices.push_back(device_->numa_node());
  cores_ = assign_cores(read_core_topology(), wishes);
}

// Whether threads may be bound at all.
bool Session::bind_threads() {
  const std::string refusal = set_parallelism(cores_);
  if (refusal.empty()) return config_.threads.bind != Binding::kOff;
  if (config_.threads.bind == Binding::kOn) {
    throw Error(Errc::kIo, "threads.bind", "is true, but threads cannot be bound to " + refusal,
                "let the process set its affinity, or say \"auto\"");
  }
  log::info("threads are not bound to {}: memory may be far from those who work on it", refusal);
  cores_.bind = false;
  return false;
}

void Session::open_drives() {
  ZG_ASSERT(io_ == nullptr, "the drives are open");
  const bool may_bind = bind_threads();
  if (device_ != nullptr && may_bind) device_->bind_threads(cores_.cores_of_device(0));
  if (config_.tiers.nvme.empty()) return;
  io::EngineOptions o;
  o.backend = config_.aio.backend;
  o.require = config_.aio.require;
  o.block_size = config_.aio.block_size;
  o.queue_depth = config_.aio.queue_depth;
  o.adapt_depth = config_.aio.adaptive_depth;
  o.max_queue_depth = config_.aio.max_queue_depth;
  o.queues = config_.aio.queues;
  o.sqpoll = config_.aio.sqpoll;
  o.iopoll = config_.aio.iopoll;
  o.threads = config_.aio.threads;
  o.bind_threads = may_bind;
  o.ram = config_.tiers.ram;
  o.direct = direct_;
  o.trace = trace_;
  io_ = io::make_engine(o, sized_drives());
  if (watchdog_ != nullptr) watched_.push_back(watchdog_->watch(part_of(*io_)));
}

// Room for a second copy of the optimizer's state, so that a write never goes over the only one: in what was
// stated, and in half of what is free where nothing was.
bool Session::drives_have_room(std::int64_t bytes) const {
  try {
    std::vector<DriveSpace> space = space_of(config_.tiers.nvme);
    for (DriveSpace& s : space) s.free_bytes /= 2;
    (void)drives_for(config_.tiers.nvme, space, bytes);
    return true;
  } catch (const Error&) {  // those who open the drives say what is wrong
    return false;
  }
}

// What killed runs have left counts as free, so it goes first.
std::vector<io::DriveOptions> Session::sized_drives() const {
  const std::vector<io::DriveOptions>& asked = config_.tiers.nvme;
  const std::int64_t bytes = layout_->table.nvme_bytes();
  std::vector<DriveSpace> space;
  if (config_.aio.backend == io::Backend::kRam) {
    for (std::uint64_t i = 0; i < asked.size(); ++i) space.push_back({kUnlimited, i});
  } else {
    std::vector<std::string> paths;
    for (const io::DriveOptions& drive : asked) paths.push_back(drive.path);
    io::reclaim(paths);
    space = space_of(asked);
  }
  std::vector<io::DriveOptions> drives = drives_for(asked, space, bytes);
  for (std::size_t i = 0; i < drives.size(); ++i) {
    drives[i].cpus = cores_.cores_of_drive(i);
    if (std::min(asked[i].bytes, bytes) - drives[i].bytes >= io::Engine::alignment()) {
      log::info("{}: the tier takes {} of the {} that it may, since {} are free", drives[i].path,
                format_bytes(drives[i].bytes), format_bytes(asked[i].bytes),
                format_bytes(space[i].free_bytes));
    }
  }
  return drives;
}

// The host tier near the GPU, or else near the drives that fill and empty it, where they are on nodes of
// their own.
std::vector<NodeShare> Session::host_shares() const {
  std::vector<MemoryUser> drives;
  for (int i = 0; io_ != nullptr && i < io_->drive_count(); ++i) {
    const io::DriveReport drive = io_->report(i);
    drives.push_back({drive.name, drive.numa_node});
  }
  std::vector<MemoryUser> devices;
  if (device_ != nullptr) devices.push_back({device_->describe(), device_->numa_node()});
  const auto is_known = [](const MemoryUser& user) { return user.node >= 0; };
  if (std::none_of(drives.begin(), drives.end(), is_known) &&
      std::none_of(devices.begin(), devices.end(), is_known))
    return {};
  // What is taken already is no place for it.
  NodeTopology topology = read_node_topology();
  for (const MemoryLimits::Node& free : read_memory_limits().nodes) {
    for (NodeTopology::Node& node : topology.nodes) {
      if (node.node == free.node) node.bytes = std::min(node.bytes, free.available);
    }
  }
  return place_memory(topology, devices, drives, budgets_.host).device_shares.front();
}

void Session::start(const std::vector<double>& drive_shares) {
  if (io_ == nullptr) open_drives();
  if (device_ == nullptr) device_ = make_host_device(budgets_.device, trace_);
  host_ = make_host_memory({.name = "host memory", .budget = budgets_.host, .shares = host_shares()});
  TensorStore::Options o;
  o.table = &layout_->table;
  o.device = device_.get();
  o.host = host_.get();
  o.io = io_.get();
  o.budgets = resident_;
  o.prefetch_depth = config_.tiers.prefetch_depth;
  o.verify = config_.aio.verify;
  o.drive_shares = drive_shares;
  o.trace = trace_;
  store_ = std::make_unique<TensorStore>(o);
  engine_ = std::make_unique<Engine>(
      Engine::Options{layout_.get(), programs_.get(), device_.get(), store_.get(), trace_, config_.seed});
  if (watchdog_ != nullptr) {
    watched_.push_back(watchdog_->watch(part_of(*store_)));
    watched_.push_back(watchdog_->watch(part_of(*engine_)));
  }

  if (!config_.model_from.empty()) {
    const HfWeights weights(config_.model_from, *model_);
    engine_->initialize([&](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
      weights.read(p, begin, end, out);
    });
    return;
  }
  const double std_residual =
      model_config_.init_std / std::sqrt(2.0 * static_cast<double>(model_config_.layers));
  engine_->initialize([&](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
    if (p.init == Init::kZero || p.init == Init::kOne) {
      std::fill(out, out + (end - begin), p.init == Init::kOne ? 1.0f : 0.0f);
      return;
    }
    const NamedRandom random(config_.seed, p.name);
    const auto std_dev = static_cast<float>(p.init == Init::kNormal ? model_config_.init_std : std_residual);
    parallel_for(end - begin, 16384, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t i = from; i < to; ++i)
        out[i] = std_dev * random.normal(static_cast<std::uint64_t>(begin + i));
    });
  });
}

double Session::flops_per_step() const {
  return training_flops(model_config_,
                        config_.micro_batch * config_.accumulation_steps * config_.data.seq_len,
                        config_.data.seq_len, config_.recompute);
}

Traffic Session::planned_traffic() const {
  Traffic t = plan_.per_step;
  return t += engine_->own_traffic_per_step();
}

Traffic Session::forecast() const {
  return zg::forecast(*layout_, *programs_, resident_, engine_->history());
}

UpdateRule Session::rule() const {
  UpdateRule rule = update_rule(config_, updates_);
  if (scaler_) rule.loss_scale = scaler_->scale();
  return rule;
}

std::string Session::describe_update() const {
  static constexpr const char* kWhen[] = {"deferred into the next forward",
                                          "early, in backward (no clipping)",
                                          "in a phase of its own (optimizer.overlap is off)"};
  std::string when = kWhen[static_cast<int>(programs_->timing)];
  if (programs_->timing == UpdateTiming::kDeferred) {
    when += config_.gradient_clipping > 0 ? " (gradients are clipped)"
                                          : " (fp16: it is left out if gradients overflow)";
  }
  const std::int32_t units = layout_->head_unit() + 1, on_device = layout_->options.device_updates;
  const std::string where =
      on_device == units ? "on the device"
      : on_device == 0
          ? "on the host"
          : fmt::format("of {} of {} units on the device, of the others on the host", on_device, units);
  std::int64_t frozen = 0;
  for (std::size_t u = 0; u < layout_->options.groups.size(); ++u) {
    const std::vector<Param>& params = model_->units()[u].params;
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (layout_->options.groups[u][i] == kFrozen) frozen += params[i].count();
    }
  }
  return fmt::format("{} with {:.3g} bytes of state per parameter, {}, {}{}",
                     optimizer_name(config_.optimizer), layout_->state().bytes_per_element(), where, when,
                     frozen > 0 ? fmt::format("; {} parameters are frozen", frozen) : "");
}

std::string Session::describe() const {
  static constexpr const char* kPlaces[] = {"anywhere that has room", "the device", "the host", "NVMe"};
  std::string text = fmt::format(
      "model      {} {}, {} layers of width {}, {:.1f} M parameters, {} weights{}\n"
      "state      {} (weights, gradients, optimizer); weights sink to {}, optimizer to {}\n"
      "update     {}\n"
      "batch      {} sequences of {} tokens in {} micro-batch{}, {}, recomputation {}",
      model_config_.arch == Arch::kGpt2 ? "GPT-2" : "Llama",
      config_.model_from.empty() ? "from scratch" : "from " + config_.model_from, model_config_.layers,
      model_config_.width, static_cast<double>(model_->parameter_count()) / 1e6, name_of(config_.dtype),
      model_config_.tied ? ", tied head" : "", format_bytes(layout_->state_bytes()),
      kPlaces[static_cast<int>(config_.offload_param)], kPlaces[static_cast<int>(config_.offload_optimizer)],
      describe_update(), config_.micro_batch * config_.accumulation_steps, config_.data.seq_len,
      config_.accumulation_steps, config_.accumulation_steps == 1 ? "" : "es",
      config_.accumulation == Accumulation::kLayerMajor ? "layer-major" : "micro-batch-major",
      config_.recompute ? "on" : "off");
  if (config_.device.kind == DeviceConfig::Kind::kCuda) text += "\ndevice     " + device_->describe();
  text += fmt::format("\ntiers      device {} ({} workspace), host {}", format_bytes(budgets_.device),
                      format_bytes(layout_->workspace_bytes()), format_bytes(budgets_.host));
  if (io_ != nullptr) {
    text += fmt::format(", nvme {} on {} path(s){}\nI/O        {}", format_bytes(layout_->table.nvme_bytes()),
                        layout_->table.drives(),
                        layout_->options.state_versions > 1 ? ", two versions of the state" : "",
                        io_->describe());
  }
  if (host_ != nullptr && budgets_.host > 0) {
    const HostMemoryReport got = host_->report();
    text += fmt::format("\nmemory     {} of the host tier taken, {} in huge pages", format_bytes(got.taken),
                        format_bytes(got.huge));
  }
  return text + "\nthreads    " + cores_.describe();
}

StepResult Session::train_step(std::int64_t step, Then then) {
  std::vector<Batch> batches(static_cast<std::size_t>(config_.accumulation_steps));
  std::vector<MicroBatch> micro_batches;
  for (std::size_t m = 0; m < batches.size(); ++m) {
    data_->train_batch(config_.seed, step, static_cast<std::int64_t>(m) * config_.micro_batch,
                       config_.micro_batch, batches[m]);
    micro_batches.push_back({batches[m].ids.data(), batches[m].targets.data()});
  }
  const StepResult result = engine_->train_step(step, micro_batches, rule(), then);
  ++(result.skipped ? skipped_ : updates_);
  if (scaler_) scaler_->update(result.skipped);
  return result;
}

double Session::evaluate() {
  Batch batch;
  const std::int64_t windows =
      std::max<std::int64_t>(1, (data_->validation_tokens() - 1) / config_.data.seq_len);
  const std::int64_t batches =
      std::min(config_.eval_batches, (windows + config_.micro_batch - 1) / config_.micro_batch);
  return engine_->evaluate(batches, [&](std::int64_t i) {
    data_->validation_batch(i * config_.micro_batch, config_.micro_batch, batch);
    return MicroBatch{batch.ids.data(), batch.targets.data()};
  });
}

void Session::save_model(const std::string& directory) {
  engine_->flush();
  const auto& units = model_->units();
  save_hf(directory, *model_, DType::kF32,
          [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
            engine_->read_master(static_cast<std::int32_t>(&unit - units.data()), p, begin, end, out);
          });
  if (data_->tokenizer() != nullptr) data_->tokenizer()->save(directory);
}

}  // namespace zg
