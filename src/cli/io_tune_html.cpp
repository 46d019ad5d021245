// The page of io-tune: XHTML that contains its style and fetches nothing. It is light or dark like the
// reader's system.
#include <fmt/core.h>

#include <set>

#include "cli/io_tune_report.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cli {
namespace {

using io::TuneGoal;

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d2329; --soft: #5b6670; --line: #d9dee2; --box: #f0f2f3;
  --heat: 18, 113, 181; --mark: #c2410c; --sure: #14713d; --unsure: #a15c07; }
@media (prefers-color-scheme: dark) { :root { --page: #14181c; --ink: #e4e8eb; --soft: #97a3ad; --line: #343c44;
  --box: #1d2329; --heat: 56, 152, 226; --mark: #fb923c; --sure: #4ec98a; --unsure: #f0b35a; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.big { font-size: 1.25rem; font-weight: 600; margin-top: 1.2rem; }
.sure { color: var(--sure); font-weight: 600; } .unsure { color: var(--unsure); font-weight: 600; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; font: 13px/1.5 ui-monospace, monospace; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--soft); text-align: right; padding: .15rem .5rem; }
td { text-align: right; padding: .15rem .5rem; }
table.list td, table.list th { border-bottom: 1px solid var(--line); } .left { text-align: left !important; }
table.heat td { min-width: 3.2rem; height: 1.7rem; border: 1px solid var(--page);
  background: rgba(var(--heat), var(--v)); }
table.heat td.strong { color: #fff; }
table.heat td.none { background: none; color: var(--soft); }
table.heat td.chosen { outline: 3px solid var(--mark); outline-offset: -2px; font-weight: 700; }
td.point { white-space: nowrap; }
caption { text-align: left; font-weight: 600; padding: .8rem 0 .2rem; }
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        // Other control characters are not allowed in XML at all.
        out += static_cast<unsigned char>(c) < 32 && c != '\n' ? '?' : c;
    }
  }
  return out;
}

std::string gb(double bytes_per_second) {
  return fmt::format("{:.2f}", bytes_per_second / 1e9);
}

std::string heat_cell(const HeatCell& cell) {
  using Kind = HeatCell::Kind;
  const std::string marked = cell.chosen ? " chosen" : "";
  if (cell.kind != Kind::kMeasured) {
    const char* sign = cell.kind == Kind::kSkipped ? "\u2013" : cell.kind == Kind::kFailed ? "!" : "\u00b7";
    const std::string why = cell.kind == Kind::kUnknown ? "not measured" : cell.note;
    return fmt::format("<td class=\"none{}\" title=\"{}\">{}</td>", marked, escaped(why), sign);
  }
  // Squared, to tell points near the best apart, since most points often are.
  const double strength = 0.05 + 0.85 * cell.share * cell.share;
  return fmt::format("<td class=\"{}{}\" style=\"--v: {:.2f}\">{}</td>", strength > 0.6 ? "strong" : "weak",
                     marked, strength, gb(cell.value));
}

std::string heat_tables(const TuneReport& report) {
  std::string html;
  for (const HeatMap& map : heat_maps(report)) {
    html +=
        fmt::format("<div class=\"wide\"><table class=\"heat\"><caption>{}, {}</caption>\n<tr><th>depth</th>",
                    io::name_of(map.backend), map.metric == TuneGoal::kBoth ? "score" : name_of(map.metric));
    for (const int depth : report.space.depths) html += fmt::format("<th>{}</th>", depth);
    html += "</tr>\n";
    for (std::size_t b = 0; b < map.rows.size(); ++b) {
      html += fmt::format("<tr><th>{}</th>", io::block_text(report.space.block_sizes[b]));
      for (const HeatCell& cell : map.rows[b]) html += heat_cell(cell);
      html += "</tr>\n";
    }
    html += "</table></div>\n";
  }
  return html;
}

std::string queue_table(const TuneReport& report) {
  const auto lines = queue_lines(report);
  if (lines.empty()) return {};
  std::string html =
      "<h2>Queues</h2>\n<table class=\"list\"><tr><th class=\"left\">point</th><th>GB/s</th></tr>\n";
  for (const QueueLine& line : lines) {
    html += fmt::format("<tr><td class=\"left\">{}</td><td>{}</td></tr>\n", escaped(text_of(line.point)),
                        gb(score_of(report.goal, line.sample)));
  }
  return html + "</table>\n";
}

