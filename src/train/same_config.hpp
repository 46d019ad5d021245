// All processes of a run must have the same configuration.
#pragma once
#include <string>

#include "ziggurat/comm/processes.hpp"

namespace zg {

// The first key whose value differs, and what each of two configurations, as text of JSON, says of it; a key
// that one of them lacks is "not set".
struct ConfigDifference {
  std::string key, first, second;
};
ConfigDifference first_difference(const std::string& first, const std::string& second);

// Throws Error(kUsage) with that key in the processes whose resolved configuration differs from the one of
// process 0. All processes call it.
void expect_same_config(Processes& processes, const std::string& resolved_json);

}  // namespace zg
