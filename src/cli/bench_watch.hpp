// What the watchdog is told of benchmarks: which one runs, and how far it is.
#pragma once
#include <mutex>
#include <string>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/io/bench.hpp"

namespace zg::cli {

class BenchWatch {
 public:
  // `name`: of the command. The watchdog outlives it.
  BenchWatch(Watchdog& watchdog, const std::string& name);

  // io::run_bench(), watched. One at a time.
  io::BenchResult run(io::BenchOptions options);

 private:
  void note(const io::BenchProgress& progress);
  std::string state() const;

  mutable std::mutex mutex_;
  std::string subject_;
  io::BenchProgress last_;  // phase: empty before the first
  Clock::time_point last_at_;
  bool running_ = false;                 // from the first progress on: making the files may take long
  std::uint64_t done_ = 0;               // reports that something had moved since the one before
  Watchdog::Registration registration_;  // last
};

}  // namespace zg::cli
