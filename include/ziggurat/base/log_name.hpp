// Names the writer in this process's log lines, for several processes that write to one terminal.
#pragma once
#include <string>

namespace zg::log {

// Makes each line name this writer: "12:34:56.789 warning: ranks 2-3: text".
void set_name(const std::string& name);

}  // namespace zg::log
