// Streams a set of tensors from a drive through small memory, each read at the device in a step that is
// recorded; in turns with it what io-bench reaches beside it with the same block size and depth.
//
//   bench_store_stream --path DIR [--size 16GiB] [--host 512MiB] [--device 64MiB] [--tensor 8MiB]
//                      [--rounds 3] [--block-size 1MiB] [--queue-depth 32] [--checksums on|off|both]
//
// A file of the size, and one of at most 4 GiB for io-bench, lie in DIR meanwhile, and are removed at the
// end. Rates are bytes that crossed the drive's link over time. Peak memory (VmHWM) is reset before each pass
// of the store, and compared with what the process had without a store and the two budgets.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "bench/store_support.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/io/bench.hpp"

namespace zg::bench {
namespace {

struct Options {
  std::string path, checksums = "both";
  std::int64_t size = 16 * kGiB, host = 512 * kMiB, device = 64 * kMiB, tensor = 8 * kMiB, block_size = kMiB;
  int rounds = 3, queue_depth = 32;
};

// Gone with its scope.
class File {
 public:
  File(const std::string& directory, const std::string& name, std::int64_t bytes)
      : path_(
            (std::filesystem::path(directory) / fmt::format("store_stream-{}.{}", getpid(), name)).string()) {
    const int fd = open(path_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    const int error = fd < 0 ? errno : posix_fallocate(fd, 0, bytes);
    if (fd >= 0) close(fd);
    if (error == 0) return;
    unlink(path_.c_str());
    throw Error(Errc::kIo, path_, errno_text(error), "name a directory with room for " + format_bytes(bytes));
  }
  ~File() { unlink(path_.c_str()); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Peak memory counts from now on; false where the kernel does not allow it.
bool reset_peak() {
  std::ofstream out("/proc/self/clear_refs");
  out << "5";
  out.flush();
  return out.good();
}

double process_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Results {
  std::vector<double> rate, drive, ratio, stall, busy, cpu_per_gb;
  std::int64_t peak = 0;
};

// One pass over all tensors; bytes a second from the drive.
void pass(Bed& bed, Results& results) {
  TensorStore& store = *bed.store;
  const LinkBytes before = store.traffic();
  const auto busy = [&] { return store.statistics().links[kNvmeRead].busy_seconds; };
  const double waited = store.waited_seconds(), cpu = process_seconds(), busy_before = busy();
  const auto begin = Clock::now();
  store.step_begin();
  for (SegmentId id = 0; id < bed.table.segment_count(); ++id) {
    const Lease lease = store.acquire(id, Tier::kDevice, Access::kRead);
    Bed::check(lease, id);
  }
  store.step_end();
  const double seconds = seconds_between(begin, Clock::now());
  const auto bytes = static_cast<double>((store.traffic() - before).nvme_read());
  results.rate.push_back(bytes / seconds);
  results.stall.push_back((store.waited_seconds() - waited) / seconds);
  results.busy.push_back((busy() - busy_before) / seconds);
  results.cpu_per_gb.push_back((process_seconds() - cpu) / bytes * 1e9);
}

io::EngineOptions engine_of(const Options& o) {
  io::EngineOptions engine;
  engine.block_size = o.block_size;
  engine.queue_depth = o.queue_depth;
  return engine;
}

double drive_rate(const Options& o, const std::string& file, io::BenchOp op) {
  io::BenchOptions options;
  options.drives = {{.path = file, .kind = io::FileKind::kExisting}};
  options.op = op;
  options.engine = engine_of(o);
  return io::run_bench(options).bytes_per_second();
}

nlohmann::json measure(const Options& o, const File& file, const File& beside, bool verify) {
  const std::int64_t without = resident_bytes();
  const io::EngineOptions engine = engine_of(o);
  Bed bed({.tensors = static_cast<int>(o.size / o.tensor),
           .bytes = o.tensor,
           .arenas = {.device = o.device, .host = o.host},
           .engine = &engine,
           .drive = {.path = file.path(), .bytes = o.size, .kind = io::FileKind::kExisting},
           .verify = verify});
  bed.fill();
  bed.store->demote_all();
  bed.store->drain();
  Results results, warm_up;
  pass(bed, warm_up);
  bool counted = true;
  for (int r = 0; r < o.rounds; ++r) {
    const double drive = drive_rate(o, beside.path(), io::BenchOp::kRead);
    counted = reset_peak() && counted;
    pass(bed, results);
    results.peak = std::max(results.peak, peak_resident_bytes());
    results.drive.push_back(drive);
    results.ratio.push_back(results.rate.back() / drive);
    std::fprintf(stderr, "  checksums %s, round %d: io-bench %s, store %s (%.3f)\n", verify ? "on" : "off",
                 r + 1, format_rate(drive).c_str(), format_rate(results.rate.back()).c_str(),
                 results.ratio.back());
  }
  const std::int64_t beyond = results.peak - o.host - o.device;
  std::fprintf(stderr,
               "checksums %-3s  io-bench %s, store %s, ratio %.3f (MAD %.3f), stall %.1f%%, drive busy "
               "%.1f%%, %.3f CPU s/GB\n"
               "               peak %s: budgets and %s (without a store: %s)%s\n",
               verify ? "on" : "off", format_rate(median(results.drive)).c_str(),
               format_rate(median(results.rate)).c_str(), median(results.ratio), mad(results.ratio),
               100 * median(results.stall), 100 * median(results.busy), median(results.cpu_per_gb),
               format_bytes(results.peak).c_str(), format_bytes(beyond).c_str(),
               format_bytes(without).c_str(), counted ? "" : ", since the process began");
  return {{"checksums", verify},
          {"engine", bed.io->describe()},
          {"io_bench_bytes_per_second", results.drive},
          {"store_bytes_per_second", results.rate},
          {"ratio", median(results.ratio)},
          {"ratio_mad", mad(results.ratio)},
          {"stall_share", median(results.stall)},
          {"drive_busy_share", median(results.busy)},
          {"cpu_seconds_per_gb", median(results.cpu_per_gb)},
          {"peak_bytes", results.peak},
          {"peak_beyond_budgets", beyond},
          {"resident_without_store", without}};
}

void run(const Options& o) {
  nlohmann::json json = {{"bench", "store_stream"},      {"size", o.size},     {"host", o.host},
                         {"device", o.device},           {"tensor", o.tensor}, {"block_size", o.block_size},
                         {"queue_depth", o.queue_depth}, {"rounds", o.rounds}};
  json.update(provenance());
  const File file(o.path, "tensors", o.size);
  const File beside(o.path, "io-bench", std::min(o.size, 4 * kGiB));
  (void)drive_rate(o, beside.path(),
                   io::BenchOp::kWrite);  // what was never written is not read from the drive
  for (const bool verify : {true, false}) {
    if (o.checksums != "both" && verify != (o.checksums == "on")) continue;
    json["results"].push_back(measure(o, file, beside, verify));
  }
  json["load_at_end"] = first_line("/proc/loadavg", "");
  std::printf("%s\n", json.dump().c_str());
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  using namespace zg;
  bench::Options o;
  std::vector<std::pair<std::string, std::int64_t*>> sizes = {{"--size", &o.size},
                                                              {"--host", &o.host},
                                                              {"--device", &o.device},
                                                              {"--tensor", &o.tensor},
                                                              {"--block-size", &o.block_size}};
  std::vector<std::string> texts(sizes.size());
  CLI::App app{"Streams tensors from a drive through small memory"};
  app.add_option("--path", o.path, "a directory on the drive")->required();
  for (std::size_t i = 0; i < sizes.size(); ++i) app.add_option(sizes[i].first, texts[i]);
  app.add_option("--rounds", o.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--queue-depth", o.queue_depth)->check(CLI::Range(1, 4096));
  app.add_option("--checksums", o.checksums)->check(CLI::IsMember({"on", "off", "both"}));
  CLI11_PARSE(app, argc, argv);
  try {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (!texts[i].empty()) *sizes[i].second = bench::bytes_of(sizes[i].first, texts[i]);
    }
    if (o.size % o.tensor != 0) throw Error(Errc::kUsage, "--size", "is not a multiple of --tensor");
    bench::run(o);
  } catch (const Error& e) {
    std::fprintf(stderr, "bench_store_stream: %s\n", e.what());
    return e.exit_code();
  }
}
