// The machine that this process runs on, for the keys of a configuration that are "auto".
#pragma once
#include "ziggurat/config/run_config.hpp"

namespace zg {

Machine this_machine();

}  // namespace zg
