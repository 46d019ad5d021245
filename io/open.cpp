#include "io/open.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "io/core.hpp"
#include "io/drive_file.hpp"
#include "io/topology.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// Beyond these limits there must be a mistake.
constexpr int kMaxDepth = 4096;
constexpr int kMaxThreads = 256;
constexpr int kMaxQueues = 64;

struct Files {
  std::vector<DriveFile> files;
  std::vector<std::unique_ptr<DirectStorage::File>> direct;  // the same files, if there is a DirectStorage
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
  in_range("aio.queues", o.queues, kMaxQueues);
  in_range("aio.intra_op_parallelism", o.threads, kMaxThreads);
  if (o.direct != nullptr) in_range("direct_threads", o.direct_threads, kMaxThreads);
  if (o.direct != nullptr && o.backend == Backend::kRam) {
    throw Error(Errc::kUsage, "aio.backend", "is ram, which has no files that a device could read",
                "name another back end, or do without " + o.direct->describe());
  }
  if (drives.empty()) throw Error(Errc::kUsage, "tiers.nvme", "names no path", "name at least one directory");
}

std::unique_ptr<Engine> open_ram(EngineOptions o, const std::vector<DriveOptions>& drives) {
  o.queues = 1;  // since the queue is the drive
  std::vector<DriveSpec> specs;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    const DriveOptions& d = drives[i];
    const std::int64_t bytes = round_up(d.bytes, Engine::alignment());
    if (bytes <= 0) throw Error(Errc::kUsage, "ram drive", fmt::format("of {} bytes", d.bytes));
    specs.push_back({.name = fmt::format("nvme{}", i),
                     .path = d.path,
                     .bytes = bytes,
                     .endurance_bytes = d.endurance_bytes,
                     .cpus = d.cpus,
                     .make_queue = [bytes, model = d.ram.value_or(o.ram)](int, int depth) {
                       return make_ram_queue(bytes, depth, model);
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

// The cores on which a drive's I/O threads run; empty: any.
std::vector<int> cpus_for(const EngineOptions& o, const DriveOptions& drive, int node) {
  if (!drive.cpus.empty()) return drive.cpus;
  return o.bind_threads ? cpus_of_node(node) : std::vector<int>();
}

std::unique_ptr<Engine> open_files(Backend backend, const EngineOptions& o,
                                   const std::vector<DriveOptions>& drives,
                                   const std::shared_ptr<Files>& files, const std::string& note) {
  std::vector<DriveSpec> specs;
  for (std::size_t i = 0; i < files->files.size(); ++i) {
    DriveFile& file = files->files[i];
    const int node = numa_node_of(file.path());
    const std::string thread_name = fmt::format("zg-io{}", i);
    specs.push_back(
        {.name = fmt::format("nvme{}", i),
         .path = file.path(),
         .bytes = file.bytes(),
         .endurance_bytes = drives[i].endurance_bytes,
         .numa_node = node,
         .cpus = cpus_for(o, drives[i], node),
         .make_queue = [o, backend, thread_name, fd = file.fd()](
                           int, int depth) { return make_file_queue(backend, o, fd, depth, thread_name); },
         .file = [&file] { return file.name(); },
         .sync = [&file] { return file.sync(); },
         .renamed = [&file](const std::string& name, bool kept) { file.renamed(name, kept); }});
    if (o.direct == nullptr) continue;
    specs.back().make_direct_queue = [o, thread_name, file = files->direct[i].get()](int depth) {
      return make_direct_queue(*o.direct, *file, depth, thread_name + ".gpu");
    };
  }
  return std::make_unique<EngineCore>(backend, o, std::move(specs), note, files);
}

// Opens the files. Without O_DIRECT or reserved space there is a warning; a required O_DIRECT throws.
std::shared_ptr<Files> open_drive_files(const EngineOptions& o, const std::vector<DriveOptions>& drives,
                                        Opened& opened, std::vector<std::string>& notes) {
  auto files = std::make_shared<Files>();
  files->files.reserve(drives.size());  // they stay where they are
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
  const EngineOptions options = with_depth(asked);
  check(options, drives);
  Opened opened;
  if (options.backend == Backend::kRam) {
    opened.engine = open_ram(options, drives);
    return opened;
  }
  std::vector<std::string> notes;
  const auto files = open_drive_files(options, drives, opened, notes);
  // The fastest first. A back end that was named is tried before those behind it, or alone if it is required.
  std::vector<Backend> candidates = {Backend::kUring, Backend::kLibaio, Backend::kThreads};
  if (options.backend != Backend::kAuto) {
    candidates.erase(candidates.begin(), std::find(candidates.begin(), candidates.end(), options.backend));
    if (options.require) candidates.resize(1);
  }
  for (const Backend backend : candidates) {
    try {
      opened.engine = open_files(backend, options, drives, files, fmt::format("{}", fmt::join(notes, ", ")));
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

constexpr const char* kBackendNames[] = {"auto", "io_uring", "libaio", "threads", "ram"};  // by Backend

const char* name_of(Backend backend) {
  return kBackendNames[static_cast<std::size_t>(backend)];
}

std::optional<Backend> backend_named(std::string_view name) {
  const auto* const found = std::find(std::begin(kBackendNames), std::end(kBackendNames), name);
  if (found == std::end(kBackendNames)) return std::nullopt;
  return static_cast<Backend>(found - std::begin(kBackendNames));
}

}  // namespace zg::io
