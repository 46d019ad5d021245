// Runs made from the table of what can be combined: a choice on each axis, and the overrides that make it.
#pragma once
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/config/composition.hpp"

namespace zg {

// The number of the choice on each axis.
using Picks = std::vector<std::size_t>;

inline bool has_choice(const Exclusion::Side& side, std::size_t axis, std::size_t choice) {
  const Axis& a = composition_axes()[axis];
  if (std::strcmp(side.axis, a.name) != 0) return false;
  for (const char* name : side.choices) {
    if (std::strcmp(name, a.choices[choice].name) == 0) return true;
  }
  return false;
}

// Whether the table excludes the pair. Where numbers decide, the overrides have numbers that fit.
inline bool is_excluded(std::size_t axis1, std::size_t choice1, std::size_t axis2, std::size_t choice2) {
  for (const Exclusion& e : exclusions()) {
    if (e.numbers != nullptr) continue;
    if (has_choice(e.first, axis1, choice1) && has_choice(e.second, axis2, choice2)) return true;
    if (has_choice(e.first, axis2, choice2) && has_choice(e.second, axis1, choice1)) return true;
  }
  return false;
}

// Completes `picks`, whose axes below `axis` are decided, so that nothing is excluded but, maybe, the pair of
// the axes in `fixed`. `order` gives the choices of an axis in the order in which they are tried. False:
// there is no such run.
template <class Order>
bool complete(Picks& picks, const std::vector<std::optional<std::size_t>>& fixed, const Order& order,
              std::size_t axis = 0) {
  if (axis == fixed.size()) return true;
  const auto fits = [&](std::size_t choice) {
    for (std::size_t other = 0; other < fixed.size(); ++other) {
      const bool decided = other < axis || fixed[other].has_value();
      if (!decided || other == axis || (fixed[axis] && fixed[other])) continue;
      if (is_excluded(axis, choice, other, other < axis ? picks[other] : *fixed[other])) return false;
    }
    return true;
  };
  const std::vector<std::size_t> choices =
      fixed[axis] ? std::vector<std::size_t>{*fixed[axis]} : order(axis, picks);
  for (const std::size_t choice : choices) {
    picks[axis] = choice;
    if (fits(choice) && complete(picks, fixed, order, axis + 1)) return true;
  }
  return false;
}

inline std::vector<std::string> settings_of(const Picks& picks) {
  std::vector<std::string> settings;
  for (std::size_t a = 0; a < picks.size(); ++a) {
    for (const char* s : composition_axes()[a].choices[picks[a]].settings) settings.emplace_back(s);
  }
  return settings;
}

// "devices host:N, ZeRO stage 3, ...".
inline std::string names_of(const Picks& picks) {
  std::string text;
  for (std::size_t a = 0; a < picks.size(); ++a) {
    const Axis& axis = composition_axes()[a];
    text += (a > 0 ? ", " : "") + std::string(axis.name) + " " + axis.choices[picks[a]].name;
  }
  return text;
}

}  // namespace zg
