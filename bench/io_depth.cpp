// What a badly chosen queue depth costs: the bandwidth at static depths, and with the depth found at run time
// beginning at each of them, in the first seconds and after.
//
//   bench_io_depth [--path DIR [--size 4GiB] [--backend io_uring] [--op read|write]]
//                  [--block-size 128KiB] [--depths 1,2,4,...,256] [--static-seconds 1] [--seconds 2] [--drive
//                  NAME]
//
// Without a path on drives of memory with programmed behaviour (no bytes move: only the time passes), by
// name. Static depths are measured in turns with the adapted ones, so that a drive that changes changes for
// all. Prints a table on stderr and one JSON line a drive.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::bench {
namespace {

constexpr int kCap = 256;
constexpr int kOutstanding =
    kCap + 64;                   // transfers of one block each, so that the depth is what bounds the queue
constexpr int kBuffers = 64;     // shared by them; nobody looks at the bytes
constexpr double kWarmUp = 0.3;  // seconds, of a static depth

struct Options {
  std::string path, backend = "auto", op = "read", drive;
  std::int64_t size = std::int64_t{4} << 30, block_size = 128 << 10;
  std::vector<int> depths = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  double static_seconds = 1, seconds = 2;
};

struct Drive {
  std::string name;
  std::optional<io::RamModel> ram;
};

std::vector<Drive> drives_of(const Options& o) {
  if (!o.path.empty()) return {{o.path, {}}};
  const auto ram = [](io::RamModel model) {
    model.moves_bytes = false;
    return model;
  };
  std::vector<Drive> drives = {
      {"near", ram({.bytes_per_second = 2e9, .latency_seconds = 100e-6})},
      {"far", ram({.bytes_per_second = 2e9, .latency_seconds = 2e-3})},
      {"channels", ram({.bytes_per_second = 2e9, .latency_seconds = 80e-6, .channels = 16})},
      {"congested",
       ram({.bytes_per_second = 2e9, .latency_seconds = 500e-6, .congested_depth = 24, .congestion = 0.02})}};
  if (!o.drive.empty()) {
    std::erase_if(drives, [&](const Drive& d) { return d.name != o.drive; });
    if (drives.empty()) throw Error(Errc::kUsage, "--drive", o.drive, "near, far, channels or congested");
  }
  return drives;
}

// Keeps kOutstanding transfers at the drive until it is told to stop.
class Load final : public io::Completion {
 public:
  Load(const Options& o, const Drive& drive, int depth, bool adapt)
      : block_(o.block_size),
        op_(o.op == "write" ? io::Op::kWrite : io::Op::kRead),
        buffer_(kBuffers * o.block_size) {
    io::EngineOptions options{
        .block_size = o.block_size, .queue_depth = depth, .adapt_depth = adapt, .max_queue_depth = kCap};
    io::DriveOptions file{.path = o.path, .bytes = o.size, .kind = io::FileKind::kScratch};
    if (drive.ram) {
      options.backend = io::Backend::kRam;
      options.ram = *drive.ram;
    } else if (o.backend != "auto") {
      for (const io::Backend b : {io::Backend::kUring, io::Backend::kLibaio, io::Backend::kThreads})
        if (o.backend == io::name_of(b)) options.backend = b;
      options.require = true;
    }
    engine_ = io::make_engine(options, {file});
    blocks_ = engine_->drive_bytes(0) / block_;
    if (!drive.ram) fill();
  }
  ~Load() { halt(); }

  void start() {
    running_ = kOutstanding;
    for (std::uint64_t i = 0; i < kOutstanding; ++i) submit(i);
  }
  void stop() {
    halt();
    if (error_ != 0) throw Error(Errc::kIo, "bench_io_depth", errno_text(error_));
  }
  struct Measured {
    double bytes_per_second = 0;
    int depth = 0;
  };
  Measured measure(double seconds) {
    const std::int64_t before = moved();
    const auto begin = Clock::now();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return {static_cast<double>(moved() - before) / seconds_between(begin, Clock::now()),
            engine_->report(0).depth};
  }
  std::string describe() const { return engine_->describe(); }

  void on_complete(io::Ticket, std::uint64_t tag, io::Result result) override {
    if (!result.ok()) error_ = result.error;
    if (result.ok() && !stopping_) return submit(tag);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) idle_.notify_all();
  }

