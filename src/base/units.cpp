#include "ziggurat/base/units.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace zg {

std::optional<std::int64_t> parse_bytes(std::string_view text) {
  const std::string s(text);
  char* end = nullptr;
  if (s.empty() || !(std::isdigit(static_cast<unsigned char>(s[0])) || s[0] == '.')) return std::nullopt;
  const double number = std::strtod(s.c_str(), &end);
  std::string unit;
  for (; *end != '\0'; ++end) {
    if (*end != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*end)));
  }
  double factor = 0;
  static constexpr std::string_view kPrefixes = "kmgtp";
  if (unit.empty() || unit == "b") {
    factor = 1;
  } else if (const auto p = kPrefixes.find(unit[0]); p != std::string_view::npos) {
    const std::string_view rest = std::string_view(unit).substr(1);
    if (rest == "ib" || rest == "i") factor = std::pow(1024.0, static_cast<double>(p + 1));
    if (rest == "b" || rest.empty()) factor = std::pow(1000.0, static_cast<double>(p + 1));
  }
  const double bytes = number * factor;
  if (factor == 0 || !std::isfinite(bytes) || bytes >= 9.2e18) return std::nullopt;
  return std::llround(bytes);
}

std::string format_bytes(std::int64_t bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes < kKiB) return fmt::format("{} B", bytes);
  if (bytes < kMiB) return fmt::format("{:.1f} KiB", b / kKiB);
  if (bytes < kGiB) return fmt::format("{:.1f} MiB", b / kMiB);
  if (bytes < 1024 * kGiB) return fmt::format("{:.2f} GiB", b / kGiB);
  return fmt::format("{:.2f} TiB", b / (1024.0 * kGiB));
}

std::string format_rate(double r) {
  if (r >= 1e9) return fmt::format("{:.2f} GB/s", r / 1e9);
  if (r >= 1e6) return fmt::format("{:.1f} MB/s", r / 1e6);
  return fmt::format("{:.1f} kB/s", r / 1e3);
}

std::string format_seconds(double seconds) {
  if (seconds < 0.1) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds < 10) return fmt::format("{:.1f} s", seconds);
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

std::int64_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::int64_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::int64_t diagonal = row[0];
    row[0] = static_cast<std::int64_t>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::int64_t replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replace});
    }
  }
  return row[b.size()];
}

}  // namespace zg
