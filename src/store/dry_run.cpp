#include "ziggurat/store/dry_run.hpp"

#include <algorithm>

namespace zg {
namespace {

std::optional<std::int64_t> search(std::int64_t low, std::int64_t high, std::int64_t step,
                                   const std::function<bool(std::int64_t)>& does) {
  if (does(low)) return low;
  if (!does(high)) return std::nullopt;
  while (high - low > step) {
    const std::int64_t middle = low + (high - low) / (2 * step) * step;
    (does(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace

std::optional<NoRoom> dry_run(Residency& residency, const Program& program, DryRunObserver* observer,
                              std::int32_t* failed_op) {
  std::vector<Action> moves;
  residency.set_future(&program, nullptr);  // what comes next changes no decision (residency.hpp)
  for (std::int32_t op = 0; op < program.op_count(); ++op) {
    moves.clear();
    std::optional<NoRoom> failure = observer != nullptr ? observer->before(op) : std::nullopt;
    if (!failure) failure = residency.decide(0, op, moves);
    if (failure) {
      if (failed_op != nullptr) *failed_op = op;
      return failure;
    }
    if (observer != nullptr) observer->after(op, moves);
  }
  return std::nullopt;
}

std::optional<Budgets> smallest_budgets(const TensorTable& table, const Budgets& least, std::int64_t device,
                                        bool direct, const std::function<bool(const Budgets&)>& fits) {
  constexpr std::int64_t kPage = 4096;
  const std::int64_t granule = table.device_granule();
  const Budgets everything{table.total_charge(Tier::kDevice), table.total_charge(Tier::kHost)};
  const auto least_device = search(least.device, everything.device, granule, [&](std::int64_t d) {
    return fits({d, everything.host, direct});
  });
  if (!least_device) return std::nullopt;
  const std::int64_t d = std::max(device / granule * granule, *least_device);
  const auto least_host = search(least.host, everything.host, kPage, [&](std::int64_t h) {
    return fits({d, h, direct});
  });
  if (!least_host) return std::nullopt;
  return Budgets{*least_device, *least_host, direct};
}

Budgets largest_operation(const TensorTable& table, std::span<const Program* const> programs) {
  Budgets largest;
  for (const Program* program : programs) {
    for (std::int32_t op = 0; op < program->op_count(); ++op) {
      Budgets held;
      for (const AccessStep& a : program->op(op)) {
        (a.tier == Tier::kDevice ? held.device : held.host) += table.segment(a.segment).charge_at(a.tier);
      }
      largest = {std::max(largest.device, held.device), std::max(largest.host, held.host)};
    }
  }
  return largest;
}

}  // namespace zg
