// What differs for some parameters in an update. A plain value.
#pragma once
#include <optional>

namespace zg {

struct GroupRule {
  double lr_factor = 1;
  std::optional<double> weight_decay;  // none: the rule's, on matrices only unless decay_all
};

}  // namespace zg
