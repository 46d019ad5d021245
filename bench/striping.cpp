// What a volume gets out of unequal drives, and how soon it adapts when one becomes slow. Drives of memory, of
// bandwidths 1, 1, 2 and 4; extents are written over and over, so many in flight; in mid-run the fastest drive
// becomes slower. Prints one JSON line for each part.
//
//   bench_striping [--unit BYTES_PER_SECOND] [--extent BYTES] [--in-flight N] [--before S] [--after S] ...
//
// "share": of the sum of the drives' bandwidths (after the change: of what is left of it).
#include <CLI/CLI.hpp>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/io/volume.hpp"

namespace {

using zg::Clock;
using zg::io::Op;

constexpr double kWindow = 0.25, kTick = 0.01;

struct Settings {
  double unit = 200e6;
  std::int64_t extent = 8 << 20;
  int extents = 32, in_flight = 16;
  double before = 3, after = 3, reading = 1;  // seconds
  double slow_factor = 10;
  bool adapt = true;
  std::vector<double> bandwidths = {1, 1, 2, 4};  // units
};

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Keeps `in_flight` extents on their way, always the one next that was done longest ago.
class Load final : public zg::io::ExtentCompletion {
 public:
  Load(zg::io::Volume& volume, const Settings& settings) : volume_(volume), settings_(settings) {
    for (int i = 0; i < settings.extents; ++i) {
      idle_.push_back(volume.create({.name = fmt::format("extent {}", i), .bytes = settings.extent}));
    }
    for (int i = 0; i < settings.in_flight; ++i) {
      buffers_.emplace_back(settings.extent);
      std::fill_n(buffers_.back().data(), settings.extent, static_cast<char>('a' + i));
    }
  }
  void start(Op op) {
    std::lock_guard lock(mutex_);
    op_ = op;
    stopping_ = false;
    for (std::uint64_t i = 0; i < buffers_.size(); ++i) begin(i);
  }
  // Waits until nothing is in flight.
  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.wait(lock, [&] { return in_flight_ == 0; });
    if (!failure_.empty()) throw zg::Error(zg::Errc::kIo, "striping", failure_);
  }
  void on_extent(zg::io::ExtentId id, std::uint64_t buffer, zg::io::ExtentResult result) override {
    std::lock_guard lock(mutex_);
    --in_flight_;
    if (!result.ok() && failure_.empty()) failure_ = volume_.explain(id, op_, result);
    idle_.push_back(id);
    if (!stopping_ && failure_.empty()) begin(buffer);
    changed_.notify_all();
  }

 private:
  void begin(std::uint64_t buffer) {
    ++in_flight_;
    const zg::io::ExtentTransfer t{
        .extent = idle_.front(), .data = buffers_[buffer].data(), .completion = this, .tag = buffer};
    idle_.pop_front();
    op_ == Op::kWrite ? volume_.write(t) : volume_.read(t);
  }

  zg::io::Volume& volume_;
  const Settings& settings_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Op op_ = Op::kWrite;
  bool stopping_ = false;
  int in_flight_ = 0;
  std::string failure_;
  std::deque<zg::io::ExtentId> idle_;
  std::vector<zg::Buffer> buffers_;
};

// Bytes that all drives have moved, every kTick.
class Samples {
 public:
  explicit Samples(const zg::io::Engine& engine) : engine_(engine), begin_(Clock::now()) {}
  void take_until(Clock::time_point end) {
    while (Clock::now() < end) {
      points_.emplace_back(zg::seconds_between(begin_, Clock::now()), moved());
      std::this_thread::sleep_until(begin_ + duration_of(kTick * static_cast<double>(points_.size())));
    }
  }
  // Bytes per second between two times, in seconds from the beginning.
  double rate(double from, double to) const { return (at(to) - at(from)) / (to - from); }
  double end() const { return points_.back().first; }

 private:
  double moved() const {
    std::int64_t bytes = 0;
    for (int d = 0; d < engine_.drive_count(); ++d) {
      const zg::io::LinkCounters c = engine_.counters(d);
      bytes += c.read_bytes + c.write_bytes;
    }
    return static_cast<double>(bytes);
  }
  double at(double time) const {
    const auto after = std::lower_bound(points_.begin(), points_.end(), std::pair(time, 0.0));
    if (after == points_.begin()) return after->second;
    if (after == points_.end()) return points_.back().second;
    const auto before = std::prev(after);
    const double part = (time - before->first) / std::max(after->first - before->first, 1e-9);
    return before->second + part * (after->second - before->second);
  }
  const zg::io::Engine& engine_;
  const Clock::time_point begin_;
  std::vector<std::pair<double, double>> points_;
};

double rounded(double value) {
  return std::round(value * 1000) / 1000;
}

nlohmann::ordered_json shares_of(const zg::io::Volume& volume, int drives) {
  auto shares = nlohmann::ordered_json::array();
  for (int d = 0; d < drives; ++d) shares.push_back(rounded(volume.space(d).share));
  return shares;
}

