#include "ziggurat/train/node.hpp"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "train/drives.hpp"
#include "train/watch.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/comm/gpu.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {
namespace {

// Null, with the reason in `why`, if the drives have no direct link to the GPU's memory.
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

// Makes this process's directories in the drives' directories, adds them to `own`, and removes files of
// killed runs from them. The machine's first process also cleans directories of processes that this run does
// not have.
void prepare_directories(const std::vector<io::DriveOptions>& asked, const Processes& processes,
                         std::vector<std::string>& own) {
  namespace fs = std::filesystem;
  const int count = processes.count_here();
  std::vector<std::string> paths, old;
  for (const io::DriveOptions& drive : asked) {
    paths.push_back(drive_directory(drive.path, processes.number_here(), count));
    std::error_code error;
    if (paths.back() != drive.path) {
      fs::create_directory(paths.back(), error);
      own.push_back(paths.back());
    }
    if (error) {
      throw Error(Errc::kUsage, paths.back(), "cannot be made: " + errno_text(error.value()),
                  "name a directory that this user may write to");
    }
    if (processes.number_here() > 0) continue;
    for (fs::directory_iterator at(drive.path, error), end; !error && at != end; at.increment(error)) {
      const std::string name = at->path().filename(), prefix = kProcessDirectory;
      if (name.compare(0, prefix.size(), prefix) != 0 || !at->is_directory(error)) continue;
      if (const int number = std::atoi(name.c_str() + prefix.size()); number >= count)
        old.push_back(at->path());
    }
  }
  io::remove_leftovers(paths);
  for (const std::string& directory : old) {
    io::remove_leftovers({directory});
    std::error_code error;
    fs::remove(directory, error);  // unless there is something else in it
  }
}

// Counts the space of files kept for the run's checkpoints as free if the run takes the files over, or
// removes them when it starts.
void count_kept(const RunConfig& config, Kept which, std::vector<DriveSpace>& space) {
  std::map<std::uint64_t, std::int64_t> kept;
  std::set<std::string> seen;
  for (std::size_t i = 0; i < space.size(); ++i) {
    const std::string& path = config.tiers.nvme[i].path;
    if (seen.insert(path).second)
      kept[space[i].file_system] += kept_bytes(path, config.checkpoint.path, which);
  }
  for (DriveSpace& one : space) one.free_bytes += kept[one.file_system];
}

// Chooses the sizes of the drives' files. Removes the files of killed runs first, since their space counts as
// free. No process takes space before all have read the free space.
std::vector<io::DriveOptions> sized_drives(const std::vector<RunPlan>& plans, const CoreAssignment& cores,
                                           Processes& processes, std::vector<std::string>& own,
                                           bool takes_over, const std::vector<std::string>& kept) {
  const RunPlan& plan = plans.front();
  std::vector<io::DriveOptions> asked = plan.config.tiers.nvme;
  std::int64_t bytes = 0;
  for (const RunPlan& one : plans) bytes += one.layout->table.nvme_bytes();
  for (io::DriveOptions& drive : asked) drive.bytes /= processes.count_here();
  std::vector<DriveSpace> space;
  if (plan.config.aio.backend == io::Backend::kRam) {
    for (std::uint64_t i = 0; i < asked.size(); ++i) space.push_back({kUnlimited, i});
  } else {
    processes.together([&] { prepare_directories(asked, processes, own); });
    processes.together([&] { space = space_of(asked); });
    if (takes_over && !kept.empty()) count_kept(plan.config, Kept::kAll, space);
    for (DriveSpace& one : space) one.free_bytes /= processes.count_here();
    for (io::DriveOptions& drive : asked)
      drive.path = drive_directory(drive.path, processes.number_here(), processes.count_here());
  }
  std::vector<io::DriveOptions> drives = drives_for(asked, space, bytes);
  for (std::size_t i = 0; i < drives.size(); ++i) {
    drives[i].cpus = cores.cores_of_drive(i);
    if (!kept.empty()) drives[i].kept = kept[i];
    if (std::min(asked[i].bytes, bytes) - drives[i].bytes >= io::Engine::alignment()) {
      log::info("{}: the tier takes {} of the {} that it may, since {} are free", drives[i].path,
                format_bytes(drives[i].bytes), format_bytes(asked[i].bytes),
                format_bytes(space[i].free_bytes));
    }
  }
  return drives;
}

// The cores that this process may use. Processes that may use the same cores (if the launcher binds none)
// divide them.
CoreTopology cores_of_process(Processes& processes) {
  const std::vector<int> usable = usable_cores();
  const CoreTopology all = read_core_topology(usable);
  const std::size_t hash = std::hash<std::string>()(format_cpu_list(usable)) & 0xffffffff;
  const double mine[] = {static_cast<double>(processes.machine()), static_cast<double>(hash)};
  int part = 0, parts = 0, number = 0;
  for (const std::vector<double>& theirs : processes.all_gather(mine)) {
    const bool same = theirs[0] == mine[0] && theirs[1] == mine[1];
    if (number++ == processes.number()) part = parts;
    parts += same ? 1 : 0;
  }
  return parts == 1 ? all : read_core_topology(share_of_cores(all, part, parts));
}

// The NUMA nodes for the host tier: near the GPUs, or else near the drives. Empty if no node is known.
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
  // For each NUMA node, the sum of all GPUs' shares.
  std::vector<NodeShare> shares;
  for (const auto& of_device : place_on_numa_nodes(topology, devices, drives, budget).device_shares) {
    for (const NodeShare& share : of_device) {
      const auto same = [&](const NodeShare& other) { return other.node == share.node; };
      const auto it = std::find_if(shares.begin(), shares.end(), same);
      it != shares.end() ? void(it->bytes += share.bytes) : shares.push_back(share);
    }
  }
  return shares;
}

}  // namespace

