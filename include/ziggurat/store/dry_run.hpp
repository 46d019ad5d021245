// A dry run of a program: the store's decisions without its bytes. Plan, forecast and replay are built on it.
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "ziggurat/store/residency.hpp"

namespace zg {

// Both functions are called for every operation of a dry run. before() may end it.
class DryRunObserver {
 public:
  virtual ~DryRunObserver() = default;
  virtual std::optional<NoRoom> before(std::int32_t op) = 0;
  virtual void after(std::int32_t op, std::span<const Action> moves) = 0;
};

// Decides all operations of `program`. On failure `failed_op`, if given, is set to the operation that found
// no room, and `residency` is unusable.
std::optional<NoRoom> dry_run(Residency& residency, const Program& program,
                              DryRunObserver* observer = nullptr, std::int32_t* failed_op = nullptr);

// How smallest_budgets() asks whether a run fits.
struct FitTests {
  static constexpr int kNoLimit = std::numeric_limits<int>::max();

  std::function<bool(const Budgets&)> fits;
  // A test that costs less, and that all budgets pass for which `fits` holds: then `fits` is asked only near
  // the answer.
  std::function<bool(const Budgets&)> may_fit = {};
  // With may_fit: after so many times at each tier, about, the answer is good enough. It fits, and is at most
  // a few hundredths above the smallest.
  int most = kNoLimit;
};

// The smallest budgets for which the run fits; nothing if there are none. First the smallest device budget,
// with host memory for everything; then the smallest host budget, with `device` bytes of device memory or the
// smallest device budget, whichever is more. Found by bisection from `least` upwards, in steps of the page
// and the device's granule. Bisection takes for granted that a run that fits still fits with more memory;
// exceptions are rare.
std::optional<Budgets> smallest_budgets(const TensorTable& table, const Budgets& least, std::int64_t device,
                                        bool direct, const FitTests& tests);

// At each tier, the most bytes that one operation of the programs holds. No smaller budget can do.
Budgets largest_operation(const TensorTable& table, std::span<const Program* const> programs);

}  // namespace zg
