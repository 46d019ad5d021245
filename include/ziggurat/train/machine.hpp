// The machine that this process runs on, as a configuration asks for it where it says "auto".
#pragma once
#include "ziggurat/config/run_config.hpp"

namespace zg {

Machine this_machine();

}  // namespace zg
