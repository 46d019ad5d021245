// Log lines to stderr: "12:34:56.789 warning: text". A live progress line is kept below them.
// Any thread may call.
#pragma once
#include <fmt/core.h>

#include <string>

namespace zg::log {

enum class Level { kDebug, kInfo, kWarning, kError };

void set_level(Level level);
bool enabled(Level level);
void write(Level level, const std::string& text);
// Whatever the level that was set: for what somebody asked for, and what must be heard.
void write_always(Level level, const std::string& text);

// A line that is redrawn in place where stderr is a terminal; elsewhere printed every few seconds.
// Empty text removes it.
void progress(const std::string& line);
// The same for what changes in between. Where stderr is no terminal it is printed only when nothing else of
// the two has been for twice as long, and takes no turn of theirs: lines of progress() are not lost for it,
// and where they come often enough there are no others.
void refresh(const std::string& line);

template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kDebug)) write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kInfo)) write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace zg::log
