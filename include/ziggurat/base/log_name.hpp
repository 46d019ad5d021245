// Who writes the log lines of this process, where several processes write to one terminal.
#pragma once
#include <string>

namespace zg::log {

// From now on each line names this speaker: "12:34:56.789 warning: ranks 2-3: text".
void set_name(const std::string& name);

}  // namespace zg::log
