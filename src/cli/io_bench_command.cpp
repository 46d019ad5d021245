// `ziggurat io-bench`: measures the throughput and latency of drives through the engine.
#include <signal.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/bench_watch.hpp"
#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/bench.hpp"

namespace zg::cli {
namespace {

namespace fs = std::filesystem;

constexpr double kDefaultSeconds = 5;
constexpr std::int64_t kDefaultSize = 4 * kGiB;
// Number of blocks in the default file: with small blocks the file is smaller than kDefaultSize, since
// filling a large one would take long, and a small one suffices.
constexpr std::int64_t kDefaultBlocks = 65536;

struct Flags {
  std::vector<std::string> paths, files;
  std::string op = "read", pattern = "sequential", block_size = "1MiB", size, backend = "auto";
  std::string registered = "on", verify = "off", huge_pages = "on";
  int queue_depth = 0, queues = 1, threads = 4;
  std::optional<double> seconds;
  double ramp = 0.5;
  std::uint64_t seed = 1;
  bool sqpoll = false, iopoll = false, overwrite = false, json = false;
};

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words](std::string& text) {
        if (std::find(words.begin(), words.end(), text) != words.end()) return std::string();
        std::string known;
        for (std::size_t i = 0; i < words.size(); ++i)
          known += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
        return fmt::format("found {}, expected {}", text, known);
      },
      "");
}

CLI::Validator byte_size(std::int64_t least) {
  return CLI::Validator(
      [least](std::string& text) {
        const auto bytes = parse_bytes(text);
        if (bytes && *bytes >= least) return std::string();
        return fmt::format("found {}, expected a size, {} or more, like 1MiB", text, format_bytes(least));
      },
      "");
}

// A file system on which files are made: one entry for all paths on it.
struct Space {
  std::string path;
  std::int64_t free = 0;  // bytes
  int files = 0;
  // Leaves some space free, so that a benchmark does not fill the disk for other programs.
  std::int64_t usable() const { return free - std::min(kGiB, free / 20); }
};

std::vector<Space> spaces_of(const Flags& f) {
  if (f.backend == "ram")
    return {{"memory", available_memory(), std::max(1, static_cast<int>(f.paths.size()))}};
  std::map<dev_t, Space> spaces;
  for (const std::string& path : f.paths) {
    const std::int64_t free = io::probe_path(path, 0).free_bytes;  // throws if it cannot be written to
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) throw Error(Errc::kUsage, "--path " + path, errno_text(errno));
    Space& space = spaces[info.st_dev];
    if (space.files++ == 0) space = {path, free, 1};
  }
  std::vector<Space> all;
  for (const auto& [device, space] : spaces) all.push_back(space);
  return all;
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const io::BenchOp op : io::kBenchOps) names.emplace_back(io::name_of(op));
  return names;
}

// The size of each new file. Throws if a file does not fit.
std::int64_t size_of_files(const Flags& f, std::int64_t block) {
  std::int64_t size = f.size.empty() ? std::min(kDefaultSize, kDefaultBlocks * block) : *parse_bytes(f.size);
  for (const Space& s : spaces_of(f)) {
    if (f.size.empty()) size = std::min(size, s.free / 2 / s.files / block * block);
    if (size >= block && size <= s.usable() / s.files) continue;
    const std::string wanted = f.size.empty() ? fmt::format("needs {} at least", format_bytes(block))
                                              : fmt::format("asks for {}", format_bytes(size));
    if (!f.size.empty() && size < block)
      throw Error(Errc::kUsage, "--size",
                  fmt::format("{}, less than a block of {}", format_bytes(size), format_bytes(block)),
                  "a file holds one block at least");
    throw Error(Errc::kUsage, "--size",
                fmt::format("{}{}; {} has {} free, of which {} are left alone", wanted,
                            s.files > 1 ? fmt::format(" for each of {} files", s.files) : "", s.path,
                            format_bytes(s.free), format_bytes(s.free - s.usable())),
                "measure with less, or free some space");
  }
  return size;
}

void check_file(const std::string& path, const Flags& f) {
  struct stat info {};
  const std::string where = "--file " + path;
  if (stat(path.c_str(), &info) != 0)
    throw Error(Errc::kUsage, where, errno_text(errno),
                "name a file that exists, or --path DIR to have one made");
  if (S_ISDIR(info.st_mode))
    throw Error(Errc::kUsage, where, "is a directory", "name a file, or say --path to have one made there");
  if (f.op != "read" && f.op != "copy" && !f.overwrite) {
    throw Error(Errc::kUsage, where, fmt::format("--op {} replaces its contents", f.op),
                "say --overwrite if they may be lost, or --path DIR to have a temporary file");
  }
  const std::int64_t size = f.size.empty() ? 0 : *parse_bytes(f.size);
  if (S_ISREG(info.st_mode) && size > info.st_size)
    throw Error(Errc::kUsage, "--size",
                fmt::format("asks for {}, {} has {}", format_bytes(size), path, format_bytes(info.st_size)),
                "measure less of it, or make it larger");
}

