// All processes of a run must have the same configuration.
#pragma once
#include <string>

#include "ziggurat/comm/processes.hpp"

namespace zg {

// The first key whose value differs between two configurations in JSON, and its two values; "not set" for a
// configuration that lacks the key.
struct ConfigDifference {
  std::string key, first, second;
};
ConfigDifference first_difference(const std::string& first, const std::string& second);

// Throws Error(kUsage) with that key in each process whose resolved configuration differs from process 0's.
// All processes call it.
void expect_same_config(Processes& processes, const std::string& resolved_json);

}  // namespace zg
