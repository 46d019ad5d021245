#include "ziggurat/config/composition.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {
using Run = const RunConfig&;

const Axis& axis_of(const char* name) {
  const std::vector<Axis>& axes = composition_axes();
  const auto it = std::find_if(axes.begin(), axes.end(),
                               [&](const Axis& axis) { return axis.name == std::string_view(name); });
  ZG_ASSERT(it != axes.end(), "no axis is called {}", name);
  return *it;
}

// The choice of this side that the run makes; null: none of them.
const Axis::Choice* chosen(const Exclusion::Side& side, Run run) {
  for (const Axis::Choice& choice : axis_of(side.axis).choices) {
    const bool listed = std::any_of(side.choices.begin(), side.choices.end(),
                                    [&](const char* name) { return choice.name == std::string_view(name); });
    if (listed && choice.holds(run)) return &choice;
  }
  return nullptr;
}

// "ZeRO stage 0, 1 or 2".
std::string text_of(const Exclusion::Side& side) {
  std::string text = side.axis;
  for (const char* const& choice : side.choices) {
    const bool first = &choice == side.choices.begin(), last = &choice + 1 == side.choices.end();
    text += (first ? " " : last ? " or " : ", ") + std::string(choice);
  }
  return text;
}

std::string text_of(const Axis& axis) {
  std::string text = std::string("\n") + axis.name + "\n";
  for (const Axis::Choice& choice : axis.choices) {
    text += fmt::format("  {:<18} {}\n", choice.name, choice.meaning);
    if (choice.settings.begin() == choice.settings.end()) continue;
    text += fmt::format("  {:<18}  ", "");
    for (const char* setting : choice.settings) {
      const char* quote = std::string_view(setting).find('"') == std::string_view::npos ? "" : "'";
      text += fmt::format(" --set {0}{1}{0}", quote, setting);
    }
    text += "\n";
  }
  return text;
}

std::string text_of(const Exclusion& e) {
  const char* only = e.numbers != nullptr ? ", where the numbers do not fit" : "";
  return fmt::format("\n  {}, with {}{}\n    why      {}\n    instead  {}\n", text_of(e.first),
                     text_of(e.second), only, e.reason, e.instead);
}

}  // namespace

std::string misfit(const Exclusion& exclusion, const RunConfig& run) {
  const Axis::Choice *first = chosen(exclusion.first, run), *second = chosen(exclusion.second, run);
  if (first == nullptr || second == nullptr) return "";
  std::string reason = exclusion.reason;
  if (exclusion.numbers != nullptr) {
    const std::string numbers = exclusion.numbers(run);
    if (numbers.empty()) return "";
    reason += ", and " + numbers;
  }
  return fmt::format("{} {} cannot be combined with {} {}: {}", exclusion.first.axis, first->name,
                     exclusion.second.axis, second->name, reason);
}

void check_composition(const RunConfig& run) {
  for (const Exclusion& exclusion : exclusions()) {
    if (exclusion.drop != nullptr) continue;
    const std::string text = misfit(exclusion, run);
    if (!text.empty()) throw Error(Errc::kUsage, *exclusion.keys.begin(), text, exclusion.instead);
  }
}

std::string composition_text() {
  std::string text =
      "What a run is composed of. Choices on different axes can be combined freely, except those listed at "
      "the end.\n";
  for (const Axis& axis : composition_axes()) text += text_of(axis);
  for (const bool refused : {true, false}) {
    text += refused ? "\nRefused, before anything is allocated:\n"
                    : "\nWithout effect: the first of the two is left out, with a warning:\n";
    for (const Exclusion& e : exclusions()) {
      if ((e.drop == nullptr) == refused) text += text_of(e);
    }
  }
  return text;
}

namespace config {
namespace {

// Whether the merged configuration has a value at a path such as "aio.use_gds".
bool is_given(const Json& root, std::string_view path) {
  const Json* value = &root;
  while (!path.empty()) {
    const std::size_t dot = std::min(path.find('.'), path.size());
    const auto it = value->is_object() ? value->find(std::string(path.substr(0, dot))) : value->end();
    if (it == value->end() || it->is_null()) return false;
    value = &*it;
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return true;
}

}  // namespace

void settle_composition(Section& root, RunConfig& run) {
  for (const Exclusion& exclusion : exclusions()) {
    const std::string text = misfit(exclusion, run);
    if (text.empty()) continue;
    const auto given = std::find_if(exclusion.keys.begin(), exclusion.keys.end(),
                                    [&](const char* key) { return is_given(root.json(), key); });
    const char* key = given == exclusion.keys.end() ? *exclusion.keys.begin() : *given;
    if (exclusion.drop == nullptr) root.fail(key, text, exclusion.instead);
    root.notice(key, fmt::format("has no effect: {}; {}", exclusion.reason, exclusion.instead));
    exclusion.drop(run);
  }
}

}  // namespace config
}  // namespace zg
