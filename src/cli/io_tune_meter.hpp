// Measures the points of a search with run_bench(), on files that it makes, fills once and removes.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_watch.hpp"
#include "cli/io_tune_files.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/io/bench.hpp"
#include "ziggurat/io/tune.hpp"

namespace zg::cli {

struct MeterOptions {
  std::vector<TunePlace> places;
  std::int64_t size = 0;         // of the file on each
  std::int64_t write_limit = 0;  // bytes written to each path, at most
  double seconds = 120;          // of the whole run
  io::TuneGoal goal = io::TuneGoal::kBoth;
  io::TuneSpace space;
  BenchWatch* watch = nullptr;                        // outlives the meter
  std::function<void(const io::TuneRecord&)> record;  // called with every sample
};

class DriveMeter {
 public:
  explicit DriveMeter(MeterOptions options);

  // Makes the files and writes each once, so that neither holes nor their allocation are measured. False:
  // stopped.
  bool prepare();
  // After prepare(). Nothing: stopped, by the user or by the limit on writes.
  std::optional<io::TuneSample> measure(const io::TunePoint& point, int round);
  void set_progress(const io::TuneProgress& progress) { progress_ = progress; }
  double seconds() const;
  // Of one point, ramps included, as planned.
  double expected_seconds() const;

  std::int64_t written_bytes() const { return written_; }  // on all paths
  bool reached_write_limit() const { return reached_limit_; }

 private:
  std::optional<double> fill(std::int64_t bytes);
  // Nothing when it was stopped. `stretch`: so many times the usual time.
  std::optional<io::TuneSide> measure_side(const io::TunePoint& point, io::BenchOp op, double stretch = 1);
  io::BenchOptions bench(const io::TunePoint& point, io::BenchOp op) const;
  std::optional<io::BenchResult> run(io::BenchOptions options);
  bool may_write(double bytes_per_second, double seconds);
  void show(const std::string& text) const;

  const MeterOptions options_;
  const Clock::time_point begin_ = Clock::now();
  std::vector<TuneFile> files_;
  io::TuneProgress progress_;
  std::int64_t written_ = 0;
  double read_rate_ = 0, write_rate_ = 0;  // best bytes per second of all paths; 0: not seen yet
  std::int64_t file_bytes_ = 0;            // filled of each file
  bool reached_limit_ = false;
};

}  // namespace zg::cli
