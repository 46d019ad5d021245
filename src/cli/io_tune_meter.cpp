#include "cli/io_tune_meter.hpp"

#include <algorithm>

#include "cli/io_tune_report.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cli {
namespace {

// Measuring one direction of a point takes this share of the run's time: 0.25 s of two minutes.
constexpr double kShare = 1.0 / 480, kLeastSlice = 0.15, kMostSlice = 1, kRampShare = 0.3;
// A measurement is repeated with kStretch times the length if fewer than kLeastRequests requests complete in
// it, or fewer than two for each place in the queue: some drives, above all virtual ones, complete requests
// in bursts.
constexpr std::int64_t kLeastRequests = 16;
constexpr double kStretch = 4;
constexpr double kSetUp = 0.1;  // seconds to make engine and buffers, roughly
// The share of the run that filling the files may take; on a slow drive only a part of each file is filled.
constexpr double kFillShare = 0.25;
constexpr std::int64_t kFirstFill = 256 * kMiB;
constexpr std::int64_t kFillBlock = 4 * kMiB;
constexpr int kFillDepth = 8;

double slice_of(double seconds) {
  return std::clamp(seconds * kShare, kLeastSlice, kMostSlice);
}

// Silences the engines: the command has already reported once the fall-backs that each of them would report.
class QuietLog {
 public:
  QuietLog() { log::set_level(log::Level::kError); }
  ~QuietLog() { log::set_level(log::Level::kInfo); }
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;
};

}  // namespace

DriveMeter::DriveMeter(MeterOptions options) : options_(std::move(options)) {}

double DriveMeter::seconds() const {
  return seconds_between(begin_, Clock::now());
}

double DriveMeter::expected_seconds() const {
  const int sides = options_.goal == io::TuneGoal::kBoth ? 2 : 1;
  return sides * (slice_of(options_.seconds) * (1 + kRampShare) + kSetUp);
}

void DriveMeter::show(const std::string& text) const {
  log::progress(fmt::format("io-tune: {}; at most {} left", text,
                            format_seconds(std::max(0.0, options_.seconds - seconds()))));
}

bool DriveMeter::may_write(double bytes_per_second, double seconds) {
  const double most = static_cast<double>(options_.write_limit) * static_cast<double>(options_.places.size());
  if (static_cast<double>(written_) + bytes_per_second * seconds <= most) return true;
  reached_limit_ = true;
  return false;
}

std::optional<io::BenchResult> DriveMeter::run(io::BenchOptions options) {
  const QuietLog quiet;
  const io::BenchResult result = options_.watch->run(options);
  written_ += result.written_bytes;
  if (result.stopped) return std::nullopt;
  if (result.backend != options.engine.backend) {
    throw Error(Errc::kIo, io::name_of(options.engine.backend),
                fmt::format("could not be had: {} was taken", result.engine));
  }
  return result;
}

io::BenchOptions DriveMeter::bench(const io::TunePoint& point, io::BenchOp op) const {
  io::BenchOptions b;
  b.op = op;
  b.engine.backend = point.backend;
  b.engine.block_size = point.block_size;
  b.engine.queue_depth = point.queue_depth;
  b.engine.queues = point.queues;
  b.engine.threads = threads_of(options_.space, point);
  // Requiring the back end also requires O_DIRECT. If a path lacks it, run() checks the back end instead.
  b.engine.require = std::all_of(options_.places.begin(), options_.places.end(),
                                 [](const TunePlace& place) { return place.direct; });
  for (const TuneFile& file : files_)
    b.drives.push_back({.path = file.path(), .bytes = file_bytes_, .kind = io::FileKind::kExisting});
  return b;
}

// Writes the first `bytes` bytes of each file. Returns the seconds per byte of a file; none if stopped.
std::optional<double> DriveMeter::fill(std::int64_t bytes) {
  file_bytes_ = bytes;
  io::BenchOptions b =
      bench({options_.space.backends.front(), kFillBlock, kFillDepth, 1}, io::BenchOp::kWrite);
  b.progress = [&](const io::BenchProgress& p) {
    show(fmt::format("filling {} on each path, {:.0f}%", format_bytes(bytes), p.share * 100));
    return !interrupted();
  };
  const double begin = seconds();
  const auto result = run(b);
  if (!result) return std::nullopt;
  write_rate_ = result->bytes_per_second();
  return (seconds() - begin) / static_cast<double>(bytes);
}

