// `ziggurat trace show`, and functions that it shares with the other subcommands of trace.
#pragma once
#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace zg::cli {

void add_trace_show(CLI::App& trace, int& exit_code);

// A callback for long replays: it shows the progress of `what`, and returns false after an interrupt.
std::function<bool(double)> progress_of(const std::string& what);

}  // namespace zg::cli
