// What a store was asked for, so that policies and budgets can be compared without moving a byte.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/store/program.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

struct AccessTrace {
  TensorTable table{0};
  Budgets budgets;                      // of the store that it was recorded from
  std::vector<Program> programs;        // finished; each step that was unlike those before
  std::vector<std::int32_t> sequence;   // indices into programs, in the order in which they ran
};

}  // namespace zg
