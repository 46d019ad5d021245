#include "ziggurat/plan/plan.hpp"

#include <algorithm>
#include <vector>

#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {
namespace {

std::int64_t total_charge(const TensorTable& table) {
  std::int64_t sum = 0;
  for (std::int32_t id = 0; id < table.segment_count(); ++id) sum += table.segment(id).charge;
  return sum;
}

// Where the state is when training starts: as low as it may be, and higher what does not fit there.
std::optional<NoRoom> place_segment(const TensorTable& table, SegmentId id, const Budgets& budgets, Residency& residency) {
  const Segment& s = table.segment(id);
  if (s.lowest == Tier::kNvme) {
    residency.assume_content(id, Tier::kNvme);
  } else if (s.lowest == Tier::kHost && residency.used(Tier::kHost) + s.charge <= budgets.host) {
    residency.assume_content(id, Tier::kHost);
  } else if (residency.used(Tier::kDevice) + s.charge <= budgets.device) {
    residency.assume_content(id, Tier::kDevice);
  } else {
    return NoRoom{s.lowest, s.charge, id};
  }
  return std::nullopt;
}

// Where the state is when training starts, as Engine::initialize leaves it: as low as it may be, and higher what
// does not fit there.
std::optional<NoRoom> place(const Layout& layout, const Budgets& budgets, Residency& residency) {
  const TensorTable& table = layout.table;
  for (const auto& unit : layout.units) {
    if (auto failure = place_segment(table, layout.whole(unit.weight), budgets, residency)) return failure;
    for (std::int32_t i = 0; i < table.tensor(unit.master).segments; ++i) {
      for (const TensorId tensor : {unit.master, unit.m, unit.v}) {
        if (auto failure = place_segment(table, table.tensor(tensor).first_segment + i, budgets, residency)) return failure;
      }
    }
  }
  return std::nullopt;
}

// Loading needs a unit's weight and a segment of its state at the host at once.
std::optional<NoRoom> room_to_load(const Layout& layout, const Budgets& budgets) {
  for (const auto& unit : layout.units) {
    const Segment& weight = layout.table.segment(layout.whole(unit.weight));
    const Segment& state = layout.table.segment(layout.table.tensor(unit.master).first_segment);
    const auto host_share = [](const Segment& s) { return s.lowest == Tier::kDevice ? 0 : s.charge; };
    const std::int64_t needed = host_share(weight) + host_share(state);
    if (needed > budgets.host && layout.table.drives() > 0) {
      return NoRoom{Tier::kHost, needed, layout.whole(unit.weight)};
    }
  }
  return std::nullopt;
}

}  // namespace

Plan make_plan(const Layout& layout, const StepPrograms& programs, const Budgets& budgets) {
  Plan plan;
  Residency residency(layout.table, budgets);
  if ((plan.obstacle = room_to_load(layout, budgets)) || (plan.obstacle = place(layout, budgets, residency))) return plan;
  std::vector<Action> moves;
  const auto run = [&](const StepProgram& program, const StepProgram* next) {
    residency.set_future(&program.program, next != nullptr ? &next->program : nullptr);
    for (std::int32_t op = 0; op < program.program.op_count() && !plan.obstacle; ++op) {
      moves.clear();
      plan.obstacle = residency.decide(0, op, moves);
    }
    return !plan.obstacle;
  };
  const bool deferred = programs.timing == UpdateTiming::kDeferred;
  const StepProgram *step = &programs.step, *after = deferred ? &programs.flush : nullptr;
  if (!run(programs.first, step) || !run(*step, step) || !run(*step, step)) return plan;
  const Traffic before = residency.traffic();
  if (!run(*step, step)) return plan;
  plan.per_step = residency.traffic() - before;
  if (!run(*step, after) || (deferred && !run(programs.flush, nullptr))) return plan;
  if (!run(programs.evaluate, &programs.evaluate) || !run(programs.evaluate, nullptr)) return plan;
  if (!run(programs.first, step) || !run(*step, step)) return plan;
  plan.fits = true;
  plan.peak = {residency.peak(Tier::kDevice), residency.peak(Tier::kHost)};
  return plan;
}

Traffic forecast(const Layout& layout, const Budgets& budgets, const std::vector<ProgramRun>& history) {
  Residency residency(layout.table, budgets);
  ZG_ASSERT(!place(layout, budgets, residency));
  std::vector<Action> moves;
  Traffic total;
  for (const ProgramRun& run : history) {
    for (std::int64_t i = 0; i < run.times; ++i) {
      const std::uint64_t state = residency.fingerprint();
      const Traffic before = residency.traffic();
      residency.set_future(&run.program->program, run.next != nullptr ? &run.next->program : nullptr);
      for (std::int32_t op = 0; op < run.program->program.op_count(); ++op) {
        moves.clear();
        ZG_ASSERT(!residency.decide(0, op, moves));
      }
      const Traffic moved = residency.traffic() - before;
      total += moved;
      if (residency.fingerprint() != state) continue;
      // Nothing changed place: the rest of them move the same bytes again.
      for (++i; i < run.times; ++i) total += moved;
    }
  }
  return total;
}

std::optional<Budgets> smallest_budgets(const Layout& layout, const StepPrograms& programs, std::int64_t device) {
  const std::int64_t everything = total_charge(layout.table);
  // The smallest multiple of 4096 that fits; budgets are charged in such pages.
  const auto search = [&](auto&& fits) -> std::optional<std::int64_t> {
    std::int64_t low = -4096, high = everything;
    if (!fits(high)) return std::nullopt;
    while (high - low > 4096) {
      const std::int64_t middle = low + (high - low) / 8192 * 4096;
      (fits(middle) ? high : low) = middle;
    }
    return high;
  };
  const auto least_device =
      search([&](std::int64_t d) { return make_plan(layout, programs, {d, everything}).fits; });
  if (!least_device) return std::nullopt;
  const std::int64_t d = std::max(device / 4096 * 4096, *least_device);
  const auto least_host = search([&](std::int64_t h) { return make_plan(layout, programs, {d, h}).fits; });
  if (!least_host) return std::nullopt;
  return Budgets{*least_device, *least_host};
}

Bound bound_of(const Roofs& roofs, double flops, const Traffic& traffic) {
  const auto time = [](double amount, double speed) { return speed > 0 ? amount / speed : 0.0; };
  Bound b;
  b.compute = time(flops, roofs.flops);
  b.host_to_device = time(static_cast<double>(traffic.host_to_device), roofs.host_to_device);
  b.device_to_host = time(static_cast<double>(traffic.device_to_host), roofs.device_to_host);
  const double read = time(static_cast<double>(traffic.nvme_read), roofs.nvme_read);
  const double write = time(static_cast<double>(traffic.nvme_write), roofs.nvme_write);
  b.nvme = roofs.nvme_half_duplex ? read + write : std::max(read, write);
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

}  // namespace zg
