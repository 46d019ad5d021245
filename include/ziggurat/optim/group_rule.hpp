// How the update of one group of parameters differs from the update of the others. A plain value.
#pragma once
#include <optional>

namespace zg {

struct GroupRule {
  double lr_factor = 1;  // multiplies the learning rate
  // None: the optimizer's weight decay, which applies only to matrices unless decay_all is set.
  std::optional<double> weight_decay;
};

}  // namespace zg