 private:
  void halt() {
    stopping_ = true;
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return running_ == 0; });
  }
  std::int64_t moved() const {
    const io::LinkCounters c = engine_->counters(0);
    return c.read_bytes + c.write_bytes;
  }
  void submit(std::uint64_t i) {
    const std::int64_t block = next_.fetch_add(1, std::memory_order_relaxed) % blocks_;
    engine_->submit({.op = op_,
                     .offset = block * block_,
                     .data = buffer_.data() + static_cast<std::int64_t>(i % kBuffers) * block_,
                     .bytes = block_,
                     .completion = this,
                     .tag = i});
  }
  // Blocks that were never written read as zeros without the drive.
  void fill() {
    for (std::int64_t at = 0; at < blocks_ * block_; at += buffer_.size()) {
      const std::int64_t n = std::min(buffer_.size(), blocks_ * block_ - at);
      const io::Result r = engine_->wait(
          engine_->submit({.op = io::Op::kWrite, .offset = at, .data = buffer_.data(), .bytes = n}));
      if (!r.ok()) throw Error(Errc::kIo, "bench_io_depth", errno_text(r.error));
    }
  }

  const std::int64_t block_;
  const io::Op op_;
  Buffer buffer_;
  std::int64_t blocks_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> error_{0};
  std::mutex mutex_;
  std::condition_variable idle_;
  int running_ = 0;  // guarded by mutex_ once started
  std::unique_ptr<io::Engine> engine_;
};

void run(const Options& o, const Drive& drive) {
  nlohmann::json points = nlohmann::json::array();
  double best = 0, worst_loss = 0;
  std::string engine;
  for (const int depth : o.depths) {
    Load still(o, drive, depth, false);
    still.start();
    still.measure(kWarmUp);
    const double fixed = still.measure(o.static_seconds).bytes_per_second;
    still.stop();
    Load found(o, drive, depth, true);
    found.start();
    const auto first = found.measure(o.seconds), then = found.measure(o.seconds);
    found.stop();
    best = std::max(best, fixed);
    engine = found.describe();
    points.push_back({{"depth", depth},
                      {"static_bytes_per_second", fixed},
                      {"adapted_first_bytes_per_second", first.bytes_per_second},
                      {"adapted_then_bytes_per_second", then.bytes_per_second},
                      {"adapted_depth", then.depth}});
  }
  std::fprintf(stderr, "%s, %s blocks, %s\n%8s %10s %8s | %-24s %8s %8s\n", drive.name.c_str(),
               format_bytes(o.block_size).c_str(), o.op.c_str(), "depth", "static", "loss",
               fmt::format("found: first {:.0f} s, then", o.seconds).c_str(), "loss", "depth");
  for (const auto& p : points) {
    const double fixed = p["static_bytes_per_second"], first = p["adapted_first_bytes_per_second"],
                 then = p["adapted_then_bytes_per_second"];
    worst_loss = std::max(worst_loss, 1 - then / best);
    std::fprintf(stderr, "%8d %10s %7.1f%% | %10s %13s %7.1f%% %8d\n", p["depth"].get<int>(),
                 format_rate(fixed).c_str(), 100 * (1 - fixed / best), format_rate(first).c_str(),
                 format_rate(then).c_str(), 100 * (1 - then / best), p["adapted_depth"].get<int>());
  }
  const nlohmann::json line = {{"bench", "io_depth"},
                               {"drive", drive.name},
                               {"engine", engine},
                               {"op", o.op},
                               {"block_size", o.block_size},
                               {"seconds", o.seconds},
                               {"best_static_bytes_per_second", best},
                               {"worst_loss_after_first_seconds", worst_loss},
                               {"points", points}};
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

std::int64_t bytes_of(const char* flag, const std::string& text) {
  const auto bytes = parse_bytes(text);
  if (!bytes || *bytes <= 0) throw Error(Errc::kUsage, flag, text + " is no size");
  return *bytes;
}

Options parse(int argc, char** argv) {
  Options o;
  std::string size = "4GiB", block_size = "128KiB";
  CLI::App app("What a badly chosen queue depth costs");
  app.add_option("--path", o.path, "measure a file in this directory instead of drives of memory");
  app.add_option("--size", size, "of that file")->capture_default_str();
  app.add_option("--backend", o.backend)->check(CLI::IsMember({"auto", "io_uring", "libaio", "threads"}));
  app.add_option("--op", o.op)->check(CLI::IsMember({"read", "write"}));
  app.add_option("--block-size", block_size)->capture_default_str();
  app.add_option("--depths", o.depths)->delimiter(',')->check(CLI::Range(1, kCap));
  app.add_option("--static-seconds", o.static_seconds)->check(CLI::PositiveNumber);
  app.add_option("--seconds", o.seconds)->check(CLI::PositiveNumber);
  app.add_option("--drive", o.drive, "only this drive of memory");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e));
  }
  o.size = bytes_of("--size", size);
  o.block_size = bytes_of("--block-size", block_size);
  if (o.size < o.block_size) throw Error(Errc::kUsage, "--size", size + " is less than a block");
  return o;
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  try {
    const auto options = zg::bench::parse(argc, argv);
    for (const auto& drive : zg::bench::drives_of(options)) zg::bench::run(options, drive);
    return 0;
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_io_depth: %s\n", e.what());
    return e.exit_code();
  }
}
