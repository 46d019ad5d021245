#include "ziggurat/plan/plan.hpp"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <set>
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

  std::optional<NoRoom> run(const Layout& layout) {
    for (std::int32_t u = 0; u <= layout.head_unit(); ++u) {
      const Layout::UnitTensors& unit = layout.unit(u);
      const SegmentId weight = table_.tensor(unit.weight).first_segment;
      held_.reset();
      if (auto failure = overwrite(weight)) return failure;
      held_ = {weight, residency_.present(weight, Tier::kHost) ? Tier::kHost : Tier::kDevice};
      for (std::int32_t i = 0; i < layout.state_segments(u); ++i) {
        if (auto failure = overwrite(layout.state_segment(u, i))) return failure;
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
    const auto held = [this](SegmentId other, Tier at) {
      return held_ && held_->first == other && held_->second == at;
    };
    return residency_.decide_free({id, tier, Access::kOverwrite, false}, held, actions_);
  }

  const TensorTable& table_;
  Residency& residency_;
  std::optional<std::pair<SegmentId, Tier>> held_;  // the weight whose state is being loaded
  std::vector<Action> actions_;
};

std::optional<NoRoom> load(const Layout& layout, Residency& residency) {
  return Load(layout, residency).run(layout);
}

std::optional<NoRoom> run_program(Residency& residency, const StepProgram& program,
                                  const StepProgram* next = nullptr) {
  std::vector<Action> moves;
  // What comes next changes no decision (residency.hpp).
  residency.set_future(&program.program, next != nullptr ? &next->program : nullptr);
  for (std::int32_t op = 0; op < program.program.op_count(); ++op) {
    moves.clear();
    if (auto failure = residency.decide(0, op, moves)) return failure;
  }
  return std::nullopt;
}

// Runs the programs of a training run in every order in which they can follow each other, from every state of
// the tiers that this leads to: where content lies when a program starts, and so the past, decides whether it
// fits.
class Exploration {
 public:
  Exploration(const StepPrograms& programs, const Residency& start) : programs_(programs) {
    waiting_.push_back({start, Phase::kClean});
  }

  std::optional<NoRoom> run(Budgets& peak) {
    const bool early = programs_.timing == UpdateTiming::kEarly;
    const bool separate = programs_.timing == UpdateTiming::kSeparate;
    const StepProgram& first = early ? programs_.step : programs_.first;
    const StepProgram& after_pending = separate ? programs_.flush : programs_.step;
    // A training loop soon repeats itself, so the states are few; if they are not, the common ones come
    // first.
    for (int runs = 0; runs < kMostRuns && !waiting_.empty();) {
      const Node node = std::move(waiting_.front());
      waiting_.pop_front();
      if (!known_.insert({node.residency.fingerprint(), node.phase}).second) continue;
      const bool pending = node.phase == Phase::kPending;
      const Phase next = early || (separate && pending) ? Phase::kClean : Phase::kPending;
      const std::pair<const StepProgram*, Phase> followers[] = {
          {pending ? &after_pending : &first, next},
          {pending ? &programs_.flush : &programs_.evaluate, Phase::kClean}};
      for (const auto& [program, phase] : followers) {
        Residency after = node.residency;
        if (auto failure = run_program(after, *program)) return failure;
        peak.device = std::max(peak.device, after.peak(Tier::kDevice));
        peak.host = std::max(peak.host, after.peak(Tier::kHost));
        waiting_.push_back({std::move(after), phase});
        ++runs;
      }
    }
    return std::nullopt;
  }

 private:
  static constexpr int kMostRuns = 64;
  enum class Phase { kClean, kPending };  // pending: gradients wait for their update
  struct Node {
    Residency residency;
    Phase phase;
  };
  const StepPrograms& programs_;
  std::deque<Node> waiting_;
  std::set<std::pair<std::uint64_t, Phase>> known_;
};

}  // namespace