std::vector<OpenGpu> open_gpus(const RunConfig& config) {
  const DeviceConfig& d = config.device;
  std::vector<OpenGpu> gpus;
  if (d.kind == DeviceConfig::Kind::kHost) return gpus;
  std::int64_t budget = config.tiers.device.value_or(0);
  if (budget == 0) {
    budget = std::numeric_limits<std::int64_t>::max();
    for (const GpuInfo& found : list_gpus(nullptr)) {
      if (std::count(d.gpus.begin(), d.gpus.end(), found.device) > 0)
        budget = std::min(budget, std::max<std::int64_t>(0, found.free - kGpuReserve));
    }
    if (budget == std::numeric_limits<std::int64_t>::max())
      budget = 0;  // there is no GPU, as the error of the next call says
  }
  for (const int index : d.gpus) {
    OpenGpu gpu;
    gpu.device = make_cuda_device({.device = index,
                                   .budget = budget,
                                   .deterministic = d.deterministic,
                                   .tf32 = d.tf32,
                                   .attention = d.attention,
                                   .pin = d.pin,
                                   .graphs = d.graphs});
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

std::vector<int> share_of_cores(const CoreTopology& cores, int part, int parts) {
  std::vector<int> all;
  for (const CoreTopology::Node& node : cores.nodes) {
    std::vector<CoreTopology::Core> sorted = node.cores;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& a, const auto& b) { return a.physical < b.physical; });
    for (const CoreTopology::Core& core : sorted) all.push_back(core.cpu);
  }
  const auto n = static_cast<std::int64_t>(all.size());
  if (n == 0) return all;
  const std::int64_t begin = n < parts ? part % n : n * part / parts;
  const std::int64_t end = n < parts ? begin + 1 : n * (part + 1) / parts;
  std::vector<int> mine(all.begin() + begin, all.begin() + end);
  std::sort(mine.begin(), mine.end());
  return mine;
}

std::string drive_directory(const std::string& path, int number, int count) {
  return count == 1 || number == 0 ? path : fmt::format("{}/{}{}", path, kProcessDirectory, number);
}