// Adds a copy: from --file, or from a file that is made in the first --path, to a file that is made in the
// last --path.
void add_copy(Flags f, io::BenchOptions& o) {
  if (f.backend == "ram" && f.paths.empty()) f.paths = {"ram"};
  if (f.files.size() > 1 || f.paths.empty() || f.paths.size() > (f.files.empty() ? 2 : 1)) {
    throw Error(
        Errc::kUsage, "--op copy",
        fmt::format("found {} --file and {} --path", f.files.size(), f.paths.size()),
        "copy --file FILE to a new one in --path DIR, or one that is made in the first of two --path");
  }
  const std::string to = f.paths.back();
  io::DriveOptions from{.path = f.paths.front(), .kind = io::FileKind::kScratch};
  if (f.files.empty()) {
    f.paths = {from.path, to};  // each needs the room
  } else {
    check_file(f.files[0], f);
    from = {.path = f.files[0], .kind = io::FileKind::kExisting};
    std::error_code error;  // set if it is no regular file, which the engine refuses later
    const auto bytes = fs::file_size(from.path, error);
    if (f.size.empty() && !error) f.size = std::to_string(bytes);
  }
  from.bytes = size_of_files(f, o.engine.block_size) / o.engine.block_size * o.engine.block_size;
  o.drives = {from, {.path = to, .bytes = from.bytes, .kind = io::FileKind::kScratch}};
}

void add_drives(const Flags& f, io::BenchOptions& o) {
  if (o.op == io::BenchOp::kCopy) return add_copy(f, o);
  if (!f.files.empty()) {
    for (const std::string& path : f.files) {
      check_file(path, f);
      o.drives.push_back({.path = path,
                          .bytes = f.size.empty() ? 0 : *parse_bytes(f.size),
                          .kind = io::FileKind::kExisting});
    }
    return;
  }
  const std::int64_t size = size_of_files(f, o.engine.block_size);
  auto paths = f.paths;
  if (paths.empty()) paths = {"ram"};
  for (const std::string& path : paths)
    o.drives.push_back({.path = path, .bytes = size, .kind = io::FileKind::kScratch});
}

// Checks the size as the engine does, but before any file is made, and with a hint about units.
std::int64_t block_size_of(const std::string& text) {
  const std::int64_t bytes = *parse_bytes(text);
  if (bytes > io::Engine::max_block_size()) {
    throw Error(
        Errc::kUsage, "--block-size",
        fmt::format("found {}, expected at most {}", text, format_bytes(io::Engine::max_block_size())));
  }
  if (bytes % io::Engine::alignment() == 0) return bytes;
  // Many programs mean 1 MiB when they say 1M; here 1M is 10^6, as in the standards.
  std::string binary = text;
  while (!binary.empty() && (binary.back() == 'b' || binary.back() == 'B' || binary.back() == ' '))
    binary.pop_back();
  const bool has_unit = !binary.empty() && std::isalpha(static_cast<unsigned char>(binary.back())) != 0;
  binary += "iB";
  const auto meant = has_unit ? parse_bytes(binary) : std::nullopt;
  throw Error(Errc::kUsage, "--block-size", fmt::format("found {}, expected a multiple of 4096", text),
              meant && *meant % io::Engine::alignment() == 0
                  ? fmt::format("{} is {} bytes; say {} for {}", text, bytes, binary, *meant)
                  : "");
}

