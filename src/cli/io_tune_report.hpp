// What io-tune found, as text for a terminal, as a page that needs nothing else, and as one JSON object.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/io_tune_state.hpp"
#include "ziggurat/io/tune.hpp"

namespace zg::cli {

struct TuneReport {
  const io::TuneOutcome& outcome;
  const io::TuneSpace& space;
  io::TuneGoal goal = io::TuneGoal::kBoth;
  const TuneSettings& settings;
  std::string ended;               // "the order is stable", "time is up", ...
  double seconds = 0;              // that this run took
  std::int64_t written_bytes = 0;  // by this run, on all paths
  std::string date, version;
};

// Threads of the pool: one for each request in flight.
int threads_of(const io::TuneSpace& space, const io::TunePoint& point);
// {"block_size": 1048576, ...}: what stands behind "aio" in our configuration and in DeepSpeed's.
std::string aio_section(const io::TuneSpace& space, const io::TunePoint& point);

// Heat tables of each back end, block sizes down, depths across. `colour`: ANSI backgrounds; else shades.
std::string heat_text(const TuneReport& report, bool colour);
// The candidates, their rounds, and how sure it is.
std::string confidence_text(const TuneReport& report);
// XHTML, self-contained.
std::string report_html(const TuneReport& report);
nlohmann::ordered_json report_json(const TuneReport& report);

// For the two renderers.
struct HeatCell {
  enum class Kind { kMeasured, kSkipped, kFailed, kUnknown } kind = Kind::kUnknown;
  double value = 0, share = 0;  // bytes per second; of the greatest of all back ends
  bool chosen = false;
  std::string note;  // why there is no value
};
struct HeatMap {
  io::Backend backend;
  io::TuneGoal metric;                      // kBoth: the score
  std::vector<std::vector<HeatCell>> rows;  // [block size][depth]
};
std::vector<HeatMap> heat_maps(const TuneReport& report);
// "A beat B in 9 of 10 rounds (p = 0.02), 3.1% ahead [1.2%, 4.0%]"
std::string duel_text(const TuneReport& report, std::size_t i);
struct QueueLine {
  io::TunePoint point;
  io::TuneSample sample;
};
// With more queues than one, as measured, and what they compare with; empty if none was.
std::vector<QueueLine> queue_lines(const TuneReport& report);

}  // namespace zg::cli
