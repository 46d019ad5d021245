// The result of io-tune as text for a terminal, as a self-contained page, and as one JSON object.
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
  double seconds = 0;              // length of this run
  std::int64_t written_bytes = 0;  // written by this run, on all paths
  std::string date, version;
};

// The size of the thread pool for the back end "threads": one thread for each request in flight.
int threads_of(const io::TuneSpace& space, const io::TunePoint& point);
// {"block_size": 1048576, ...}: the value of "aio" in our configuration and in DeepSpeed's.
std::string aio_section(const io::TuneSpace& space, const io::TunePoint& point);

// A heat map per back end and metric: block sizes down, depths across. `colour`: use ANSI background colours
// instead of shading characters.
std::string heat_text(const TuneReport& report, bool colour);
// The candidates, their rounds, and how sure the result is.
std::string confidence_text(const TuneReport& report);
// XHTML, self-contained.
std::string report_html(const TuneReport& report);
nlohmann::ordered_json report_json(const TuneReport& report);

// The declarations below are for the two renderers, of text and of HTML.
struct HeatCell {
  enum class Kind { kMeasured, kSkipped, kFailed, kUnknown } kind = Kind::kUnknown;
  double value = 0, share = 0;  // bytes per second; value / best value of all back ends
  bool chosen = false;
  std::string note;  // why there is no value
};
struct HeatMap {
  io::Backend backend;
  io::TuneGoal metric;                      // kBoth: the score
  std::vector<std::vector<HeatCell>> rows;  // [block size][depth]
};
std::vector<HeatMap> heat_maps(const TuneReport& report);
// "ahead", "equal within 1%", "not sure".
const char* text_of(io::TuneOrder order);
struct QueueLine {
  io::TunePoint point;
  io::TuneSample sample;
};
// The points measured with several queues, each preceded by the same point with one queue; empty if there are
// none.
std::vector<QueueLine> queue_lines(const TuneReport& report);

}  // namespace zg::cli