io::BenchOptions options_of(const Flags& f) {
  if (f.paths.empty() && f.files.empty() && f.backend != "ram") {
    throw Error(Errc::kUsage, "io-bench", "needs --path DIR or --file FILE",
                "name a directory on the drive to measure: --path /mnt/nvme0");
  }
  if (!f.paths.empty() && !f.files.empty() && f.op != "copy")
    throw Error(Errc::kUsage, "--file", "stands beside --path, which only --op copy has",
                "leave out one of the two");
  if (!f.files.empty() && f.backend == "ram")
    throw Error(Errc::kUsage, "--file", "the back end ram has no files", "leave out one of the two");
  io::BenchOptions o;
  for (const io::BenchOp op : io::kBenchOps) {
    if (f.op == io::name_of(op)) o.op = op;
  }
  o.pattern = f.pattern == "random" ? io::Pattern::kRandom : io::Pattern::kSequential;
  const bool copies = o.op == io::BenchOp::kCopy;
  if (copies && f.seconds.value_or(0) > 0) {
    throw Error(Errc::kUsage, "--seconds", fmt::format("found {}, and a copy is one pass", *f.seconds),
                "say --size for how much is copied");
  }
  if (copies && o.pattern == io::Pattern::kRandom)
    throw Error(Errc::kUsage, "--pattern", "found random, and a copy goes through the file", "leave it out");
  o.seconds = f.seconds.value_or(copies ? 0 : kDefaultSeconds);
  o.ramp_seconds = o.seconds > 0 ? f.ramp : 0;
  o.verify = f.verify == "on";
  o.huge_pages = f.huge_pages == "on";
  o.seed = f.seed;
  o.engine.backend = *io::backend_named(f.backend);
  o.engine.require = o.engine.backend != io::Backend::kAuto;  // measure the named back end or fail
  o.engine.block_size = block_size_of(f.block_size);
  o.engine.queue_depth = f.queue_depth != 0 ? f.queue_depth : io::default_queue_depth(o.engine.block_size);
  o.engine.queues = f.queues;
  o.engine.threads = f.threads;
  o.engine.registered = f.registered == "on";
  o.engine.sqpoll = f.sqpoll;
  o.engine.iopoll = f.iopoll;
  add_drives(f, o);
  return o;
}

std::string time_text(double seconds) {
  return seconds < 1e-3 ? fmt::format("{:.1f} us", seconds * 1e6)
         : seconds < 1  ? fmt::format("{:.2f} ms", seconds * 1e3)
                        : format_seconds(seconds);
}

std::string files_text(const Flags& f, const io::BenchOptions& o) {
  const std::int64_t bytes = o.drives[0].bytes;
  if (o.engine.backend == io::Backend::kRam) return fmt::format("{} of memory", format_bytes(bytes));
  if (!f.files.empty() && o.op == io::BenchOp::kCopy)
    return fmt::format("{} of {} to a new file in {}", format_bytes(bytes), f.files[0], f.paths[0]);
  if (!f.files.empty())
    return fmt::format("{}{}", bytes > 0 ? "the first " + format_bytes(bytes) + " of " : "", paths_text(o));
  return fmt::format("a temporary file of {}{} in {}", format_bytes(bytes),
                     f.size.empty() ? " (the default)" : "", paths_text(o));
}

void print_latency(const char* name, const io::BenchCount& c) {
  if (c.requests == 0) return;
  std::printf("latency    %-6s p50 %s, p99 %s, max %s (mean %s, p99.9 %s)\n", name,
              time_text(c.latency.p50).c_str(), time_text(c.latency.p99).c_str(),
              time_text(c.latency.max).c_str(), time_text(c.latency.mean).c_str(),
              time_text(c.latency.p999).c_str());
}

void print_text(const Flags& f, const io::BenchOptions& o, const io::BenchResult& r) {
  std::printf("io-bench   %s, %s, %s blocks, %s\n", f.op.c_str(), f.pattern.c_str(),
              format_bytes(o.engine.block_size).c_str(), files_text(f, o).c_str());
  std::printf("engine     %s\n", r.engine.c_str());
  if (r.stopped) std::printf("           interrupted; this is what was measured until then\n");
  std::printf("throughput %s, %.0f requests/s, in %s\n", format_rate(r.bytes_per_second()).c_str(),
              r.requests_per_second(), format_seconds(r.seconds).c_str());
  if (o.op == io::BenchOp::kCopy && r.seconds > 0) {
    std::printf("           %s copied\n",
                format_rate(static_cast<double>(r.write.bytes) / r.seconds).c_str());
  }
  if (o.op == io::BenchOp::kMixed && r.seconds > 0) {
    std::printf("           read %s, write %s\n",
                format_rate(static_cast<double>(r.read.bytes) / r.seconds).c_str(),
                format_rate(static_cast<double>(r.write.bytes) / r.seconds).c_str());
  }
  print_latency("read", r.read);
  print_latency("write", r.write);
  std::printf("CPU        %.3f s per GB (%.0f%% of one core)\n", r.cpu_seconds_per_gb(),
              r.seconds > 0 ? 100 * r.cpu_seconds / r.seconds : 0.0);
  for (std::size_t i = 0; o.drives.size() > 1 && i < o.drives.size(); ++i) {
    std::printf("%-10s %s: %s, depth %d\n", i == 0 ? "paths" : "", o.drives[i].path.c_str(),
                format_rate(r.drive_bytes_per_second[i]).c_str(), r.drive_depth[i]);
  }
  if (o.verify && !r.stopped) std::printf("verified   every block that was read had its checksum\n");
  if (r.written_bytes > 0 && o.engine.backend != io::Backend::kRam)
    std::printf("wear       %s written, preparation included\n", format_bytes(r.written_bytes).c_str());
}