bool DriveMeter::prepare() {
  for (const TunePlace& place : options_.places) files_.emplace_back(place.path, options_.size);
  auto slowness = fill(std::min(kFirstFill, options_.size));
  if (slowness && file_bytes_ < options_.size) {
    const double in_time = options_.seconds * kFillShare / *slowness;
    const auto most = static_cast<std::int64_t>(std::min(in_time, 1e18)) / kTuneSizeStep * kTuneSizeStep;
    if (most < options_.size)
      log::info("the drive is slow: {} of {} are filled and measured on",
                format_bytes(std::max(most, kFirstFill)), format_bytes(options_.size));
    if (most > kFirstFill) slowness = fill(std::min(most, options_.size));
  }
  if (!slowness) return false;
  log::info("filled {} on each path, at {}; about {} will be written in all", format_bytes(file_bytes_),
            format_rate(write_rate_),
            format_bytes(options_.goal == io::TuneGoal::kRead
                             ? written_
                             : static_cast<std::int64_t>(write_rate_ * options_.seconds / 2)));
  return true;
}

std::optional<io::TuneSide> DriveMeter::measure_side(const io::TunePoint& point, io::BenchOp op,
                                                     double stretch) {
  io::BenchOptions b = bench(point, op);
  const bool writes = op == io::BenchOp::kWrite;
  double& best_rate = writes ? write_rate_ : read_rate_;
  // A deep queue of large blocks takes longer to fill, and to reach a steady rate of completions.
  const double in_flight =
      static_cast<double>(point.block_size) * point.queue_depth * static_cast<double>(options_.places.size());
  const double rate = best_rate > 0 ? best_rate : write_rate_;
  const double drain = rate > 0 ? in_flight / rate : 0;
  b.seconds = stretch * std::max(slice_of(options_.seconds), 2 * drain);
  b.ramp_seconds = std::max(kRampShare * b.seconds, drain);
  if (writes && !may_write(write_rate_ * 1.25, b.seconds + b.ramp_seconds + drain)) return std::nullopt;
  double moved = 0, at = 0;
  b.progress = [&](const io::BenchProgress& p) {
    if (p.seconds < at) at = 0;  // the measurement was restarted
    moved += p.bytes_per_second * std::max(0.0, p.seconds - at);
    at = p.seconds;
    show(fmt::format("{}: {}, {} {}; {} measured, best {}", progress_.phase, text_of(point), name_of(op),
                     format_rate(p.bytes_per_second), progress_.measured, format_rate(progress_.best_score)));
    // Also counts the bytes that may be written before the next call.
    return !interrupted() && (!writes || may_write(moved + in_flight + 0.3 * p.bytes_per_second, 1));
  };
  // Two requests in flight must not have the same block.
  if (2 * point.block_size * point.queue_depth > file_bytes_)
    throw Error(Errc::kUsage, text_of(point), "has more than half of the file in flight");
  const auto result = run(b);
  if (!result) return std::nullopt;
  best_rate = std::max(best_rate, result->bytes_per_second());
  const io::BenchCount& count = writes ? result->write : result->read;
  const std::int64_t enough = std::max(kLeastRequests, 2 * std::int64_t{point.queue_depth});
  if (stretch == 1 && count.requests < enough) return measure_side(point, op, kStretch);
  return io::TuneSide{.bytes_per_second = result->bytes_per_second(),
                      .cpu_seconds_per_gb = result->cpu_seconds_per_gb(),
                      .p50 = count.latency.p50,
                      .p99 = count.latency.p99};
}

std::optional<io::TuneSample> DriveMeter::measure(const io::TunePoint& point, int round) {
  if (interrupted()) return std::nullopt;
  io::TuneSample sample;
  if (options_.goal != io::TuneGoal::kWrite) {
    const auto read = measure_side(point, io::BenchOp::kRead);
    if (!read) return std::nullopt;
    sample.read = *read;
  }
  if (options_.goal != io::TuneGoal::kRead) {
    const auto write = measure_side(point, io::BenchOp::kWrite);
    if (!write) return std::nullopt;
    sample.write = *write;
  }
  options_.record({.point = point, .round = round, .sample = sample});
  return sample;
}

}  // namespace zg::cli
