#include "cli/io_tune_report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "ziggurat/base/units.hpp"

namespace zg::cli {
namespace {

using io::TuneGoal;
using io::TunePoint;
using nlohmann::ordered_json;

std::vector<TuneGoal> metrics_of(TuneGoal goal) {
  if (goal != TuneGoal::kBoth) return {goal};
  return {TuneGoal::kRead, TuneGoal::kWrite, TuneGoal::kBoth};
}

const char* title_of(TuneGoal metric) {
  return metric == TuneGoal::kBoth ? "score (harmonic mean of read and write)" : name_of(metric);
}

// The text on a background from a ramp of six of xterm's 256 colours, dark to bright.
std::string painted(const std::string& text, double share) {
  constexpr int kRamp[] = {17, 19, 25, 31, 37, 78};
  const int step = std::clamp(static_cast<int>(share * 6), 0, 5);
  return fmt::format("\033[48;5;{};38;5;{}m{}\033[0m", kRamp[step], step >= 4 ? 16 : 255, text);
}

std::string cell_text(const HeatCell& cell, bool colour) {
  using Kind = HeatCell::Kind;
  if (cell.kind == Kind::kSkipped) return "      - ";
  if (cell.kind == Kind::kFailed) return "      ! ";
  if (cell.kind == Kind::kUnknown) return "      . ";
  const std::string number = fmt::format("{:.2f}", cell.value / 1e9);
  const std::string text = cell.chosen ? "[" + number + "]" : number + " ";
  if (colour) return painted(fmt::format("{:>8}", text), cell.share);
  constexpr const char* kShades[] = {" ", "\u2591", "\u2592", "\u2593", "\u2588"};
  return fmt::format("{:>7}{}", text, kShades[std::clamp(static_cast<int>(cell.share * 5), 0, 4)]);
}

void put_sample(ordered_json& j, TuneGoal goal, const io::TuneSample& s) {
  j["score"] = score_of(goal, s);
  if (goal != TuneGoal::kWrite) j["read"] = json_of(s.read);
  if (goal != TuneGoal::kRead) j["write"] = json_of(s.write);
}

// "A beat B in 9 of 10 rounds (p = 0.021), +3.1% (95%: +1.2% to +4.0%): ahead"
std::string comparison_text(const io::TuneOutcome& o, std::size_t i) {
  const io::TuneComparison& d = o.comparisons[i];
  std::string text =
      fmt::format("{} beat {} in {} of {} rounds (p = {:.2g}), {:+.1f}%", text_of(o.candidates[0].point),
                  text_of(o.candidates[i + 1].point), d.wins, d.rounds, d.p, (d.ratio - 1) * 100);
  if (d.high > 0) text += fmt::format(" (95%: {:+.1f}% to {:+.1f}%)", (d.low - 1) * 100, (d.high - 1) * 100);
  return text + ": " + text_of(d.order);
}

ordered_json candidates_json(const TuneReport& report) {
  const io::TuneOutcome& o = report.outcome;
  ordered_json list = ordered_json::array();
  for (std::size_t i = 0; i < o.candidates.size(); ++i) {
    const io::TuneCandidate& c = o.candidates[i];
    ordered_json j = json_of(c.point);
    j["median"] = c.median;
    j["mad"] = c.mad;
    put_sample(j, report.goal, c.typical);
    if (i > 0 && o.rounds > 0) {
      const io::TuneComparison& d = o.comparisons[i - 1];
      constexpr const char* kOrders[] = {"behind", "equal", "unclear"};
      j["against_first"] = {{"order", kOrders[static_cast<int>(d.order)]},
                            {"lost", d.wins},
                            {"won", d.losses},
                            {"rounds", d.rounds},
                            {"p", d.p},
                            {"first_is_faster_by", d.ratio}};
    }
    list.push_back(std::move(j));
  }
  return list;
}

}  // namespace

const char* text_of(io::TuneOrder order) {
  constexpr const char* kTexts[] = {"ahead", "equal within 1%", "not sure"};
  return kTexts[static_cast<int>(order)];
}

int threads_of(const io::TuneSpace& space, const TunePoint& point) {
  return std::clamp(point.queue_depth, 1, space.max_threads);
}

std::string aio_section(const io::TuneSpace& space, const TunePoint& point) {
  return fmt::format(
      "{{\"block_size\": {}, \"queue_depth\": {}, \"intra_op_parallelism\": {}, \"single_submit\": false, "
      "\"overlap_events\": true, \"backend\": \"{}\", \"queues\": {}}}",
      point.block_size, point.queue_depth,
      point.backend == io::Backend::kThreads ? threads_of(space, point) : point.queues,
      io::name_of(point.backend), point.queues);
}

std::vector<HeatMap> heat_maps(const TuneReport& report) {
  const io::TuneOutcome& o = report.outcome;
  std::map<TunePoint, const io::TuneRecord*> measured;
  std::set<io::Backend> seen;
  for (const io::TuneRecord& r : o.records) {
    if (r.round >= 0 && !measured.contains(r.point)) continue;
    if (r.round < 0) measured[r.point] = &r;
    seen.insert(r.point.backend);
  }
  const std::map<TunePoint, std::string> skipped(o.skipped.begin(), o.skipped.end());
  const TunePoint* chosen = o.found ? &o.candidates[static_cast<std::size_t>(o.chosen)].point : nullptr;
  std::vector<HeatMap> maps;
  for (const TuneGoal metric : metrics_of(report.goal)) {
    double most = 0;
    const std::size_t first = maps.size();
    for (const io::Backend backend : report.space.backends) {
      if (!seen.contains(backend)) continue;
      HeatMap map{.backend = backend, .metric = metric, .rows = {}};
      for (const std::int64_t block_size : report.space.block_sizes) {
        auto& row = map.rows.emplace_back();
        for (const int depth : report.space.depths) {
          const TunePoint point{backend, block_size, depth, 1};
          HeatCell& cell = row.emplace_back();
          cell.chosen = chosen != nullptr && chosen->backend == backend && chosen->block_size == block_size &&
                        chosen->queue_depth == depth;
          if (const auto found = measured.find(point); found != measured.end()) {
            cell.kind = found->second->error.empty() ? HeatCell::Kind::kMeasured : HeatCell::Kind::kFailed;
            cell.note = found->second->error;
            cell.value = score_of(metric, found->second->sample);
            most = std::max(most, cell.value);
          } else if (const auto why = skipped.find(point); why != skipped.end()) {
            cell.kind = HeatCell::Kind::kSkipped;
            cell.note = why->second;
          }
        }
      }
      maps.push_back(std::move(map));
    }
    for (std::size_t i = first; i < maps.size(); ++i) {
      for (auto& row : maps[i].rows)
        for (HeatCell& cell : row) cell.share = most > 0 ? cell.value / most : 0;
    }
  }
  return maps;
}

std::string heat_text(const TuneReport& report, bool colour) {
  std::string text;
  bool any_skipped = false, any_failed = false;
  for (const HeatMap& map : heat_maps(report)) {
    text += fmt::format("\n{}, {}: GB/s\n{:>9}", io::name_of(map.backend), title_of(map.metric), "depth");
    for (const int depth : report.space.depths) text += fmt::format("{:>7} ", depth);
    text += "\n";
    for (std::size_t b = 0; b < map.rows.size(); ++b) {
      text += fmt::format("{:>9}", io::block_text(report.space.block_sizes[b]));
      for (const HeatCell& cell : map.rows[b]) {
        text += cell_text(cell, colour);
        any_skipped = any_skipped || cell.kind == HeatCell::Kind::kSkipped;
        any_failed = any_failed || cell.kind == HeatCell::Kind::kFailed;
      }
      text += "\n";
    }
  }
  text += "[ ] chosen   . not measured";
  if (any_skipped) text += "   - skipped";
  if (any_failed) text += "   ! failed";
  text += "\n";
  std::set<std::string> reasons;
  for (const auto& [point, why] : report.outcome.skipped) {
    // One example of each kind of reason; within a kind only the numbers differ.
    if (reasons.insert(why.substr(0, 15)).second)
      text += fmt::format("skipped, for example: {} {}\n", text_of(point), why);
  }
  for (const io::TuneRecord& r : report.outcome.records)
    if (!r.error.empty()) text += fmt::format("failed: {}: {}\n", text_of(r.point), r.error);
  const auto queues = queue_lines(report);
  if (!queues.empty()) text += "\nqueues, GB/s\n";
  for (const QueueLine& line : queues) {
    text += fmt::format("  {:<34}", text_of(line.point));
    for (const TuneGoal metric : metrics_of(report.goal))
      text += fmt::format("  {} {:.2f}", metric == TuneGoal::kBoth ? "score" : name_of(metric),
                          score_of(metric, line.sample) / 1e9);
    text += "\n";
  }
  return text;
}

std::vector<QueueLine> queue_lines(const TuneReport& report) {
  std::set<TunePoint> shown;
  std::vector<QueueLine> lines;
  for (const io::TuneRecord& r : report.outcome.records) {
    if (r.round >= 0 || !r.error.empty() || r.point.queues == 1) continue;
    TunePoint single = r.point;
    single.queues = 1;
    for (const io::TuneRecord& other : report.outcome.records) {
      if (other.point == single && other.round < 0 && other.error.empty() && shown.insert(single).second)
        lines.push_back({single, other.sample});
    }
    lines.push_back({r.point, r.sample});
  }
  return lines;
}

std::string confidence_text(const TuneReport& report) {
  const io::TuneOutcome& o = report.outcome;
  if (!o.found) return "nothing was measured\n";
  std::string text = fmt::format("\n{} round(s) of the best, interleaved; medians, GB/s\n", o.rounds);
  for (std::size_t i = 0; i < o.candidates.size(); ++i) {
    const io::TuneCandidate& c = o.candidates[i];
    text += fmt::format("{} {:<34} {:.3f} +- {:.3f}", static_cast<int>(i) == o.chosen ? "*" : " ",
                        text_of(c.point), c.median / 1e9, c.mad / 1e9);
    if (report.goal == TuneGoal::kBoth) {
      text += fmt::format("  read {:.2f}  write {:.2f}", c.typical.read.bytes_per_second / 1e9,
                          c.typical.write.bytes_per_second / 1e9);
    }
    text += fmt::format("  cpu {:.3f} s/GB\n", cpu_of(report.goal, c.typical));
  }
  if (o.rounds > 0)
    for (std::size_t i = 0; i < o.comparisons.size(); ++i) text += "  " + comparison_text(o, i) + "\n";
  return text + o.verdict + "\n";
}

ordered_json report_json(const TuneReport& report) {
  const io::TuneOutcome& o = report.outcome;
  ordered_json j;
  if (o.found) {
    const io::TuneCandidate& chosen = o.candidates[static_cast<std::size_t>(o.chosen)];
    j["aio"] = ordered_json::parse(aio_section(report.space, chosen.point));
    j["chosen"] = json_of(chosen.point);
    j["chosen"]["mad"] = chosen.mad;
    put_sample(j["chosen"], report.goal, chosen.typical);
    j["chosen"]["score"] = chosen.median;
  }
  j["sure"] = o.sure;
  j["verdict"] = o.verdict;
  j["ended"] = report.ended;
  j["search_complete"] = o.search_complete;
  j["rounds"] = o.rounds;
  j["for"] = name_of(report.goal);
  j["seconds"] = report.seconds;
  j["written_bytes"] = report.written_bytes;
  j["machine"] = report.settings.machine;
  j["kernel"] = report.settings.kernel;
  j["paths"] = json_of(report.settings.paths);
  j["file_bytes"] = report.settings.size;
  j["taken_over"] = o.taken_over;
  j["candidates"] = candidates_json(report);
  j["points"] = ordered_json::array();
  j["failed"] = ordered_json::array();
  for (const io::TuneRecord& r : o.records) {
    ordered_json point = json_of(r.point);
    if (!r.error.empty()) {
      point["error"] = r.error;
      j["failed"].push_back(std::move(point));
    } else if (r.round < 0) {
      put_sample(point, report.goal, r.sample);
      j["points"].push_back(std::move(point));
    }
  }
  j["skipped"] = ordered_json::array();
  for (const auto& [point, why] : o.skipped) {
    j["skipped"].push_back(json_of(point));
    j["skipped"].back()["why"] = why;
  }
  return j;
}

}  // namespace zg::cli
