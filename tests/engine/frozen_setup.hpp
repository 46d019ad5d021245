// Runs of which a part is not trained.
#pragma once
#include <cstddef>
#include <vector>

#include "engine/tiny_run.hpp"

namespace zg::test {

// The groups of a model of which frozen(unit, index of the parameter) is not trained.
template <class F>
std::vector<std::vector<int>> freeze(const TinySetup& s, const F& frozen) {
  std::vector<std::vector<int>> groups;
  const Model model(s.model, s.dtype, host_ops());
  for (std::size_t u = 0; u < model.units().size(); ++u) {
    groups.emplace_back();
    for (std::size_t i = 0; i < model.units()[u].params.size(); ++i)
      groups.back().push_back(frozen(u, i) ? kFrozen : 0);
  }
  return groups;
}

inline TinySetup tiny(const ModelConfig& model, const NamedFormat& format) {
  TinySetup s;
  s.model = model;
  s.dtype = format.dtype;
  s.layout.state = format.format;
  s.clip = 1e30;
  return s;
}

}  // namespace zg::test
