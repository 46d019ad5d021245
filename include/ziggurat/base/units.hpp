// Sizes and times in human-readable form.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace zg {

inline constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

// The number of bytes in "48MiB", "1.5 GB" or "4096"; nothing if the text is no size. KiB, MiB, ... are
// powers of 1024; KB, MB, ... are powers of 1000.
std::optional<std::int64_t> parse_bytes(std::string_view text);
// "48.0 MiB"
std::string format_bytes(std::int64_t bytes);
// "3.21 GB/s"
std::string format_rate(double bytes_per_second);
// "1:02:03", "4:05", "12 s", "35.1 ms"
std::string format_seconds(double seconds);

inline constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The entry of `known` that is nearest to `word` in edit distance, if it is near enough to be a typing error.
template <class Range>
std::optional<std::string> nearest_name(std::string_view word, const Range& known);
std::int64_t edit_distance(std::string_view a, std::string_view b);

template <class Range>
std::optional<std::string> nearest_name(std::string_view word, const Range& known) {
  std::optional<std::string> best;
  std::int64_t best_distance = static_cast<std::int64_t>(word.size() + 2) / 3 + 1;
  for (const auto& candidate : known) {
    const std::int64_t d = edit_distance(word, candidate);
    if (d < best_distance) {
      best_distance = d;
      best = std::string(candidate);
    }
  }
  return best;
}

}  // namespace zg