std::string confidence_table(const TuneReport& report) {
  const io::TuneOutcome& o = report.outcome;
  std::string html =
      "<div class=\"wide\"><table class=\"list\"><tr><th class=\"left\">point</th><th>median, GB/s</th>"
      "<th>MAD</th><th>read</th><th>write</th><th>p99 read</th><th>p99 write</th><th>CPU s/GB</th>"
      "<th class=\"left\">the first against it</th></tr>\n";
  for (std::size_t i = 0; i < o.candidates.size(); ++i) {
    const io::TuneCandidate& c = o.candidates[i];
    std::string comparison = i == 0 ? "(the first)" : "not repeated";
    if (i > 0 && o.rounds > 0) {
      const io::TuneComparison& d = o.comparisons[i - 1];
      comparison = fmt::format("won {} of {}, p = {:.2g}, {:+.1f}%: {}", d.wins, d.rounds, d.p,
                               (d.ratio - 1) * 100, text_of(d.order));
    }
    const bool chosen = static_cast<int>(i) == o.chosen;
    const auto side = [](const io::TuneSide& s) {
      return s.bytes_per_second > 0 ? gb(s.bytes_per_second) : "-";
    };
    const auto late = [](const io::TuneSide& s) {
      return s.p99 > 0 ? fmt::format("{:.1f} ms", s.p99 * 1e3) : std::string("-");
    };
    html += fmt::format(
        "<tr><td class=\"left "
        "point\">{}{}</td><td>{:.3f}</td><td>{:.3f}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td><td>{:.3f}</td><td class=\"left\">{}</td></tr>\n",
        chosen ? "<strong>chosen</strong> " : "", escaped(text_of(c.point)), c.median / 1e9, c.mad / 1e9,
        side(c.typical.read), side(c.typical.write), late(c.typical.read), late(c.typical.write),
        cpu_of(report.goal, c.typical), escaped(comparison));
  }
  return html + "</table></div>\n";
}

std::string machine_list(const TuneReport& report) {
  const TuneSettings& s = report.settings;
  std::string html = fmt::format(
      "<table class=\"list\"><tr><td class=\"left\">machine</td><td class=\"left\">{}, "
      "Linux {}</td></tr>\n",
      escaped(s.machine), escaped(s.kernel));
  for (const auto& p : s.paths) {
    html += fmt::format(
        "<tr><td class=\"left\">path</td><td class=\"left\">{}: {} on {}, a file of {}</td></tr>\n",
        escaped(p.path), escaped(p.filesystem), escaped(p.device), format_bytes(s.size));
  }
  html += fmt::format(
      "<tr><td class=\"left\">run</td><td class=\"left\">{}, {}, {} points and {} rounds, {} taken "
      "over from an earlier run, {} written; {}</td></tr>\n",
      escaped(report.date), format_seconds(report.seconds), report.outcome.records.size(),
      report.outcome.rounds, report.outcome.taken_over, format_bytes(report.written_bytes),
      escaped(report.ended));
  return html + fmt::format("<tr><td class=\"left\">by</td><td class=\"left\">{}</td></tr></table>\n",
                            escaped(report.version));
}

std::string skipped_list(const TuneReport& report) {
  std::string html;
  for (const io::TuneRecord& r : report.outcome.records) {
    if (!r.error.empty())
      html += fmt::format("<p>failed: {}: {}</p>\n", escaped(text_of(r.point)), escaped(r.error));
  }
  if (!report.outcome.skipped.empty())
    html += "<p class=\"soft\">\u2013 was skipped; the reason shows when the pointer rests on it.</p>\n";
  return html;
}

}  // namespace

std::string report_html(const TuneReport& report) {
  const io::TuneOutcome& o = report.outcome;
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"
      "<title>io-tune</title>\n<style>{}</style></head>\n<body>\n<h1>Drive settings by ziggurat "
      "io-tune</h1>\n"
      "<p class=\"soft\">{}</p>\n",
      kStyle, escaped(report.date));
  if (o.found) {
    const io::TuneCandidate& c = o.candidates[static_cast<std::size_t>(o.chosen)];
    html += fmt::format("<p class=\"big\">{}: {} GB/s</p>\n", escaped(text_of(c.point)), gb(c.median));
    if (report.goal == TuneGoal::kBoth) {
      html += fmt::format("<p>read {} GB/s, write {} GB/s; the score is their harmonic mean</p>\n",
                          gb(c.typical.read.bytes_per_second), gb(c.typical.write.bytes_per_second));
    }
    html += fmt::format("<p class=\"{}\">{}</p>\n", o.sure ? "sure" : "unsure", escaped(o.verdict));
    html += "<h2>For the configuration, ours and DeepSpeed's</h2>\n<pre>\"aio\": " +
            escaped(aio_section(report.space, c.point)) + "</pre>\n";
    html += fmt::format(
        "<h2>How sure</h2>\n<p>The best few, measured in {} rounds, each in an order of its "
        "own.</p>\n",
        o.rounds);
    html += confidence_table(report);
  } else {
    html += "<p class=\"unsure\">Nothing was measured.</p>\n";
  }
  html +=
      "<h2>Heat maps, GB/s</h2>\n<p class=\"soft\">Block sizes down, queue depth across, one queue, each "
      "measured once. The chosen point is framed. \u00b7 was not measured.</p>\n";
  html += skipped_list(report) + heat_tables(report) + queue_table(report);
  html += "<h2>Where</h2>\n" + machine_list(report);
  return html + "</body></html>\n";
}

}  // namespace zg::cli
