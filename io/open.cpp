#include "io/open.hpp"

#include <algorithm>

#include "io/core.hpp"
#include "io/drive_file.hpp"
#include "io/topology.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// Caps that keep a slip of the pen from asking the kernel for absurd things.
constexpr int kMaxDepth = 4096;
constexpr int kMaxThreads = 256;
constexpr int kMaxQueues = 64;

struct Files {
  std::vector<DriveFile> files;
  std::vector<std::unique_ptr<DirectStorage::File>> direct;  // of the same, if there is a DirectStorage
};

void check(const EngineOptions& o, const std::vector<DriveOptions>& drives) {
  if (o.block_size < Engine::alignment() || o.block_size > Engine::max_block_size() ||
      o.block_size % Engine::alignment() != 0) {
    throw Error(Errc::kUsage, "aio.block_size", fmt::format("{} bytes", o.block_size),
                fmt::format("a multiple of {}, at most {}", Engine::alignment(),
                            format_bytes(Engine::max_block_size())));
  }
  const auto in_range = [](const char* key, int value, int most) {
    if (value < 1 || value > most)
      throw Error(Errc::kUsage, key, fmt::format("{}", value), fmt::format("1 to {}", most));
  };
  in_range("aio.queue_depth", o.queue_depth, kMaxDepth);
  if (o.adapt_depth) in_range("aio.max_queue_depth", o.max_queue_depth, kMaxDepth);
  if (o.adapt_depth && o.max_queue_depth < o.queue_depth) {
    throw Error(Errc::kUsage, "aio.max_queue_depth",
                fmt::format("{}, with a queue_depth of {}", o.max_queue_depth, o.queue_depth),
                "at least the depth that it begins with");
  }
  in_range("aio.queues", o.queues, kMaxQueues);
  in_range("aio.intra_op_parallelism", o.threads, kMaxThreads);
  if (o.direct != nullptr) in_range("direct_threads", o.direct_threads, kMaxThreads);
  if (o.direct != nullptr && o.backend == Backend::kRam) {
    throw Error(Errc::kUsage, "aio.backend", "is ram, which has no files that a device could read",
                "name another back end, or do without " + o.direct->describe());
  }
  if (drives.empty()) throw Error(Errc::kUsage, "tiers.nvme", "names no path", "name at least one directory");
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all;
}

std::unique_ptr<Queue> with_faults(std::unique_ptr<Queue> queue, const EngineOptions& o, int depth, int drive,
                                   int index) {
  if (!injects_anything(o.faults)) return queue;
  return make_fault_queue(std::move(queue), depth, o.faults, drive, index);
}

std::unique_ptr<Engine> open_ram(EngineOptions o, const std::vector<DriveOptions>& drives) {
  o.queues = 1;  // the queue is the drive
  std::vector<DriveSpec> specs;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    const DriveOptions& d = drives[i];
    const std::int64_t bytes = round_up(d.bytes, Engine::alignment());
    if (bytes <= 0) throw Error(Errc::kUsage, "ram drive", fmt::format("of {} bytes", d.bytes));
    const int drive = static_cast<int>(i);
    const RamModel model = d.ram.value_or(o.ram);
    specs.push_back({.name = fmt::format("nvme{}", i),
                     .path = d.path,
                     .bytes = bytes,
                     .endurance_bytes = d.endurance_bytes,
                     .cpus = d.cpus,
                     .make_queue = [o, bytes, model, drive](int queue, int depth) {
                       return with_faults(make_ram_queue(bytes, depth, model), o, depth, drive, queue);
                     }});
  }
  return std::make_unique<EngineCore>(Backend::kRam, o, std::move(specs));
}

std::unique_ptr<Queue> make_file_queue(Backend backend, const EngineOptions& o, int fd, int depth,
                                       const std::string& name) {
  switch (backend) {
    case Backend::kUring:
      return make_uring_queue(
          fd, depth,
          {.registered = o.registered, .sqpoll = o.sqpoll, .iopoll = o.iopoll, .require = o.require});
    case Backend::kLibaio:
      return make_aio_queue(fd, depth);
    default:
      return make_thread_queue(fd, depth, o.threads, name);
  }
}

// Where a drive's I/O threads run; empty: anywhere.
std::vector<int> cpus_for(const EngineOptions& o, const DriveOptions& drive, int node) {
  if (!drive.cpus.empty()) return drive.cpus;
  return o.bind_threads ? cpus_of_node(node) : std::vector<int>();
}

