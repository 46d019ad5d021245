// A program carried out on paper: its decisions without its bytes. What a plan, a forecast and a replay rest on.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "ziggurat/store/residency.hpp"

namespace zg {

// What happens beside the decisions. Both are called for every operation.
class DryRunObserver {
 public:
  virtual ~DryRunObserver() = default;
  virtual std::optional<NoRoom> before(std::int32_t op) = 0;
  virtual void after(std::int32_t op, std::span<const Action> moves) = 0;
};

// Decides all operations of `program`. On failure `failed_op`, if given, is the operation that found no room; the
// state is unusable then.
std::optional<NoRoom> dry_run(Residency& residency, const Program& program, DryRunObserver* observer = nullptr,
                              std::int32_t* failed_op = nullptr);

// The smallest budgets for which `fits` holds: first the device's, with as much host memory as there is use for,
// then the host's with `device` bytes (or the smallest, if that is more) of device memory. Nothing if no budgets
// do. Found by bisection from `least` up, in steps of what charges are multiples of, as if more memory never made
// a run fail; that it does is rare.
std::optional<Budgets> smallest_budgets(const TensorTable& table, const Budgets& least, std::int64_t device,
                                        bool direct, const std::function<bool(const Budgets&)>& fits);

// What no budget may be below: the bytes that one operation of the programs holds at each tier.
Budgets largest_operation(const TensorTable& table, std::span<const Program* const> programs);

}  // namespace zg
