// Reports to the watchdog which benchmark is running and how far it has come.
#pragma once
#include <mutex>
#include <string>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/io/bench.hpp"

namespace zg::cli {

class BenchWatch {
 public:
  // `name`: the command's name. The watchdog must outlive this object.
  BenchWatch(Watchdog& watchdog, const std::string& name);

  // io::run_bench() under the watchdog. One at a time.
  io::BenchResult run(io::BenchOptions options);

 private:
  void note(const io::BenchProgress& progress);
  std::string state() const;

  mutable std::mutex mutex_;
  std::string subject_;
  io::BenchProgress last_;  // the latest progress; its phase is empty before the first
  Clock::time_point last_at_;
  bool running_ = false;                 // set from the first progress on: making files before may take long
  std::uint64_t done_ = 0;               // counts progress with bytes moved, or with a new phase
  Watchdog::Registration registration_;  // the last member, so that it ends before those that it reads
};

// "/mnt/a, /mnt/b": the paths of the drives.
std::string paths_text(const io::BenchOptions& options);

}  // namespace zg::cli