void print(const nlohmann::ordered_json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

double sum_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum;
}

// After `change` seconds: the share in every window of 250 ms, and from when on each (begun at any tick) has 0.9.
nlohmann::ordered_json adaptation(const Samples& samples, double change, double left) {
  nlohmann::ordered_json line = {{"part", "write_after_change"}, {"left_bytes_per_second", left}};
  auto windows = nlohmann::ordered_json::array();
  for (double t = change; t + kWindow <= samples.end(); t += kWindow)
    windows.push_back(rounded(samples.rate(t, t + kWindow) / left));
  line["window_s"] = kWindow;
  line["share_by_window"] = windows;
  double since = 0, worst = 1e9;
  for (double t = change; t + kWindow <= samples.end(); t += kTick) {
    const double share = samples.rate(t, t + kWindow) / left;
    if (share < 0.9) since = t + kTick - change;
    if (t >= change + 1) worst = std::min(worst, share);
  }
  line["seconds_until_it_stays_at_0.9"] = rounded(since);
  line["worst_window_after_1_s"] = rounded(worst);
  return line;
}

void run(const Settings& s) {
  std::vector<zg::io::DriveOptions> drives;
  for (const double units : s.bandwidths) {
    // Room for all to be placed twice over on any mix of drives.
    drives.push_back({.path = fmt::format("drive of {}", units), .bytes = s.extent * s.extents});
    drives.back().ram = zg::io::RamModel{.bytes_per_second = units * s.unit, .latency_seconds = 50e-6};
  }
  const bool changes = s.after > 0;
  if (changes) {
    drives.back().ram->slow_after_seconds = s.before;
    drives.back().ram->slow_factor = s.slow_factor;
  }
  const double sum = s.unit * sum_of(s.bandwidths);
  const double left = sum - s.unit * s.bandwidths.back() * (1 - 1 / s.slow_factor);
  const int count = static_cast<int>(drives.size());
  zg::io::EngineOptions options;
  options.backend = zg::io::Backend::kRam;
  const auto begin = Clock::now();
  const auto engine = zg::io::make_engine(options, drives);
  const auto volume = zg::io::make_volume(*engine, {.adapt = s.adapt});
  Load load(*volume, s);
  Samples samples(*engine);
  const double origin = zg::seconds_between(begin, Clock::now());  // the drives' clocks began before
  load.start(Op::kWrite);
  samples.take_until(begin + duration_of(s.before));
  print({{"part", "write"},
         {"bandwidths_bytes_per_second_sum", sum},
         {"extent_bytes", s.extent},
         {"in_flight", s.in_flight},
         {"adapt", s.adapt},
         {"bytes_per_second", samples.rate(1, samples.end())},
         {"share", rounded(samples.rate(1, samples.end()) / sum)},
         {"first_second_share", rounded(samples.rate(0, 1) / sum)},
         {"shares", shares_of(*volume, count)}});
  if (changes) {
    samples.take_until(begin + duration_of(s.before + s.after));
    nlohmann::ordered_json line = adaptation(samples, s.before - origin, left);
    line["shares"] = shares_of(*volume, count);
    print(line);
  }
  load.stop();
  Samples reads(*engine);
  load.start(Op::kRead);
  reads.take_until(Clock::now() + duration_of(s.reading));
  const double rate = reads.rate(0, reads.end());
  load.stop();
  print({{"part", "read"}, {"bytes_per_second", rate}, {"share", rounded(rate / (changes ? left : sum))}});
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Throughput of a volume over drives of unequal bandwidth, one of which becomes slow"};
  Settings s;
  bool fixed = false;
  app.add_option("--unit", s.unit, "Bytes per second of the slowest drive");
  app.add_option("--bandwidths", s.bandwidths, "Of the drives, in units");
  app.add_option("--extent", s.extent, "Bytes of an extent");
  app.add_option("--extents", s.extents);
  app.add_option("--in-flight", s.in_flight)->check(CLI::Range(1, 1024));
  app.add_option("--before", s.before, "Seconds until the last drive becomes slow; 2 or more");
  app.add_option("--after", s.after, "Seconds from then on; 0: it stays as it is");
  app.add_option("--slow-factor", s.slow_factor);
  app.add_option("--reading", s.reading, "Seconds of reading at the end");
  app.add_flag("--fixed", fixed, "Equal shares, which do not adapt: what there is to gain");
  CLI11_PARSE(app, argc, argv);
  s.adapt = !fixed;
  try {
    if (s.extents < s.in_flight) throw zg::Error(zg::Errc::kUsage, "--extents", "fewer than are in flight");
    if (s.before < 2) throw zg::Error(zg::Errc::kUsage, "--before", "less than 2 seconds");
    run(s);
    return 0;
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_striping: %s\n", e.what());
    return e.exit_code();
  }
}
