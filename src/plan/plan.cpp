#include "ziggurat/plan/plan.hpp"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <set>
#include <utility>
#include <vector>

#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/step/pinned_weights.hpp"
#include "ziggurat/store/dry_run.hpp"

namespace zg {
namespace {

// A dry run of a training run.
struct PaperRun {
  PaperRun(const Layout& l, const StepPrograms& programs, const Budgets& budgets)
      : layout(&l), residency(l.table, budgets), sequence(programs) {}

  std::optional<NoRoom> run(Activity activity) {
    sequence.begin(activity);
    std::vector<Action> ignored;
    if (activity == Activity::kAdopt) {
      for (const SegmentId id : pinned_segments(*layout)) residency.assume_content(id, Tier::kNvme);
    }
    while (const auto start = sequence.next()) {
      ++programs_run;
      if (auto failure = dry_run(residency, start->program->program)) return failure;
    }
    if (activity == Activity::kInitialize || activity == Activity::kAdopt) residency.demote_all(ignored);
    if (activity != Activity::kPin) return std::nullopt;
    for (const SegmentId id : pinned_segments(*layout)) {
      if (auto failure = residency.write_back(id, ignored)) return failure;
    }
    return std::nullopt;
  }

  const Layout* layout;
  Residency residency;
  ProgramSequence sequence;
  int programs_run = 0;
};

constexpr int kMostPrograms = 96;  // most programs that explore() dry-runs

// Dry-runs the activities of a training run in every possible order, from every placement of copies that
// results: whether a program fits depends on where copies are when it starts, and so on the programs that ran
// before. A training loop soon repeats itself, so there are few placements; otherwise the search is cut off,
// after the common orders.
std::optional<NoRoom> explore(PaperRun start, Budgets& peak) {
  std::deque<PaperRun> waiting;
  waiting.push_back(std::move(start));
  std::set<std::pair<std::uint64_t, ProgramSequence>> known;
  for (int programs = 0; programs < kMostPrograms && !waiting.empty();) {
    const PaperRun now = std::move(waiting.front());
    waiting.pop_front();
    if (!known.emplace(now.residency.copies().fingerprint(), now.sequence).second) continue;
    for (const Activity activity : now.sequence.followers()) {
      PaperRun after = now;
      after.programs_run = 0;
      if (auto failure = after.run(activity)) return failure;
      programs += after.programs_run;
      peak.device = std::max(peak.device, after.residency.copies().peak(Tier::kDevice));
      peak.host = std::max(peak.host, after.residency.copies().peak(Tier::kHost));
      waiting.push_back(std::move(after));
    }
  }
  return std::nullopt;
}

}  // namespace

Plan make_plan(const Layout& layout, const StepPrograms& programs, const Budgets& budgets) {
  Plan plan;
  PaperRun run(layout, programs, budgets);
  if ((plan.obstacle = run.run(Activity::kInitialize))) return plan;
  if ((plan.obstacle = explore(run, plan.peak))) return plan;
  plan.fits = true;
  plan.comm_per_step = zg::comm_per_step(layout, programs);
  // The steady state is reached after a few steps. Where copies are as before the step, it has been reached.
  for (int i = 0; i < 4; ++i) {
    const auto state = std::pair(run.residency.copies().fingerprint(), run.sequence);
    const LinkBytes before = run.residency.copies().traffic();
    plan.obstacle = run.run(Activity::kStep);
    ZG_ASSERT(!plan.obstacle, "the plan of this run said that it fits");
    plan.per_step = run.residency.copies().traffic() - before;
    if (std::pair(run.residency.copies().fingerprint(), run.sequence) == state) break;
  }
  return plan;
}

LinkBytes forecast(const Layout& layout, const StepPrograms& programs, const Budgets& budgets,
                   const History& history) {
  PaperRun run(layout, programs, budgets);
  LinkBytes total;
  for (const auto& [activity, times] : history) {
    for (std::int64_t i = 0; i < times; ++i) {
      const auto state = std::pair(run.residency.copies().fingerprint(), run.sequence);
      const LinkBytes before = run.residency.copies().traffic();
      const auto failure = run.run(activity);
      ZG_ASSERT(!failure, "the plan of this run said that it fits");
      if (activity == Activity::kInitialize || activity == Activity::kAdopt) continue;  // not counted
      const LinkBytes moved = run.residency.copies().traffic() - before;
      total += moved;
      if (std::pair(run.residency.copies().fingerprint(), run.sequence) != state) continue;
      // The placement of copies is the same as before, so all further repetitions move the same bytes.
      for (++i; i < times; ++i) total += moved;
    }
  }
  return total;
}

Budgets read_ahead_of(const TensorTable& table, const StepPrograms& programs, const Budgets& budgets,
                      const Budgets& in_flight) {
  Budgets largest;
  for (const StepProgram* p : programs.computing()) {
    for (std::int32_t op = 0; op < p->program.op_count(); ++op) {
      std::int64_t device = 0, host = 0;
      for (const AccessStep& a : p->program.op(op)) {
        const Segment& segment = table.segment(a.segment);
        // Bytes that the device reads from NVMe pass through host memory.
        const bool passes = a.access == Access::kRead && segment.lowest == Tier::kNvme && !budgets.direct;
        if (a.tier == Tier::kDevice) device += segment.device_charge;
        if (a.tier == Tier::kHost || passes) host += segment.charge;
      }
      largest.device = std::max(largest.device, device);
      largest.host = std::max(largest.host, host);
    }
  }
  return {std::min(budgets.device / 4, in_flight.device + largest.device),
          std::min(budgets.host / 4, in_flight.host + largest.host)};
}

std::optional<Budgets> smallest_budgets(const Layout& layout, const StepPrograms& programs,
                                        std::int64_t device, bool direct) {
  FitTests tests;
  tests.fits = [&](const Budgets& budgets) { return make_plan(layout, programs, budgets).fits; };
  // Every run begins with these programs. Testing the other orders, too, takes thirty times as long.
  tests.may_fit = [&](const Budgets& budgets) {
    PaperRun run(layout, programs, budgets);
    return !run.run(Activity::kInitialize) && !run.run(Activity::kStep) && !run.run(Activity::kStep);
  };
  // A model of a hundred layers in tiles has a million accesses per step, and the answer should take seconds.
  constexpr std::int64_t kAccesses = 1 << 24;
  const std::int64_t of_a_plan = kMostPrograms * programs.step.program.access_count();
  if (of_a_plan > kAccesses / 64)
    tests.most = static_cast<int>(std::max<std::int64_t>(1, kAccesses / of_a_plan));
  return smallest_budgets(layout.table, {}, device, direct, tests);
}

namespace {

double time_of(double amount, double speed) {
  return speed > 0 ? amount / speed : 0.0;
}

}  // namespace

double nvme_seconds(const Roofs& roofs, std::int64_t read, std::int64_t written, std::int64_t first_written) {
  const auto reads = static_cast<double>(read), writes = static_cast<double>(written);
  const double first = time_of(static_cast<double>(first_written), roofs.nvme_first_write) -
                       time_of(static_cast<double>(first_written), roofs.nvme_write);
  const double extra = roofs.nvme_first_write > 0 ? std::max(0.0, first) : 0.0;
  const double read_alone = time_of(reads, roofs.nvme_read), write_alone = time_of(writes, roofs.nvme_write);
  if (roofs.nvme_mixed <= 0 || reads == 0 || writes == 0) return read_alone + write_alone + extra;
  const double share = roofs.nvme_mixed_reads;
  const double mixed = std::min(reads / share, writes / (1 - share));
  const double seconds = mixed / roofs.nvme_mixed + time_of(reads - share * mixed, roofs.nvme_read) +
                         time_of(writes - (1 - share) * mixed, roofs.nvme_write);
  return std::max({seconds, read_alone, write_alone}) + extra;
}

Bound bound_of(const Roofs& roofs, double flops, const LinkBytes& traffic, std::int64_t first_written) {
  Bound b;
  b.compute = time_of(flops, roofs.flops);
  // Bytes on the direct link also use the device's own link.
  b.host_to_device =
      time_of(static_cast<double>(traffic[kToDevice] + traffic[kDirectRead]), roofs.host_to_device);
  b.device_to_host =
      time_of(static_cast<double>(traffic[kToHost] + traffic[kDirectWrite]), roofs.device_to_host);
  b.nvme = nvme_seconds(roofs, traffic.nvme_read(), traffic.nvme_write(), first_written);
  b.seconds = b.compute;
  b.by = "compute";
  const auto consider = [&b](double seconds, const char* name) {
    if (seconds > b.seconds) b.seconds = seconds, b.by = name;
  };
  consider(b.nvme, "nvme");
  consider(b.host_to_device, "host->device");
  consider(b.device_to_host, "device->host");
  return b;
}

bool raise_to(Roofs& roofs, const Bound& bound, double seconds) {
  bool any = false;
  const auto raise = [&](double link, std::initializer_list<double*> rates) {
    if (seconds <= 0 || link <= seconds) return;
    for (double* rate : rates) *rate *= link / seconds;
    any = true;
  };
  raise(bound.compute, {&roofs.flops});
  raise(bound.host_to_device, {&roofs.host_to_device});
  raise(bound.device_to_host, {&roofs.device_to_host});
  raise(bound.nvme, {&roofs.nvme_read, &roofs.nvme_write, &roofs.nvme_mixed, &roofs.nvme_first_write});
  return any;
}

}  // namespace zg