nlohmann::ordered_json json_of(const io::BenchCount& c, double seconds) {
  const io::BenchLatency& l = c.latency;
  return {{"bytes", c.bytes},
          {"requests", c.requests},
          {"bytes_per_second", seconds > 0 ? static_cast<double>(c.bytes) / seconds : 0.0},
          {"latency_seconds",
           {{"mean", l.mean}, {"p50", l.p50}, {"p99", l.p99}, {"p999", l.p999}, {"max", l.max}}}};
}

void print_json(const io::BenchOptions& o, const io::BenchResult& r) {
  nlohmann::ordered_json paths = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < o.drives.size(); ++i) {
    paths.push_back({{"path", o.drives[i].path},
                     {"bytes_per_second", r.drive_bytes_per_second[i]},
                     {"depth", r.drive_depth[i]}});
  }
  const nlohmann::ordered_json j = {{"op", io::name_of(o.op)},
                                    {"pattern", io::name_of(o.pattern)},
                                    {"block_size", o.engine.block_size},
                                    {"queue_depth", o.engine.queue_depth},
                                    {"queues", o.engine.queues},
                                    {"backend", io::name_of(r.backend)},
                                    {"engine", r.engine},
                                    {"seconds", r.seconds},
                                    {"bytes", r.read.bytes + r.write.bytes},
                                    {"bytes_per_second", r.bytes_per_second()},
                                    {"requests_per_second", r.requests_per_second()},
                                    {"read", json_of(r.read, r.seconds)},
                                    {"write", json_of(r.write, r.seconds)},
                                    {"cpu_seconds", r.cpu_seconds},
                                    {"cpu_seconds_per_gb", r.cpu_seconds_per_gb()},
                                    {"paths", paths},
                                    {"written_bytes", r.written_bytes},
                                    {"verified", o.verify && !r.stopped},
                                    {"interrupted", r.stopped}};
  std::printf("%s\n", j.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
}

int run(const Flags& f) {
  io::BenchOptions o = options_of(f);
  Watchdog watchdog({.file = "state.txt"});
  BenchWatch watch(watchdog, "io-bench");
  watchdog.dump_on_signal(SIGUSR1);
  if (f.files.empty() && f.backend != "ram") {
    log::info("each of {} gets a temporary file of {}, which is written once before it is {}", paths_text(o),
              format_bytes(o.drives[0].bytes), o.op == io::BenchOp::kCopy ? "copied" : "measured");
  }
  o.progress = [](const io::BenchProgress& p) {
    log::progress(fmt::format("{} {:.0f}%, {}", p.phase, 100 * p.share, format_rate(p.bytes_per_second)));
    return !interrupted();
  };
  const io::BenchResult r = watch.run(o);
  log::progress("");
  if (f.json) {
    print_json(o, r);
  } else {
    print_text(f, o, r);
  }
  return r.stopped ? 130 : 0;
}