Plan make_plan(const Layout& layout, const StepPrograms& programs, const Budgets& budgets) {
  Plan plan;
  Residency residency(layout.table, budgets);
  if ((plan.obstacle = load(layout, residency))) return plan;
  if ((plan.obstacle = Exploration(programs, residency).run(plan.peak))) return plan;
  plan.fits = true;
  // What a step moves when the run is under way: the last of a few.
  std::vector<const StepProgram*> step{&programs.step};
  if (programs.timing == UpdateTiming::kSeparate) {
    step = {&programs.first, &programs.flush};
  } else {
    plan.obstacle = run_program(residency, programs.first);
  }
  for (int i = 0; i < 3; ++i) {
    const Traffic before = residency.traffic();
    for (const StepProgram* program : step) {
      plan.obstacle = run_program(residency, *program);
      ZG_ASSERT(!plan.obstacle, "the plan of this run said that it fits");
    }
    plan.per_step = residency.traffic() - before;
  }
  return plan;
}

Traffic forecast(const Layout& layout, const Budgets& budgets, const std::vector<ProgramRun>& history) {
  Residency residency(layout.table, budgets);
  const bool loaded = !load(layout, residency);
  ZG_ASSERT(loaded, "the plan of this run said that it fits");
  Traffic total;
  for (const ProgramRun& run : history) {
    for (std::int64_t i = 0; i < run.times; ++i) {
      const std::uint64_t state = residency.fingerprint();
      const Traffic before = residency.traffic();
      for (const ProgramRun::Part& part : run.parts) {
        if (part.program == nullptr) continue;
        const auto failure = run_program(residency, *part.program, part.next);
        ZG_ASSERT(!failure, "the plan of this run said that it fits");
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

Budgets read_ahead_of(const TensorTable& table, const StepPrograms& programs, const Budgets& budgets,
                      const Budgets& in_flight) {
  Budgets largest;
  for (const StepProgram* p : {&programs.first, &programs.step, &programs.flush, &programs.evaluate}) {
    for (std::int32_t op = 0; op < p->program.op_count(); ++op) {
      std::int64_t device = 0, host = 0;
      for (const AccessStep& a : p->program.op(op)) {
        const Segment& segment = table.segment(a.segment);
        // What is read in the device passes the host on its way from NVMe.
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
  // The smallest multiple that fits of what charges are multiples of.
  const auto search = [](std::int64_t step, std::int64_t high, auto&& fits) -> std::optional<std::int64_t> {
    std::int64_t low = -step;
    if (!fits(high)) return std::nullopt;
    while (high - low > step) {
      const std::int64_t middle = low + (high - low) / (2 * step) * step;
      (fits(middle) ? high : low) = middle;
    }
    return high;
  };
  constexpr std::int64_t kPage = 4096;
  const std::int64_t granule = layout.table.device_granule();
  const Budgets everything{layout.table.total_charge(Tier::kDevice), layout.table.total_charge(Tier::kHost)};
  const auto least_device = search(granule, everything.device, [&](std::int64_t d) {
    return make_plan(layout, programs, {d, everything.host, direct}).fits;
  });
  if (!least_device) return std::nullopt;
  const std::int64_t d = std::max(device / granule * granule, *least_device);
  const auto least_host = search(kPage, everything.host, [&](std::int64_t h) {
    return make_plan(layout, programs, {d, h, direct}).fits;
  });
  if (!least_host) return std::nullopt;
  return Budgets{*least_device, *least_host, direct};
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

Bound bound_of(const Roofs& roofs, double flops, const Traffic& traffic, std::int64_t first_written) {
  Bound b;
  b.compute = time_of(flops, roofs.flops);
  // What goes past the host takes the device's link all the same.
  b.host_to_device =
      time_of(static_cast<double>(traffic.host_to_device + traffic.direct_read), roofs.host_to_device);
  b.device_to_host =
      time_of(static_cast<double>(traffic.device_to_host + traffic.direct_write), roofs.device_to_host);
  b.nvme = nvme_seconds(roofs, traffic.nvme_read, traffic.nvme_write, first_written);
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
