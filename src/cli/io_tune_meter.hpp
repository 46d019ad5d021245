// Measures the points of a search with run_bench(), on files that it makes, fills and removes.
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
  std::int64_t size = 0;         // size of the file on each place
  std::int64_t write_limit = 0;  // most bytes to write to each place
  double seconds = 120;          // length of the whole run
  io::TuneGoal goal = io::TuneGoal::kBoth;
  io::TuneSpace space;
  BenchWatch* watch = nullptr;                        // must outlive the meter
  std::function<void(const io::TuneRecord&)> record;  // called with every sample
};

class DriveMeter {
 public:
  explicit DriveMeter(MeterOptions options);

  // Makes the files and writes each once, so that the measurements see neither holes nor the allocation of
  // blocks. False: the user stopped it.
  bool prepare();
  // Call prepare() first. None: stopped by the user or by the write limit.
  std::optional<io::TuneSample> measure(const io::TunePoint& point, int round);
  void set_progress(const io::TuneProgress& progress) { progress_ = progress; }
  double seconds() const;
  // Planned length of one measurement, with its ramps.
  double expected_seconds() const;

  std::int64_t written_bytes() const { return written_; }  // on all paths
  bool reached_write_limit() const { return reached_limit_; }

 private:
  std::optional<double> fill(std::int64_t bytes);
  // None if it was stopped. `stretch`: makes the measurement longer than usual by this factor.
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
  double read_rate_ = 0, write_rate_ = 0;  // best bytes per second of all paths together; 0: none yet
  std::int64_t file_bytes_ = 0;            // bytes of each file that are filled and measured
  bool reached_limit_ = false;
};

}  // namespace zg::cli