std::vector<std::unique_ptr<CommRank>> make_comm_ranks(const std::vector<OpenGpu>& gpus, int ranks,
                                                       const Processes& processes,
                                                       const CommOptions& options) {
  const bool over_mpi = processes.count() > 1;
  if (gpus.empty()) return over_mpi ? make_mpi_ranks(ranks, options) : make_local_ranks(ranks, options);
  std::vector<Device*> devices;
  for (const OpenGpu& gpu : gpus) devices.push_back(gpu.device.get());
  return make_gpu_ranks(devices, {.timeout_seconds = options.timeout_seconds, .over_mpi = over_mpi});
}

std::vector<Hardware> hardware_of(const RunConfig& config, const std::vector<OpenGpu>& gpus,
                                  Processes& processes, bool takes_over) {
  Hardware hardware{.memory = read_memory_limits(),
                    .cores = cores_of_process(processes),
                    .processes = processes.count_here()};
  const std::vector<io::DriveOptions>& drives = config.tiers.nvme;
  std::vector<DriveSpace> space(drives.size());
  if (config.aio.backend != io::Backend::kRam) {
    try {
      space = space_of(drives);
      count_kept(config, takes_over ? Kept::kAll : Kept::kUnneeded, space);
    } catch (const Error&) {  // opening the drives will report the error
    }
  }
  for (std::size_t i = 0; i < drives.size(); ++i) {
    const bool ram = config.aio.backend == io::Backend::kRam;
    hardware.drives.push_back({.numa_node = ram ? -1 : io::node_of_drive(drives[i].path), .space = space[i]});
  }
  std::vector<Hardware> of_ranks(static_cast<std::size_t>(config.device.ranks), hardware);
  for (std::size_t r = 0; r < gpus.size(); ++r) {
    const OpenGpu& gpu = gpus[r];
    of_ranks[r].gpu = Hardware::Gpu{.sizes = &gpu.device->ops(),
                                    .ops = &gpu.device->ops(),
                                    .memory = gpu.memory,
                                    .granule = gpu.device->arena().granule(),
                                    .numa_nodes = {},
                                    .direct = gpu.direct != nullptr,
                                    .staging = 0};
    // Connections are opened by small calls, whose operands take one granule.
    if (config.ranks() > 1) of_ranks[r].gpu->staging = kGpuCommStaging + of_ranks[r].gpu->granule;
    for (const OpenGpu& one : gpus) of_ranks[r].gpu->numa_nodes.push_back(one.device->numa_node());
  }
  return of_ranks;
}

struct Node::OwnDirectories {
  std::vector<std::string> paths;
  ~OwnDirectories() {
    std::error_code error;
    for (const std::string& path : paths) std::filesystem::remove(path, error);
  }
};

Node::Node(const std::vector<RunPlan>& plans, const std::vector<OpenGpu>& gpus, Trace* trace,
           Watchdog* watchdog, Processes& processes, const std::optional<std::vector<std::string>>& kept)
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
    o.queue_depth = plan.queue_depth;
    o.queues = aio.queues;
    o.sqpoll = aio.sqpoll;
    o.iopoll = aio.iopoll;
    o.threads = aio.threads;
    o.bind_threads = bind;
    o.ram = plan.config.tiers.ram;
    if (!gpus.empty()) o.direct = gpus.front().direct;
    o.trace = trace;
    directories_ = std::make_unique<OwnDirectories>();
    io_ = io::make_engine(o, sized_drives(plans, cores_, processes, directories_->paths, kept.has_value(),
                                          kept.value_or(std::vector<std::string>())));
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

void Node::open_volume(const std::vector<double>& drive_shares, std::span<const io::StoredPiece> adopted) {
  ZG_ASSERT(volume_ == nullptr, "the volume is open");
  if (io_ == nullptr) return;
  volume_ = io::make_volume(*io_, store_volume(drive_shares, verify_));
  volume_->take(adopted);
}

}  // namespace zg
