// Log lines to stderr: "12:34:56.789 warning: text". On a terminal a progress line is kept below them. All
// functions may be called from any thread.
#pragma once
#include <fmt/core.h>

#include <string>

namespace zg::log {

enum class Level { kDebug, kInfo, kWarning, kError };

void set_level(Level level);
bool enabled(Level level);
void write(Level level, const std::string& text);
// Writes at any log level: for text that the user asked for, and for alarms.
void write_always(Level level, const std::string& text);

// Shows a progress line: redrawn in place if stderr is a terminal, else printed at most every few seconds.
// An empty line removes it.
void progress(const std::string& line);
// Shows an updated progress line between two calls of progress(). On a terminal it does the same as
// progress(). Elsewhere the line is printed only after twice the usual silence, and never delays the next
// line of progress(). So if progress() is called often enough, lines of refresh() are not printed.
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
