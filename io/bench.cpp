#include "ziggurat/io/bench.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "io/bench_lane.hpp"
#include "io/clock.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr auto kFirstReport = std::chrono::milliseconds(50), kReportEvery = std::chrono::milliseconds(250);

double cpu_seconds_now() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) {
    throw Error(Errc::kIo, "getrusage", "does not tell the time of the processor: " + errno_text(errno),
                "run with a seccomp profile that allows it");
  }
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

BenchLatency latency_of(const LatencyHistogram& h) {
  constexpr double kNs = 1e-9;
  return {.mean = h.mean() * kNs,
          .p50 = h.percentile(0.5) * kNs,
          .p99 = h.percentile(0.99) * kNs,
          .p999 = h.percentile(0.999) * kNs,
          .max = h.max() * kNs};
}

// The time that was measured, and the processor time used in it.
struct Span {
  Clock::time_point begin{}, end{};
  double cpu_seconds = 0;
};

class Bench {
 public:
  explicit Bench(const BenchOptions& options);
  // When progress() has thrown, requests are in flight; they submit no others.
  ~Bench() { control_.stop(Clock::time_point::min()); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  BenchResult run();

 private:
  void check() const;
  void check_copy() const;
  bool uses_existing_files() const;
  bool drives_keep_bytes() const;
  void open();
  bool prepare();
  void measure(const BenchPhase& phase);
  bool saw_each_kind() const;
  Span run_phase(const char* name, const BenchPhase& phase, double ramp = 0, double seconds = 0);
  bool report(const char* name, Clock::time_point begin, double length);
  void gather(const Span& span);

  const BenchOptions options_;
  int depth_ = 1;
  BenchResult result_;
  BenchControl control_;
  std::vector<std::unique_ptr<BenchLane>> lanes_;
  std::unique_ptr<Engine> engine_;  // destroyed before the lanes, whose completions it calls
  std::int64_t reported_bytes_ = 0;
  Clock::time_point reported_at_;
};

Bench::Bench(const BenchOptions& options) : options_(options) {
  check();
  open();
}

void Bench::check() const {
  for (const double seconds : {options_.seconds, options_.ramp_seconds}) {
    if (!(seconds >= 0 && seconds < 1e8))
      throw Error(Errc::kUsage, "benchmark", fmt::format("of {} seconds", seconds), "a number, 0 or more");
  }
  if (options_.verify && !drives_keep_bytes())
    throw Error(Errc::kUsage, "benchmark", "a RAM drive that moves no bytes cannot be verified");
  if (options_.op == BenchOp::kCopy) return check_copy();
  const FileKind kind = options_.drives.empty() ? FileKind::kScratch : options_.drives[0].kind;
  for (const DriveOptions& d : options_.drives) {
    if ((d.kind == FileKind::kExisting) == (kind == FileKind::kExisting)) continue;
    throw Error(Errc::kUsage, "benchmark", "of existing files and new ones together",
                "measure them one after another");
  }
}

void Bench::check_copy() const {
  const auto refuse = [](const std::string& what, const char* expected) {
    throw Error(Errc::kUsage, "benchmark", what, expected);
  };
  const std::vector<DriveOptions>& drives = options_.drives;
  if (options_.seconds > 0 || options_.pattern != Pattern::kSequential)
    refuse(options_.seconds > 0 ? fmt::format("copies for {} seconds", options_.seconds)
                                : "copies random blocks",
           "a copy is one pass (0 seconds) over the file in its order (sequential)");
  if (drives.size() != 2)
    refuse(fmt::format("copies with {} drives", drives.size()), "from one to another: two");
  if (drives[1].kind == FileKind::kExisting) refuse("copies to an existing file", "to one that is made");
}

bool Bench::uses_existing_files() const {
  return options_.drives[0].kind == FileKind::kExisting && options_.engine.backend != Backend::kRam;
}

bool Bench::drives_keep_bytes() const {
  return options_.engine.backend != Backend::kRam ||
         std::all_of(options_.drives.begin(), options_.drives.end(),
                     [&](const DriveOptions& d) { return d.ram.value_or(options_.engine.ram).moves_bytes; });
}

void Bench::open() {
  engine_ = make_engine(options_.engine, options_.drives);
  const EngineOptions& e = options_.engine;
  depth_ = e.queue_depth != 0 ? e.queue_depth : default_queue_depth(e.block_size);
  // The engine still bounds what is in flight; the other half are requests whose checksum is being made.
  if (options_.verify) depth_ *= 2;
  std::vector<std::string> names;
  for (int i = 0; i < engine_->drive_count(); ++i) {
    const std::string& path = options_.drives[static_cast<std::size_t>(i)].path;
    names.push_back(path.empty() ? fmt::format("drive {}", i) : path);
    if (engine_->drive_bytes(i) < e.block_size) {
      throw Error(Errc::kUsage, names.back(),
                  fmt::format("a file of {} holds no block of {}", format_bytes(engine_->drive_bytes(i)),
                              format_bytes(e.block_size)),
                  "take a larger file or smaller blocks");
    }
  }
  const int target = options_.op == BenchOp::kCopy ? 1 : 0;  // how many drives on
  for (int i = 0; i + target < engine_->drive_count(); ++i) {
    const auto at = static_cast<std::size_t>(i), to = static_cast<std::size_t>(i + target);
    lanes_.push_back(std::make_unique<BenchLane>(
        *engine_, control_, BenchLane::Drives{i, i + target, names[at], names[to]}, options_, depth_));
    const NoiseMemory& memory = lanes_.back()->memory();
    if (e.registered) engine_->register_memory(memory.data(), memory.bytes());
  }
}

BenchResult Bench::run() {
  const bool endless = options_.seconds > 0;
  BenchPhase phase{.op = options_.op,
                   .pattern = options_.pattern,
                   .endless = endless,
                   .checksums = options_.verify ? Checksums::kCompare : Checksums::kNone,
                   .depth = depth_};
  if (prepare()) measure(phase);
  for (int i = 0; i < engine_->drive_count(); ++i) result_.drive_depth.push_back(engine_->report(i).depth);
  result_.drive_bytes_per_second.resize(result_.drive_depth.size());
  result_.backend = engine_->backend();
  result_.engine = engine_->describe();
  if (!result_.stopped && options_.verify && options_.op != BenchOp::kRead) {
    phase = {.read_back = true, .checksums = Checksums::kCompare, .depth = depth_};
    run_phase("verifying", phase);
  }
  for (int i = 0; i < engine_->drive_count(); ++i) result_.written_bytes += engine_->counters(i).write_bytes;
  return result_;
}

// Gives the files contents, or learns the checksums of those they have. False when progress() said to stop.
bool Bench::prepare() {
  BenchPhase phase{.op = BenchOp::kWrite, .depth = depth_};
  if (uses_existing_files()) {
    if (!options_.verify || options_.op == BenchOp::kWrite) return true;
    phase = {.op = BenchOp::kRead, .checksums = Checksums::kLearn, .depth = depth_};
  }
  if (!drives_keep_bytes()) return true;
  run_phase("preparing", phase);
  return !result_.stopped;
}

void Bench::measure(const BenchPhase& phase) {
  const double ramp = phase.endless ? options_.ramp_seconds : 0;
  double seconds = options_.seconds;
  while (true) {
    const auto begin = Clock::now();
    gather(run_phase("measuring", phase, ramp, seconds));
    if (!phase.endless || result_.stopped || saw_each_kind()) return;
    // A rate of nothing and a latency of nothing would say nothing of the drive.
    const double longer = 2 * std::max(seconds, seconds_between(begin, Clock::now()));
    log::info("io-bench: {} within {}; measuring for {}",
              result_.read.requests + result_.write.requests == 0
                  ? "no request was completed"
                  : "only reads or only writes were completed",
              format_seconds(seconds), format_seconds(longer));
    seconds = longer;
  }
}

bool Bench::saw_each_kind() const {
  return (options_.op == BenchOp::kWrite || result_.read.requests > 0) &&
         (options_.op == BenchOp::kRead || result_.write.requests > 0);
}

// Runs a phase for `seconds` after `ramp`, or for one pass. Returns when no request is in flight any more;
// throws the first failure.
Span Bench::run_phase(const char* name, const BenchPhase& phase, double ramp, double seconds) {
  const auto start = Clock::now();
  control_.start(static_cast<int>(lanes_.size()));
  reported_bytes_ = 0;
  reported_at_ = start;
  double cpu_before = 0, cpu_after = -1;  // -1: the measurement has not ended
  // The measurement begins when this thread ends the ramp, not when the ramp was due to end, so that clock
  // and processor time begin together.
  bool ramping = true;
  const auto end_ramp = [&] {
    ramping = false;
    cpu_before = cpu_seconds_now();
    const auto now = Clock::now();
    control_.measure(now, phase.endless ? now + duration_of(seconds) : BenchControl::kNever);
  };
  if (ramp <= 0) end_ramp();
  for (auto& lane : lanes_) lane->start(phase);
  auto next_report = start + kFirstReport;
  for (bool done = false; !done;) {
    auto wake = next_report;
    if (ramping) wake = std::min(wake, start + duration_of(ramp));
    if (cpu_after < 0) wake = std::min(wake, std::max(control_.end(), start));
    done = control_.wait_for_lanes(wake);
    const auto now = Clock::now();
    if (ramping && now >= start + duration_of(ramp)) end_ramp();
    if (cpu_after < 0 && (done || control_.over(now))) cpu_after = cpu_seconds_now();
    if (done || now < next_report) continue;
    next_report = now + kReportEvery;
    if (!control_.over(now) && !report(ramping ? "warming up" : name, start, ramp + seconds)) {
      result_.stopped = true;
      control_.stop(Clock::now());
    }
  }
  control_.throw_if_failed();
  Span span{.begin = control_.begin(), .end = control_.end(), .cpu_seconds = cpu_after - cpu_before};
  if (span.end == BenchControl::kNever) {  // a pass ends with its last request
    span.end = span.begin;
    for (auto& lane : lanes_) span.end = std::max(span.end, lane->measure().last);
  }
  return span;
}

bool Bench::report(const char* name, Clock::time_point start, double length) {
  if (!options_.progress) return true;
  const auto now = Clock::now();
  BenchProgress p{.phase = name, .seconds = seconds_between(start, now)};
  std::int64_t moved = 0, total = 0;
  for (auto& lane : lanes_) {
    moved += lane->moved();
    total += lane->total();
  }
  p.share = length > 0 ? p.seconds / length
                       : static_cast<double>(moved) / static_cast<double>(std::max<std::int64_t>(1, total));
  p.share = std::clamp(p.share, 0.0, 1.0);
  if (now > reported_at_)
    p.bytes_per_second = static_cast<double>(moved - reported_bytes_) / seconds_between(reported_at_, now);
  reported_bytes_ = moved;
  reported_at_ = now;
  return options_.progress(p);
}

void Bench::gather(const Span& span) {
  result_.seconds = std::max(0.0, seconds_between(span.begin, span.end));
  result_.cpu_seconds = result_.seconds > 0 ? span.cpu_seconds : 0;
  result_.read = result_.write = {};
  result_.drive_bytes_per_second.clear();
  LatencyHistogram latency[2];
  BenchCount* const counts[2] = {&result_.read, &result_.write};
  for (auto& lane : lanes_) {
    const LaneMeasure m = lane->measure();
    for (int op = 0; op < 2; ++op) {
      counts[op]->bytes += m.bytes[op];
      counts[op]->requests += m.requests[op];
      latency[op].merge(m.latency[op]);
    }
    // In a pass each drive takes its own time.
    const double seconds = options_.seconds > 0 ? result_.seconds : seconds_between(span.begin, m.last);
    const auto add = [&](std::int64_t bytes) {
      result_.drive_bytes_per_second.push_back(seconds > 0 ? static_cast<double>(bytes) / seconds : 0);
    };
    if (options_.op == BenchOp::kCopy) {
      add(m.bytes[0]), add(m.bytes[1]);
    } else {
      add(m.bytes[0] + m.bytes[1]);
    }
  }
  for (int op = 0; op < 2; ++op) counts[op]->latency = latency_of(latency[op]);
}

}  // namespace

const char* name_of(BenchOp op) {
  static constexpr const char* kNames[] = {"read", "write", "mixed", "copy"};
  return kNames[static_cast<int>(op)];
}

const char* name_of(Pattern pattern) {
  return pattern == Pattern::kSequential ? "sequential" : "random";
}

double BenchResult::bytes_per_second() const {
  return seconds > 0 ? static_cast<double>(read.bytes + write.bytes) / seconds : 0;
}

double BenchResult::requests_per_second() const {
  return seconds > 0 ? static_cast<double>(read.requests + write.requests) / seconds : 0;
}

double BenchResult::cpu_seconds_per_gb() const {
  const std::int64_t bytes = read.bytes + write.bytes;
  return bytes > 0 ? cpu_seconds / (static_cast<double>(bytes) * 1e-9) : 0;
}

BenchResult run_bench(const BenchOptions& options) {
  return Bench(options).run();
}

}  // namespace zg::io
