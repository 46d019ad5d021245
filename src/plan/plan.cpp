#include "ziggurat/plan/plan.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {
namespace {

// Puts the state where Engine::initialize leaves it, by the same accesses in the same order.
class Load {
 public:
  Load(const Layout& layout, Residency& residency) : table_(layout.table), residency_(residency) {}

  std::optional<NoRoom> run(const std::vector<Layout::UnitTensors>& units) {
    for (const auto& unit : units) {
      const SegmentId weight = table_.tensor(unit.weight).first_segment;
      held_.reset();
      if (auto failure = overwrite(weight)) return failure;
      held_ = {weight, residency_.present(weight, Tier::kHost) ? Tier::kHost : Tier::kDevice};
      for (std::int32_t i = 0; i < table_.tensor(unit.master).segments; ++i) {
        for (const TensorId tensor : {unit.master, unit.m, unit.v}) {
          if (auto failure = overwrite(table_.tensor(tensor).first_segment + i)) return failure;
        }
      }
    }
    actions_.clear();
    residency_.sink(actions_);
    return std::nullopt;
  }

 private:
  // At the host, or in the device what the host has no room for.
  std::optional<NoRoom> overwrite(SegmentId id) {
    const bool at_host = table_.segment(id).lowest != Tier::kDevice;
    auto failure = overwrite_at(id, at_host ? Tier::kHost : Tier::kDevice);
    if (failure && at_host && !overwrite_at(id, Tier::kDevice)) return std::nullopt;
    return failure;
  }
  std::optional<NoRoom> overwrite_at(SegmentId id, Tier tier) {
    actions_.clear();
    const auto held = [this](SegmentId other, Tier at) { return held_ && held_->first == other && held_->second == at; };
    return residency_.decide_free({id, tier, Access::kOverwrite, false}, held, actions_);
  }

  const TensorTable& table_;
  Residency& residency_;
  std::optional<std::pair<SegmentId, Tier>> held_;  // the weight whose state is being loaded
  std::vector<Action> actions_;
};

std::optional<NoRoom> load(const Layout& layout, Residency& residency) { return Load(layout, residency).run(layout.units); }

}  // namespace

Plan make_plan(const Layout& layout, const StepPrograms& programs, const Budgets& budgets) {
  Plan plan;
  Residency residency(layout.table, budgets);
  if ((plan.obstacle = load(layout, residency))) return plan;
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
  const bool loaded = !load(layout, residency);
  ZG_ASSERT(loaded, "the plan of this run said that it fits");
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
  const std::int64_t everything = layout.table.total_charge();
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
