// `ziggurat trace show`, and what it shares with the other subcommands of trace.
#pragma once
#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace zg::cli {

void add_trace_show(CLI::App& trace, int& exit_code);

// For long replays: shows the progress of `what`, and says false when the user has interrupted.
std::function<bool(double)> progress_of(const std::string& what);

}  // namespace zg::cli
