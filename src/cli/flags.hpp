// Checks of flags whose messages say what was found and what is expected. For CLI11's check().
#pragma once
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "ziggurat/base/parse.hpp"

namespace zg::cli {

template <class T = std::int64_t>
CLI::Validator whole_number(T least, T most = std::numeric_limits<T>::max()) {
  return CLI::Validator(
      [least, most](std::string& text) {
        const std::optional<T> value = number_in<T>(text);
        if (value && *value >= least && *value <= most) return std::string();
        const std::string range = most == std::numeric_limits<T>::max()
                                      ? fmt::format("{} or more", least)
                                      : fmt::format("{} to {}", least, most);
        return fmt::format("found {}, expected a whole number, {}", text, range);
      },
      "");
}

inline CLI::Validator real_number(double least, double most) {
  return CLI::Validator(
      [least, most](std::string& text) {
        const std::optional<double> value = number_in<double>(text);
        if (value && *value >= least && *value <= most) return std::string();  // no NaN passes
        return fmt::format("found {}, expected a number from {} to {}", text, least, most);
      },
      "");
}

}  // namespace zg::cli
