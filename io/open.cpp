#include "io/open.hpp"

#include "io/core.hpp"
#include "io/drive_file.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// Caps that keep a slip of the pen from asking the kernel for absurd things.
constexpr std::int64_t kMaxBlock = kGiB;
constexpr int kMaxDepth = 4096;
constexpr int kMaxThreads = 256;

using Files = std::vector<DriveFile>;

void check(const EngineOptions& o, const std::vector<DriveOptions>& drives) {
  if (o.block_size < Engine::alignment() || o.block_size > kMaxBlock ||
      o.block_size % Engine::alignment() != 0) {
    throw Error(Errc::kUsage, "aio.block_size", fmt::format("{} bytes", o.block_size),
                fmt::format("a multiple of {}, at most {}", Engine::alignment(), format_bytes(kMaxBlock)));
  }
  if (o.queue_depth < 1 || o.queue_depth > kMaxDepth) {
    throw Error(Errc::kUsage, "aio.queue_depth", fmt::format("{}", o.queue_depth),
                fmt::format("1 to {}", kMaxDepth));
  }
  if (o.threads < 1 || o.threads > kMaxThreads) {
    throw Error(Errc::kUsage, "aio.thread_count", fmt::format("{}", o.threads),
                fmt::format("1 to {}", kMaxThreads));
  }
  if (drives.empty()) throw Error(Errc::kUsage, "tiers.nvme", "names no path", "name at least one directory");
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all;
}

std::unique_ptr<Queue> with_faults(std::unique_ptr<Queue> queue, const EngineOptions& o, int drive) {
  if (!injects_anything(o.faults)) return queue;
  return make_fault_queue(std::move(queue), o.queue_depth, o.faults, drive);
}

std::unique_ptr<Engine> open_ram(const EngineOptions& o, const std::vector<DriveOptions>& drives) {
  std::vector<DriveSpec> specs;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    const std::int64_t bytes = round_up(drives[i].bytes, Engine::alignment());
    if (bytes <= 0) throw Error(Errc::kUsage, "ram drive", fmt::format("of {} bytes", drives[i].bytes));
    const int drive = static_cast<int>(i);
    specs.push_back({.name = fmt::format("nvme{}", i), .bytes = bytes, .make_queue = [o, bytes, drive] {
                       return with_faults(make_ram_queue(bytes, o.queue_depth, o.ram), o, drive);
                     }});
  }
  return std::make_unique<EngineCore>(Backend::kRam, o, std::move(specs));
}

std::unique_ptr<Engine> open_files(Backend backend, const EngineOptions& o,
                                   const std::shared_ptr<Files>& files, const std::string& note) {
  std::vector<DriveSpec> specs;
  for (std::size_t i = 0; i < files->size(); ++i) {
    const DriveFile& file = (*files)[i];
    const int drive = static_cast<int>(i);
    specs.push_back({.name = fmt::format("nvme{}", i),
                     .bytes = file.bytes(),
                     .make_queue = [o, backend, drive, fd = file.fd()] {
                       auto queue = backend == Backend::kUring
                                        ? make_uring_queue(fd, o.queue_depth)
                                        : make_thread_queue(fd, o.queue_depth, o.threads,
                                                            fmt::format("zg-io{}", drive));
                       return with_faults(std::move(queue), o, drive);
                     }});
  }
  return std::make_unique<EngineCore>(backend, o, std::move(specs), note, files);
}

// Opens the files; what they lack becomes a warning, or an error where it was required.
std::shared_ptr<Files> open_drive_files(const EngineOptions& o, const std::vector<DriveOptions>& drives,
                                        Opened& opened, std::vector<std::string>& notes) {
  auto files = std::make_shared<Files>();
  bool all_direct = true;
  for (const DriveOptions& drive : drives) {
    const DriveFile& file = files->emplace_back(drive);
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
  return files;
}

}  // namespace

Opened open_engine(const EngineOptions& options, const std::vector<DriveOptions>& drives) {
  check(options, drives);
  Opened opened;
  if (options.backend == Backend::kRam) {
    opened.engine = open_ram(options, drives);
    return opened;
  }
  std::vector<std::string> notes;
  const auto files = open_drive_files(options, drives, opened, notes);
  if (options.backend != Backend::kThreads) {
    try {
      opened.engine = open_files(Backend::kUring, options, files, joined(notes));
      return opened;
    } catch (const Error& e) {
      // "auto" that is required has nothing to require but O_DIRECT.
      if (options.require && options.backend == Backend::kUring) throw;
      notes.push_back(fmt::format("io_uring unavailable: {}", e.message()));
      opened.notices.push_back(
          fmt::format("I/O through threads, as io_uring is unavailable: {} ({})", e.message(), e.hint()));
    }
  }
  opened.engine = open_files(Backend::kThreads, options, files, joined(notes));
  return opened;
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
    case Backend::kThreads:
      return "threads";
    case Backend::kRam:
      return "ram";
  }
  return "?";
}

}  // namespace zg::io
