// This machine as a machine file: measured, in some seconds.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/plan/machine_file.hpp"

namespace zg::cli {

struct ProbeOptions {
  std::vector<std::string> paths;        // of drives, which are measured as one kind: the slowest of them
  std::int64_t drive_bytes = 256 << 20;  // that are written to each and read back
};
MachineFile this_machine_file(const ProbeOptions& options);

}  // namespace zg::cli
