#include "ziggurat/store/dry_run.hpp"

#include <algorithm>

namespace zg {
namespace {

// Searches the smallest budget that fits, between a lower bound and the budget that holds everything.
class Search {
 public:
  using Test = std::function<bool(std::int64_t)>;

  Search(std::int64_t least, std::int64_t everything, std::int64_t step)
      : low_(least), everything_(everything), step_(step) {}

  std::optional<std::int64_t> smallest(const Test& fits) {
    if (fits(low_)) return low_;
    if (!fits(everything_)) return std::nullopt;
    return between(low_, everything_, fits, kNoLimit);
  }

  // The same for an expensive `fits`: the cheap test `may` gives the budget at which the search begins.
  std::optional<std::int64_t> smallest(const Test& may, const Test& fits, int most) {
    const std::optional<std::int64_t> from = smallest(may);
    if (!from || fits(*from)) return from;
    // It is seldom far from there.
    std::int64_t stride = most == kNoLimit ? step_ : (*from / 64 + step_) / step_ * step_;
    for (std::int64_t low = *from; low < everything_; stride *= 2) {
      const std::int64_t next = std::min(low + stride, everything_);
      --most;
      if (fits(next)) return between(low, next, fits, most);
      low = next;
    }
    return std::nullopt;
  }

 private:
  static constexpr int kNoLimit = FitTests::kNoLimit;

  std::int64_t between(std::int64_t low, std::int64_t high, const Test& fits, int most) const {
    for (; high - low > step_ && most > 0; --most) {
      const std::int64_t middle = low + (high - low) / (2 * step_) * step_;
      (fits(middle) ? high : low) = middle;
    }
    return high;
  }

  std::int64_t low_, everything_, step_;
};

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
                                        bool direct, const FitTests& tests) {
  constexpr std::int64_t kPage = 4096;
  const std::int64_t granule = table.device_granule();
  const Budgets everything{table.total_charge(Tier::kDevice), table.total_charge(Tier::kHost)};
  // `budgets`: as a function of the bytes in question.
  const auto search = [&](Search in, auto&& budgets) {
    const auto fits = [&](std::int64_t bytes) { return tests.fits(budgets(bytes)); };
    if (!tests.may_fit) return in.smallest(fits);
    return in.smallest([&](std::int64_t bytes) { return tests.may_fit(budgets(bytes)); }, fits, tests.most);
  };
  const auto least_device = search({least.device, everything.device, granule}, [&](std::int64_t bytes) {
    return Budgets{bytes, everything.host, direct};
  });
  if (!least_device) return std::nullopt;
  const std::int64_t d = std::max(device / granule * granule, *least_device);
  const auto least_host = search({least.host, everything.host, kPage}, [&](std::int64_t bytes) {
    return Budgets{d, bytes, direct};
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
