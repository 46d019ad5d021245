#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "ziggurat/base/units.hpp"
#include "ziggurat/train/forecast.hpp"

namespace zg {
namespace {

using nlohmann::ordered_json;

std::string count_text(double n) {
  for (const auto& [least, unit] : {std::pair{1e12, " trillion"}, {1e9, " billion"}, {1e6, " million"}}) {
    if (n >= least) return fmt::format("{:.2f}{}", n / least, unit);
  }
  return fmt::format("{:.0f}", n);
}

std::string ranks_text(const RankForecast& r) {
  return r.ranks == 1 ? fmt::format("rank {}", r.first) : fmt::format("{} ranks like {}", r.ranks, r.first);
}

std::string rank_lines(const RankForecast& r) {
  const LinkBytes& t = r.per_step;
  std::string text = fmt::format(
      "{}, each: peak device {} of {}, host {} of {}, nvme {}\n  bytes per step: nvme read {}, nvme write "
      "{}, "
      "host->device {}, device->host {}\n",
      ranks_text(r), format_bytes(r.peak.device), format_bytes(r.budgets.device), format_bytes(r.peak.host),
      format_bytes(r.budgets.host), format_bytes(r.nvme), format_bytes(t.nvme_read()),
      format_bytes(t.nvme_write()), format_bytes(t[kToDevice]), format_bytes(t[kToHost]));
  std::string comm;
  for (int i = 0; i < kCommAxes; ++i) {
    const auto axis = static_cast<CommAxis>(i);
    if (r.comm[axis].sent > 0)
      comm +=
          fmt::format("{} {} {}", comm.empty() ? "" : ",", name_of(axis), format_bytes(r.comm[axis].sent));
  }
  if (!comm.empty()) text += "  sent to other ranks:" + comm + "\n";
  text += "  busy:";
  for (int p = 0; p < kTimedParts; ++p) {
    const auto part = static_cast<TimedPart>(p);
    const double share = r.expected()[part] / r.expected().seconds;
    if (share >= 0.005) text += fmt::format(" {} {:.0f}%,", name_of(part), 100 * share);
  }
  text.back() = '\n';
  return text;
}

ordered_json json_of(const RankForecast& r) {
  ordered_json o;
  o["first"] = r.first, o["ranks"] = r.ranks;
  o["peak_bytes"] = {{"device", r.peak.device}, {"host", r.peak.host}, {"nvme", r.nvme}};
  o["budget_bytes"] = {{"device", r.budgets.device}, {"host", r.budgets.host}};
  for (int l = 0; l < kLinks; ++l)
    o["bytes_per_step"][name_of(static_cast<Link>(l))] = r.per_step[static_cast<Link>(l)];
  for (int i = 0; i < kCommAxes; ++i) {
    const auto axis = static_cast<CommAxis>(i);
    if (r.comm[axis].calls > 0) o["sent_per_step"][name_of(axis)] = r.comm[axis].sent;
  }
  for (int p = 0; p < kTimedParts; ++p)
    o["busy_seconds"][name_of(static_cast<TimedPart>(p))] = r.expected()[static_cast<TimedPart>(p)];
  o["bound_seconds"] = r.expected().bound, o["sum_of_phases_seconds"] = r.expected().sum;
  return o;
}

}  // namespace

std::string Forecast::text(double tokens) const {
  std::string t;
  if (!fits) {
    t = fmt::format("it does not fit {}\nmissing    {}\n", machine, missing);
    if (!hint.empty()) t += fmt::format("           {}\n", hint);
    for (const std::string& change : search.changes) t += fmt::format("it fits with --set '{}'\n", change);
    if (search.gave_up)
      t += fmt::format("           no change was found: {} plans were tried, the most for such a model\n",
                       search.tries);
    if (search.made && search.changes.empty() && !search.gave_up)
      t += fmt::format("           none of the usual changes, alone or two together, makes it fit\n");
    return t + fmt::format("parameters {}\n", count_text(parameters));
  }
  const auto hours_of = [&](double seconds) { return seconds * tokens / tokens_per_step / 3600; };
  t = fmt::format("it fits {}\nstep       {} ({} to {}), {:.0f} tokens/s\n", machine,
                  format_seconds(expected()), format_seconds(step_seconds[2]),
                  format_seconds(step_seconds[0]), tokens_per_step / expected());
  if (tokens > 0) {
    t += fmt::format("{} tokens take {:.1f} hours ({:.1f} to {:.1f})", count_text(tokens),
                     hours_of(expected()), hours_of(step_seconds[2]), hours_of(step_seconds[0]));
    if (price_per_hour) t += fmt::format(", {:.0f} USD", hours_of(expected()) * *price_per_hour);
    if (drive_usd) t += fmt::format(", {:.0f} USD of drives", *drive_usd * tokens / tokens_per_step);
    t += "\n";
  }
  t += fmt::format("bound by   {}, which needs {} alone: eta {:.2f}\n", bound_by,
                   format_seconds(bound_seconds), bound_seconds / expected());
  if (bubble > 0) t += fmt::format("bubble     {:.1f}% of a step, by formula\n", 100 * bubble);
  t += fmt::format("parameters {}", count_text(parameters));
  t += trained < parameters ? fmt::format(", {} trained\n", count_text(trained)) : "\n";
  for (const RankForecast& r : ranks) t += rank_lines(r);
  if (!caution.empty()) t += "note: " + caution + "\n";
  if (drive_years)
    t +=
        fmt::format("drives     their endurance lasts {:.1f} years of steps without a pause\n", *drive_years);
  for (const Sensitivity& s : sensitivities) {
    t += fmt::format("with {:<10} {} a step, {:.1f}% less\n", s.change, format_seconds(s.seconds),
                     std::max(0.0, 100 * (1 - s.seconds / expected())));
  }
  return t + "\n" + model + "\n";
}

std::string Forecast::json(double tokens) const {
  ordered_json o;
  o["machine"] = machine;
  o["parameters"] = static_cast<std::int64_t>(parameters);
  o["trained_parameters"] = static_cast<std::int64_t>(trained);
  o["fits"] = fits;
  o["drives"] = drives;
  if (!fits) {
    o["missing"] = missing, o["hint"] = hint;
    if (search.made) o["changes"] = search.changes, o["gave_up"] = search.gave_up, o["tried"] = search.tries;
    return o.dump(2) + "\n";
  }
  o["step_seconds"] = expected();
  o["step_seconds_interval"] = {step_seconds[2], step_seconds[0]};
  o["tokens_per_step"] = tokens_per_step;
  o["tokens_per_second"] = tokens_per_step / expected();
  o["flops_per_step"] = flops_per_step;
  o["bound_by"] = bound_by, o["bound_seconds"] = bound_seconds, o["eta"] = bound_seconds / expected();
  o["bubble"] = bubble;
  if (tokens > 0) {
    const double hours = expected() * tokens / tokens_per_step / 3600;
    o["hours"] = hours;
    if (price_per_hour) o["usd"] = hours * *price_per_hour;
    if (drive_usd) o["drive_usd"] = *drive_usd * tokens / tokens_per_step;
  }
  if (drive_years) o["drive_years"] = *drive_years;
  if (!caution.empty()) o["note"] = caution;
  for (const RankForecast& r : ranks) o["ranks"].push_back(json_of(r));
  for (const Sensitivity& s : sensitivities) o["sensitivity"][s.change] = s.seconds;
  return o.dump(2) + "\n";
}

}  // namespace zg
