#include "ziggurat/train/node.hpp"

#include <algorithm>
#include <limits>

#include "train/drives.hpp"
#include "train/watch.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/comm/gpu.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {
namespace {

// Null, and the reason in the log, where the drives have no direct link to the GPU's memory.
std::shared_ptr<io::DirectStorage> find_direct_storage(const RunConfig& config, Device& gpu, bool wanted,
                                                       std::string& why) {
  if (config.tiers.nvme.empty()) {
    why = "no drive is named in tiers.nvme";
    return nullptr;
  }
  if (config.aio.backend == io::Backend::kRam) {
    why = "aio.backend is ram, which has no files";
    return nullptr;
  }
  std::shared_ptr<io::DirectStorage> direct = gpu.direct_storage(wanted, &why);
  for (const io::DriveOptions& drive : config.tiers.nvme) {
    if (direct == nullptr) break;
    const std::string refusal = io::why_not_direct(*direct, drive.path);
    if (refusal.empty()) continue;
    why = fmt::format("{}: {}", drive.path, refusal);
    direct.reset();
  }
  return direct;
}

// Whether the system lets threads be bound to these cores.
bool bind_threads(CoreAssignment& cores, Binding wanted) {
  const std::string refusal = set_parallelism(cores);
  if (refusal.empty()) return wanted != Binding::kOff;
  if (wanted == Binding::kOn) {
    throw Error(Errc::kIo, "threads.bind", "is true, but threads cannot be bound to " + refusal,
                "let the process set its affinity, or say \"auto\"");
  }
  log::info("threads are not bound to {}: memory may be far from those who work on it", refusal);
  cores.bind = false;
  return false;
}

// The drives with the sizes of their files. Removes the files of killed runs first, since their space counts
// as free.
std::vector<io::DriveOptions> sized_drives(const std::vector<RunPlan>& plans, const CoreAssignment& cores) {
  const RunPlan& plan = plans.front();
  const std::vector<io::DriveOptions>& asked = plan.config.tiers.nvme;
  std::int64_t bytes = 0;
  for (const RunPlan& one : plans) bytes += one.layout->table.nvme_bytes();
  std::vector<DriveSpace> space;
  if (plan.config.aio.backend == io::Backend::kRam) {
    for (std::uint64_t i = 0; i < asked.size(); ++i) space.push_back({kUnlimited, i});
  } else {
    std::vector<std::string> paths;
    for (const io::DriveOptions& drive : asked) paths.push_back(drive.path);
    io::reclaim(paths);
    space = space_of(asked);
  }
  std::vector<io::DriveOptions> drives = drives_for(asked, space, bytes);
  for (std::size_t i = 0; i < drives.size(); ++i) {
    drives[i].cpus = cores.cores_of_drive(i);
    if (std::min(asked[i].bytes, bytes) - drives[i].bytes >= io::Engine::alignment()) {
      log::info("{}: the tier takes {} of the {} that it may, since {} are free", drives[i].path,
                format_bytes(drives[i].bytes), format_bytes(asked[i].bytes),
                format_bytes(space[i].free_bytes));
    }
  }
  return drives;
}

// The NUMA nodes for the host tier: near the GPUs, or else near the drives. Empty where no node is known.
std::vector<NodeShare> host_shares(std::int64_t budget, const io::Engine* io,
                                   const std::vector<OpenGpu>& gpus) {
  std::vector<MemoryUser> drives, devices;
  for (int i = 0; io != nullptr && i < io->drive_count(); ++i) {
    const io::DriveReport drive = io->report(i);
    drives.push_back({drive.name, drive.numa_node});
  }
  for (const OpenGpu& gpu : gpus) devices.push_back({gpu.device->describe(), gpu.device->numa_node()});
  const auto is_known = [](const MemoryUser& user) { return user.node >= 0; };
  if (std::none_of(drives.begin(), drives.end(), is_known) &&
      std::none_of(devices.begin(), devices.end(), is_known))
    return {};
  // Memory that is in use already does not count.
  NodeTopology topology = read_node_topology();
  for (const MemoryLimits::Node& free : read_memory_limits().nodes) {
    for (NodeTopology::Node& node : topology.nodes) {
      if (node.node == free.node) node.bytes = std::min(node.bytes, free.available);
    }
  }
  // Of each node what all GPUs have there.
  std::vector<NodeShare> shares;
  for (const auto& of_device : place_memory(topology, devices, drives, budget).device_shares) {
    for (const NodeShare& share : of_device) {
      const auto same = [&](const NodeShare& other) { return other.node == share.node; };
      const auto it = std::find_if(shares.begin(), shares.end(), same);
      it != shares.end() ? void(it->bytes += share.bytes) : shares.push_back(share);
    }
  }
  return shares;
}

}  // namespace

