#include <fmt/ranges.h>

#include <algorithm>

#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/observers.hpp"

namespace zg {
namespace {

std::string budget_row(const char* name, std::int64_t peak, std::int64_t budget) {
  const double share = budget > 0 ? 100.0 * static_cast<double>(peak) / static_cast<double>(budget) : 0.0;
  return fmt::format("  {:<20} {:>12} {:>12} {:>7.1f}%\n", name, format_bytes(peak), format_bytes(budget),
                     share);
}

// A line for each drive whose endurance is configured.
std::string wear_text(const io::Engine* engine) {
  std::string text;
  for (int d = 0; engine != nullptr && d < engine->drive_count(); ++d) {
    const std::string wear = engine->report(d).endurance_text();
    if (!wear.empty()) text += fmt::format("{}  {}\n", text.empty() ? "\n" : "", wear);
  }
  return text;
}

// What several ranks exchanged, as counted and as forecast, and which of them held up the others.
std::string ranks_text(const RunSummary& r) {
  const std::int64_t steps = std::max<std::int64_t>(1, r.steps);
  const auto per_step = [&](double seconds) { return format_seconds(seconds / static_cast<double>(steps)); };
  std::string text = fmt::format("\n  {:<20} {:>12} {:>12} {:>8} {:>12}\n", "from rank to rank", "measured",
                                 "formula", "", "busy");
  for (int i = 0; i < kCommAxes; ++i) {
    const auto axis = static_cast<CommAxis>(i);
    if (!is_of_sharding(axis) && r.comm_formula[axis].calls == 0) continue;
    text += fmt::format(
        "  {:<20} {:>12} {:>12} {:>8} {:>12}\n", name_of(axis), format_bytes(r.comm[axis].sent / steps),
        format_bytes(r.comm_formula[axis].sent / steps),
        r.comm[axis] == r.comm_formula[axis] ? "exact" : "differs", per_step(r.comm_seconds[axis]));
  }
  const Straggler slowest = slowest_of(r.own_seconds), fastest = fastest_of(r.own_seconds);
  return text + fmt::format(
                    "  {:<20} without waits for others: rank {} {}, the slowest; rank {} {}, the fastest\n"
                    "  {:<20} {} a step\n",
                    fmt::format("{} ranks", r.own_seconds.size()), slowest.rank, per_step(slowest.seconds),
                    fastest.rank, per_step(fastest.seconds), "waits for batches", per_step(r.loader_seconds));
}

// How long the stages of a pipeline worked and waited.
std::string pipeline_text(const RunSummary& r, const Layout& layout) {
  std::string text = fmt::format("  {:<20}", fmt::format("{} stages", r.stage_seconds.size()));
  for (std::size_t i = 0; i < r.stage_seconds.size(); ++i) {
    const double steps = static_cast<double>(std::max<std::int64_t>(1, r.steps));
    text += fmt::format("{}stage {} {}", i == 0 ? " " : ", ", i, format_seconds(r.stage_seconds[i] / steps));
  }
  text += fmt::format(" a step\n  {:<20} {:.1f}% of the step time measured, {:.1f}% by formula\n", "bubble",
                      100 * r.bubble(), 100 * r.bubble_formula);
  const auto even = layers_by_time(layout.options.pipeline_shape(), layout.first_layer, r.stage_seconds);
  if (even.empty()) return text;
  return text + fmt::format("  {:<20} by these times, parallel.stage_layers=[{}] would be more even\n", "",
                            fmt::join(even, ","));
}

// The rate of a step's mixture of reads and writes, in bytes per second, as the bound assumes it.
double mixed_rate(const Roofs& roofs, const LinkBytes& t) {
  const double seconds = nvme_seconds(roofs, t.nvme_read(), t.nvme_write(), 0);
  return seconds > 0 ? static_cast<double>(t.nvme_read() + t.nvme_write()) / seconds : 0;
}

}  // namespace

std::string stall_text(const StallTimes& stall, double seconds, int decimals, double least) {
  std::string text;
  for (int i = 0; i < kStallCauses; ++i) {
    const auto cause = static_cast<StallCause>(i);
    const double percent = 100 * stall[cause] / seconds;
    const bool of_ranks = cause == StallCause::kGathers || cause == StallCause::kRanks ||
                          cause == StallCause::kStages || cause == StallCause::kParts;
    if (percent < least || (of_ranks && percent == 0)) continue;
    text += fmt::format("{}{} {:.{}f}", text.empty() ? "" : ", ", name_of(cause), percent, decimals);
  }
  return text;
}

std::string progress_line(const StepRecord& r, std::int64_t steps, double eta_seconds,
                          double tokens_per_second) {
  const StepResult& s = r.result;
  const std::string skipped =
      s.skipped ? fmt::format("  skipped: gradients overflow at loss scale {:g}", r.loss_scale.value_or(1))
                : "";
  const std::string ranks = r.ranks() > 1 ? fmt::format("  {} ranks, gathers {:.0f}%", r.ranks(),
                                                        100 * s.stall_for[StallCause::kGathers] / s.seconds)
                                          : "";
  // Causes below the last digit are not shown.
  const std::string causes = stall_text(s.stall_for, s.seconds, 0, 0.5);
  return fmt::format(
      "step {}/{}  loss {:.4f}{}  {:.0f} tokens/s  ETA {}  nvme r {} w {}  h2d {}  d2h {}{}  stall {:.0f}%{}",
      r.step, steps, s.loss, skipped, tokens_per_second, format_seconds(eta_seconds),
      format_bytes(s.traffic.nvme_read()), format_bytes(s.traffic.nvme_write()),
      format_bytes(s.traffic[kToDevice]), format_bytes(s.traffic[kToHost]), ranks, 100 * s.stall / s.seconds,
      causes.empty() ? "" : " (" + causes + ")");
}

std::string plan_report(const Trainer& trainer) {
  const RunPlan& plan = trainer.plan();
  const LinkBytes t = trainer.totals().per_step;
  const Budgets& peak = trainer.totals().peak;
  std::string text = fmt::format(
      "{}\nit fits: peak device {}, host {}\nbytes per step: nvme read {}, nvme write {}, host->device {}, "
      "device->host {}",
      trainer.describe(), format_bytes(peak.device), format_bytes(peak.host), format_bytes(t.nvme_read()),
      format_bytes(t.nvme_write()), format_bytes(t[kToDevice]), format_bytes(t[kToHost]));
  if (plan.resident.direct) {
    text += fmt::format("; of the nvme bytes past the host: read {}, written {}",
                        format_bytes(t[kDirectRead]), format_bytes(t[kDirectWrite]));
  }
  if (trainer.ranks() > 1) {
    text += "\nbytes per step from rank to rank:";
    for (int i = 0; i < kCommAxes; ++i) {
      const auto axis = static_cast<CommAxis>(i);
      if (!is_of_sharding(axis) && trainer.totals().comm[axis].calls == 0) continue;
      text += fmt::format("{} {} {}", i == 0 ? "" : ",", name_of(axis),
                          format_bytes(trainer.totals().comm[axis].sent));
    }
  }
  text += "\n";
  if (plan.layout->options.is_pipeline()) {
    text +=
        plan.layout->options.in_halves()
            ? "a step, if each forward takes one unit of time and each half of a backward, too (a3: forward "
              "of micro-batch 3; A3: the gradient of its input; W3: those of the weights):\n"
            : "a step, if each forward takes one unit of time and each backward two (a3: forward of "
              "micro-batch 3 through the first chunk; A3: its backward):\n";
    text += drawing_of(plan.layout->options.pipeline_shape());
  }
  return text;
}

std::string final_report(const RunSummary& r, Trainer& trainer) {
  const Roofs& roofs = r.roofs;
  const RunPlan& plan = trainer.plan();
  const LinkBytes planned = trainer.totals().per_step;
  const Budgets budgets = trainer.totals().budgets;
  const Bound bound = bound_of(roofs, plan.flops_per_step(), planned);
  io::Engine* io = trainer.node().io();
  std::string t = fmt::format("\n{} steps in {}, median step {}, {:.0f} tokens/s\n", r.steps,
                              format_seconds(r.seconds), format_seconds(r.median_step), r.tokens_per_second);
  t += fmt::format("\n  {:<20} {:>12} {:>12} {:>8}\n", "tier", "peak", "budget", "used");
  t += budget_row("device", r.peak_device, budgets.device);
  t += budget_row("host", r.peak_host, budgets.host);
  const std::int64_t nvme = trainer.totals().nvme;
  if (io != nullptr && nvme > 0) t += budget_row("nvme", nvme, r.nvme_files);
  const int processes = trainer.processes().count();
  t += budget_row(processes == 1 ? "process (resident)" : "processes (resident)", r.peak_resident,
                  budgets.device + budgets.host + processes * kProcessOverhead);
  t += wear_text(io);
  const auto per_step = [&](std::int64_t bytes) { return bytes / std::max<std::int64_t>(1, r.steps); };
  t += fmt::format("\n  {:<20} {:>12} {:>12} {:>8} {:>12}\n", "link, bytes per step", "measured", "formula",
                   "", "at its roof");
  const auto row = [&](const char* name, double roof, const auto& bytes_of) {
    const std::int64_t measured = bytes_of(r.measured), formula = bytes_of(r.formula);
    t += fmt::format("  {:<20} {:>12} {:>12} {:>8} {:>12}\n", name, format_bytes(per_step(measured)),
                     format_bytes(per_step(formula)), measured == formula ? "exact" : "differs",
                     roof > 0 ? format_seconds(static_cast<double>(bytes_of(planned)) / roof) : "-");
  };
  const auto over = [](Link link) { return [link](const LinkBytes& bytes) { return bytes[link]; }; };
  row("nvme read", roofs.nvme_read, [](const LinkBytes& bytes) { return bytes.nvme_read(); });
  row("nvme write", roofs.nvme_write, [](const LinkBytes& bytes) { return bytes.nvme_write(); });
  row("host -> device", roofs.host_to_device, over(kToDevice));
  row("device -> host", roofs.device_to_host, over(kToHost));
  if (r.formula[kDirectRead] + r.formula[kDirectWrite] > 0) {
    row("nvme -> device", roofs.nvme_read, over(kDirectRead));
    row("device -> nvme", roofs.nvme_write, over(kDirectWrite));
  }
  if (r.own_seconds.size() > 1) t += ranks_text(r);
  if (!r.stage_seconds.empty()) t += pipeline_text(r, *plan.layout);
  const double all = std::max(1e-9, r.step_seconds);
  t += fmt::format("\n  stall                {:.1f}% of the step time: {}\n", 100 * r.stall.total() / all,
                   stall_text(r.stall, all, 1, 0));
  t += fmt::format("  eta                  {:.2f} = T_bound {} / T_measured {}, bound by {}\n",
                   bound.seconds / r.median_step, format_seconds(bound.seconds),
                   format_seconds(r.median_step), bound.by);
  t += fmt::format(
      "                       (roofs measured here{}: {:.0f} GFLOP/s{})\n",
      r.raised ? ", raised to what steps reached" : "", roofs.flops / 1e9,
      roofs.nvme_read > 0
          ? fmt::format(", nvme {} read, {} write, {} in the step's mixture", format_rate(roofs.nvme_read),
                        format_rate(roofs.nvme_write), format_rate(mixed_rate(roofs, planned)))
          : "");
  t += fmt::format("  training loss        {:.4f} -> {:.4f}\n", r.first_loss, r.last_loss);
  if (r.routers.experts > 0) {
    t += fmt::format(
        "  experts              largest load {:.2f} of its layer's mean, {} of {} idle, in the last step\n",
        r.routers.largest, r.routers.idle, r.routers.experts);
  }
  if (r.loss_scale) {
    t += fmt::format(
        "  skipped steps        {} of {}, their gradients overflowed; the loss scale is {:g} now\n",
        r.skipped, trainer.first_step() + r.steps, *r.loss_scale);
  }
  if (r.val_loss) t += fmt::format("  validation loss      {:.4f}\n", *r.val_loss);
  return t;
}

}  // namespace zg