void add_options(CLI::App& c, Flags& f) {
  const auto choice = [&](const char* name, std::string& value, std::vector<std::string> words,
                          const char* text) {
    c.add_option(name, value, text)->capture_default_str()->check(one_of(std::move(words)));
  };
  const std::vector<std::string> on_off = {"on", "off"};
  c.add_option("--path", f.paths, "Directories, one per drive, each of which gets a temporary file");
  c.add_option("--file", f.files, "Existing files to measure instead, with the contents that they have");
  c.add_flag("--overwrite", f.overwrite, "Let --op write or mixed replace the contents of --file");
  choice(
      "--op", f.op, op_names(),
      "What is measured: read, write, mixed (half of each), or copy (--file, or a file that is made in the "
      "first --path, is copied once to a new one in the last --path)");
  choice("--pattern", f.pattern, {"sequential", "random"}, "Order of the blocks: sequential or random");
  c.add_option("--block-size", f.block_size, "Bytes of one request")
      ->capture_default_str()
      ->check(byte_size(4096));
  c.add_option("--queue-depth", f.queue_depth,
               "Requests in flight per path (default: as many as make 64 MiB, at least 4 and at most "
               "128)")
      ->check(whole_number(1, 4096));
  c.add_option("--size", f.size,
               "Size of each file that is made, or of the part of --file that is used (default: the "
               "least of 4GiB, half of what is free and 65536 blocks; all of --file)")
      ->check(byte_size(4096));
  c.add_option("--seconds", f.seconds,
               fmt::format("Seconds that are measured (default: {:.0f}; 0: one pass over the files, as a "
                           "copy always is)",
                           kDefaultSeconds))
      ->check(real_number(0, 1e6));
  c.add_option("--ramp", f.ramp, "Seconds before the measurement, which do not count")
      ->capture_default_str()
      ->check(real_number(0, 1e6));
  choice("--backend", f.backend, {"auto", "io_uring", "libaio", "threads", "ram"},
         "auto, io_uring, libaio, threads, or ram (memory in place of a drive, to see what the "
         "engine itself costs)");
  choice("--registered", f.registered, on_off, "io_uring: register files and buffers with the kernel");
  choice("--huge-pages", f.huge_pages, on_off, "Buffers in huge pages, where the system has them");
  c.add_option("--queues", f.queues, "Queues per path, each with an I/O thread; they share the path's depth")
      ->capture_default_str()
      ->check(whole_number(1, 64));
  c.add_option("--threads", f.threads, "Threads per queue of the back end \"threads\"")
      ->capture_default_str()
      ->check(whole_number(1, 256));
  c.add_flag("--sqpoll", f.sqpoll,
             "io_uring: a kernel thread takes submissions, at the price of its CPU time");
  c.add_flag("--iopoll", f.iopoll, "io_uring: poll for completions (drives with poll queues)");
  choice("--verify", f.verify, on_off,
         "Checksum what is written, and compare what is read. Twice the depth is offered, so that "
         "checksums are computed beside the transfers; the latency includes that wait");
  c.add_option("--seed", f.seed, "Seed of the random offsets and of the mix")
      ->capture_default_str()
      ->check(whole_number<std::uint64_t>(0));
  c.add_flag("--json", f.json, "Print one JSON object, in SI units");
}

constexpr const char* kFooter = R"(Examples:
  ziggurat io-bench --path /mnt/nvme0
  ziggurat io-bench --path /mnt/nvme0 /mnt/nvme1 --op mixed --verify on
  ziggurat io-bench --path . --pattern random --block-size 4KiB --queue-depth 1   # latency of single reads
  ziggurat io-bench --path . --op write --seconds 0 --size 16GiB                  # one pass
  ziggurat io-bench --op copy --file data.bin --path /mnt/nvme0                   # to a new file there
  ziggurat io-bench --file data.bin --json | jq .bytes_per_second
What to choose:
  A drive is busy only while it has requests: block size times queue depth is in flight. Each block costs CPU time,
  so small ones cost more per byte; large blocks and a deep queue reach the drive's bandwidth, and beyond that only
  add latency, since each request waits for those before it. 64 MiB in flight (the default: 64 blocks of 1 MiB) suit
  many NVMe drives, and some use more; io-tune searches for the best.
How to read the result:
  Latency is the time from submission to completion; with a full queue p50 is about depth x block size / throughput.
  A p99 far above p50 means that the drive stalls: it is hot, or busy with its own housekeeping. CPU seconds per GB
  are those of the whole process, kernel side included. Writes go to blocks that were written before, but those of a
  copy: what a new file costs more, on thin volumes and virtual disks a quarter and more, is the difference between
  copy and mixed. Many drives slow down when a fast cache is full, so measure as long as your run will write.
  Temporary files have no name: nothing is left, however the program ends. Writing wears drives; the result says how
  much was written.
  SIGUSR1 (kill -USR1 PID) makes it say how far it is, on stderr and in state.txt in the current directory.
The same in fio:
  fio --name=a --filename=data.bin --ioengine=io_uring --direct=1 --fixedbufs=1 --registerfiles=1
    --rw=read|write|rw (randread...) --bs=1M --iodepth=64 --time_based --runtime=5 --ramp_time=500ms
  fio's buffers are in small pages, as with --huge-pages off; the streams of its mix begin together, not half a file
  apart; and it changes its buffers before each write, unless told --scramble_buffers=0.)";

}  // namespace

void add_io_bench(CLI::App& app, int& exit_code) {
  auto f = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("io-bench", "Measure drives: throughput, latency, CPU time per byte");
  add_options(*command, *f);
  command->footer(kFooter);
  command->callback([f, &exit_code] { exit_code = run(*f); });
}

}  // namespace zg::cli