std::vector<OpenGpu> open_gpus(const RunConfig& config, Trace* trace) {
  const DeviceConfig& d = config.device;
  std::vector<OpenGpu> gpus;
  if (d.kind == DeviceConfig::Kind::kHost) return gpus;
  std::int64_t budget = config.tiers.device.value_or(0);
  if (budget == 0) {
    budget = std::numeric_limits<std::int64_t>::max();
    for (const Gpu& found : list_gpus(nullptr)) {
      if (std::count(d.gpus.begin(), d.gpus.end(), found.device) > 0)
        budget = std::min(budget, std::max<std::int64_t>(0, found.free - kGpuReserve));
    }
    if (budget == std::numeric_limits<std::int64_t>::max())
      budget = 0;  // none is there, as the next call says
  }
  for (const int index : d.gpus) {
    OpenGpu gpu;
    gpu.device = make_cuda_device({.device = index,
                                   .budget = budget,
                                   .deterministic = d.deterministic,
                                   .tf32 = d.tf32,
                                   .attention = d.attention,
                                   .pin = d.pin,
                                   .graphs = d.graphs,
                                   .trace = trace});
    gpu.memory = gpu.device->arena().budget();
    gpus.push_back(std::move(gpu));
  }
  using Direct = DeviceConfig::Direct;
  if (d.direct == Direct::kOff) return gpus;
  std::string why = "it serves runs on one GPU alone";
  if (gpus.size() == 1) {
    OpenGpu& gpu = gpus.front();
    gpu.direct = find_direct_storage(config, *gpu.device, d.direct == Direct::kOn, why);
    if (gpu.direct != nullptr) return gpus;
  }
  if (d.direct == Direct::kOn)
    throw Error(Errc::kUsage, "cuda.gpudirect_storage",
                "is asked for (aio.use_gds asks, too), but cannot be had: " + why,
                "install it and name drives that it supports (NVIDIA's gdscheck -p tells), or say \"auto\"");
  if (!config.tiers.nvme.empty()) log::debug("drives move bytes by way of host memory: {}", why);
  return gpus;
}

std::vector<std::unique_ptr<CommRank>> make_comm_ranks(const std::vector<OpenGpu>& gpus, int ranks) {
  if (gpus.empty()) return make_local_ranks(ranks, {});
  std::vector<Device*> devices;
  for (const OpenGpu& gpu : gpus) devices.push_back(gpu.device.get());
  return make_gpu_ranks(devices, {});
}

Hardware hardware_of(const RunConfig& config, const std::vector<OpenGpu>& gpus, int rank) {
  Hardware hardware{.memory = read_memory_limits(), .cores = read_core_topology()};
  const std::vector<io::DriveOptions>& drives = config.tiers.nvme;
  std::vector<DriveSpace> space(drives.size());
  if (config.aio.backend != io::Backend::kRam) {
    try {
      space = space_of(drives);
    } catch (const Error&) {  // opening the drives will report the error
    }
  }
  for (std::size_t i = 0; i < drives.size(); ++i) {
    const bool ram = config.aio.backend == io::Backend::kRam;
    hardware.drives.push_back({.numa_node = ram ? -1 : io::node_of_drive(drives[i].path), .space = space[i]});
  }
  if (!gpus.empty()) {
    const OpenGpu& gpu = gpus[static_cast<std::size_t>(rank)];
    hardware.gpu = Hardware::Gpu{.sizes = &gpu.device->ops(),
                                 .ops = &gpu.device->ops(),
                                 .memory = gpu.memory,
                                 .granule = gpu.device->arena().granule(),
                                 .numa_nodes = {},
                                 .direct = gpu.direct != nullptr,
                                 .staging = 0};
    // Connections are made by small calls, whose operands take one unit of memory for a while.
    if (gpus.size() > 1) hardware.gpu->staging = kGpuCommStaging + hardware.gpu->granule;
    for (const OpenGpu& one : gpus) hardware.gpu->numa_nodes.push_back(one.device->numa_node());
  }
  return hardware;
}

Node::Node(const std::vector<RunPlan>& plans, const std::vector<OpenGpu>& gpus, Trace* trace,
           Watchdog* watchdog)
    : cores_(plans.front().cores), verify_(plans.front().config.aio.verify) {
  const RunPlan& plan = plans.front();
  const bool bind = bind_threads(cores_, plan.config.threads.bind);
  for (std::size_t i = 0; i < gpus.size() && bind; ++i)
    gpus[i].device->bind_threads(cores_.cores_of_device(i));
  if (!plan.config.tiers.nvme.empty()) {
    const AioConfig& aio = plan.config.aio;
    io::EngineOptions o;
    o.backend = aio.backend;
    o.require = aio.require;
    o.block_size = aio.block_size;
    o.queue_depth = aio.queue_depth;
    o.adapt_depth = aio.adaptive_depth;
    o.max_queue_depth = aio.max_queue_depth;
    o.queues = aio.queues;
    o.sqpoll = aio.sqpoll;
    o.iopoll = aio.iopoll;
    o.threads = aio.threads;
    o.bind_threads = bind;
    o.ram = plan.config.tiers.ram;
    if (!gpus.empty()) o.direct = gpus.front().direct;
    o.trace = trace;
    io_ = io::make_engine(o, sized_drives(plans, cores_));
    if (watchdog != nullptr) watched_ = watchdog->watch(part_of(*io_));
  }
  std::int64_t host = 0;
  for (const RunPlan& one : plans) host += one.budgets.host;
  host_ =
      make_host_memory({.name = "host memory", .budget = host, .shares = host_shares(host, io_.get(), gpus)});
  std::vector<Device*> devices;
  for (const OpenGpu& gpu : gpus) devices.push_back(gpu.device.get());
  host_->set_hooks(host_memory_hooks(devices, io_.get()));
}

Node::~Node() {
  host_->set_hooks({});
}

void Node::open_volume(const std::vector<double>& drive_shares) {
  ZG_ASSERT(volume_ == nullptr, "the volume is open");
  if (io_ != nullptr) volume_ = io::make_volume(*io_, store_volume(drive_shares, verify_));
}

}  // namespace zg
