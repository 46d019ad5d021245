// What of a run can be combined with what. One table says it: load_config() and make_run_plan() refuse by it
// what cannot be, and `ziggurat train --help-parallel` prints it. Pure functions, for any thread.
#pragma once
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "ziggurat/config/run_config.hpp"

namespace zg {

// A few texts of a table.
struct Texts {
  std::array<const char*, 3> all = {};  // null: there are no more
  const char* const* begin() const { return all.data(); }
  const char* const* end() const { return std::find(begin(), begin() + all.size(), nullptr); }
};

// One of the choices that a run consists of. Choices on different axes can be combined freely, except where
// an Exclusion says otherwise.
struct Axis {
  struct Choice {
    const char* name;
    Texts settings;  // overrides "a.b=c" that choose it, as an example
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
  Side first, second;  // every choice of `first` with every choice of `second`
  const char* reason;
  const char* instead;  // the nearest run that can be
  Texts keys;           // of the configuration; an error names the first of them that is given
  // Takes back the choices of `first`, which then only have no effect. Null: the run is refused.
  void (*drop)(RunConfig& run) = nullptr;
  // For choices that exclude each other only with some numbers: says with which numbers they do in this run.
  // Empty: they do not.
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
