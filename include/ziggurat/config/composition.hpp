// Which features of a run can be combined. One table lists the exclusions: load_config() and make_run_plan()
// refuse runs by it, and `ziggurat train --help-parallel` prints it. Pure functions, for any thread.
#pragma once
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "ziggurat/config/run_config.hpp"

namespace zg {

// Up to three texts in a table.
struct Texts {
  std::array<const char*, 3> all = {};  // ends at the first null
  const char* const* begin() const { return all.data(); }
  const char* const* end() const { return std::find(begin(), begin() + all.size(), nullptr); }
};

// An axis: a feature for which a run makes one of several choices. Choices on different axes can be combined
// freely, except where an Exclusion says otherwise.
struct Axis {
  struct Choice {
    const char* name;
    Texts settings;  // example overrides "a.b=c" that make this choice
    const char* meaning;
    bool (*holds)(const RunConfig& run);
  };
  const char* name;
  std::vector<Choice> choices;
};
const std::vector<Axis>& composition_axes();

// Choices of two axes that cannot be combined.
struct Exclusion {
  struct Side {
    const char* axis;
    Texts choices;
  };
  Side first, second;  // every choice of `first` excludes every choice of `second`
  const char* reason;
  const char* instead;  // the nearest run that is supported
  Texts keys;           // configuration keys; an error names the first of them that is given
  // Resets the choices of `first`, which then simply have no effect. Null: the run is refused.
  void (*drop)(RunConfig& run) = nullptr;
  // For choices that exclude each other only for some values: describes the conflicting values of this run.
  // Empty: no conflict.
  std::string (*numbers)(const RunConfig& run) = nullptr;
};
const std::vector<Exclusion>& exclusions();

// "offload_param cpu cannot be combined with ZeRO stage 1: ...". Empty: the exclusion does not concern the
// run.
std::string misfit(const Exclusion& exclusion, const RunConfig& run);

// Throws Error(kUsage) for the first exclusion that refuses the run; `where` is the key.
void check_composition(const RunConfig& run);

// The table, for people to read.
std::string composition_text();

}  // namespace zg
