// How the update of one group of parameters differs from that of the others. A plain value.
#pragma once
#include <optional>

namespace zg {

struct GroupRule {
  double lr_factor = 1;  // multiplies the learning rate
  // None: the optimizer's, which holds for matrices alone unless decay_all.
  std::optional<double> weight_decay;
};

}  // namespace zg