std::unique_ptr<Engine> open_files(Backend backend, const EngineOptions& o,
                                   const std::vector<DriveOptions>& drives,
                                   const std::shared_ptr<Files>& files, const std::string& note) {
  std::vector<DriveSpec> specs;
  for (std::size_t i = 0; i < files->files.size(); ++i) {
    const DriveFile& file = files->files[i];
    const int drive = static_cast<int>(i);
    const int node = numa_node_of(file.path());
    specs.push_back({.name = fmt::format("nvme{}", i),
                     .path = file.path(),
                     .bytes = file.bytes(),
                     .endurance_bytes = file.endurance_bytes(),
                     .numa_node = node,
                     .cpus = cpus_for(o, drives[i], node),
                     .make_queue = [o, backend, drive, fd = file.fd()](int queue, int depth) {
                       const std::string name = fmt::format("zg-io{}", drive);
                       return with_faults(make_file_queue(backend, o, fd, depth, name), o, depth, drive,
                                          queue);
                     }});
    if (o.direct == nullptr) continue;
    specs.back().make_direct_queue = [o, drive, file = files->direct[i].get()](int depth) {
      auto queue = make_direct_queue(*o.direct, *file, depth, fmt::format("zg-io{}.gpu", drive));
      return with_faults(std::move(queue), o, depth, drive, o.queues);
    };
  }
  return std::make_unique<EngineCore>(backend, o, std::move(specs), note, files);
}

// Opens the files; what they lack becomes a warning, or an error where it was required.
std::shared_ptr<Files> open_drive_files(const EngineOptions& o, const std::vector<DriveOptions>& drives,
                                        Opened& opened, std::vector<std::string>& notes) {
  auto files = std::make_shared<Files>();
  bool all_direct = true;
  for (const DriveOptions& drive : drives) {
    const DriveFile& file = files->files.emplace_back(drive);
    if (const std::string& why = file.buffered_because(); !why.empty()) {
      all_direct = false;
      if (o.require) {
        throw Error(Errc::kIo, drive.path, "O_DIRECT is required and not to be had: " + why,
                    "name a path on a drive's own filesystem (ext4, xfs), or do not require a back end");
      }
      notes.push_back(fmt::format("buffered on {} ({})", drive.path, why));
      opened.warnings.push_back(
          fmt::format("{}: without O_DIRECT ({}); its bytes take memory as well, outside of the host budget",
                      drive.path, why));
    }
    if (const std::string& why = file.sparse_because(); !why.empty()) {
      notes.push_back(fmt::format("space not reserved on {} ({})", drive.path, why));
      opened.warnings.push_back(fmt::format(
          "{}: space is not reserved ({}); a full drive shows as a failed write", drive.path, why));
    }
  }
  if (all_direct) notes.insert(notes.begin(), "O_DIRECT");
  if (o.direct == nullptr) return files;
  for (const DriveFile& file : files->files) {
    try {
      files->direct.push_back(o.direct->open(file.fd()));
    } catch (const Error& e) {
      throw Error(e.code(), file.path(), fmt::format("{}: {}", o.direct->describe(), e.message()), e.hint());
    }
  }
  return files;
}

}  // namespace

Opened open_engine(const EngineOptions& asked, const std::vector<DriveOptions>& drives) {
  const EngineOptions options = resolved(asked);
  check(options, drives);
  Opened opened;
  if (options.backend == Backend::kRam) {
    opened.engine = open_ram(options, drives);
    return opened;
  }
  std::vector<std::string> notes;
  const auto files = open_drive_files(options, drives, opened, notes);
  // Best first; one that was named is the only one, or with `auto` the first of those that work.
  std::vector<Backend> candidates = {Backend::kUring, Backend::kLibaio, Backend::kThreads};
  if (options.backend != Backend::kAuto) {
    candidates.erase(candidates.begin(), std::find(candidates.begin(), candidates.end(), options.backend));
    if (options.require) candidates.resize(1);
  }
  for (const Backend backend : candidates) {
    try {
      opened.engine = open_files(backend, options, drives, files, joined(notes));
      return opened;
    } catch (const Error& e) {
      if (backend == candidates.back()) throw;
      notes.push_back(fmt::format("{} unavailable: {}", name_of(backend), e.message()));
      opened.notices.push_back(
          fmt::format("{} is unavailable for I/O: {} ({})", name_of(backend), e.message(), e.hint()));
    }
  }
  __builtin_unreachable();
}

std::unique_ptr<Engine> make_engine(const EngineOptions& options, const std::vector<DriveOptions>& drives) {
  Opened opened = open_engine(options, drives);
  for (const std::string& text : opened.warnings) log::warning("{}", text);
  for (const std::string& text : opened.notices) log::info("{}", text);
  return std::move(opened.engine);
}

const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::kAuto:
      return "auto";
    case Backend::kUring:
      return "io_uring";
    case Backend::kLibaio:
      return "libaio";
    case Backend::kThreads:
      return "threads";
    case Backend::kRam:
      return "ram";
  }
  return "?";
}

}  // namespace zg::io
