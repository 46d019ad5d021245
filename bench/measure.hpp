// What the benchmarks share: robust statistics, and where numbers come from.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg::bench {

// For an even number of values, the mean of the two in the middle.
inline double median(std::vector<double> values) {
  ZG_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  return (values[values.size() / 2] + values[(values.size() - 1) / 2]) / 2;
}

// The median of one field of several results.
template <class T>
double median(const std::vector<T>& all, double T::*field) {
  std::vector<double> values;
  for (const T& one : all) values.push_back(one.*field);
  return median(values);
}

// The value below which a share q of the others lies, 0 <= q <= 1: one of those that were measured.
inline double quantile(std::vector<double> values, double q) {
  ZG_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
}

// Median absolute deviation.
inline double mad(const std::vector<double>& values) {
  const double middle = median(values);
  std::vector<double> distances;
  for (const double v : values) distances.push_back(std::abs(v - middle));
  return median(distances);
}

inline std::string first_line(const std::string& path, const std::string& prefix) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(prefix, 0) == 0) return line;
  }
  return "";
}

// Commit of the working directory, date, processor, and how busy the machine was at this moment.
inline nlohmann::json provenance() {
  std::string commit;
  if (std::FILE* git = popen("git rev-parse --short HEAD 2>/dev/null", "r")) {
    char text[64] = {};
    if (std::fgets(text, sizeof text, git) != nullptr) commit = std::string(text, std::strcspn(text, "\n"));
    pclose(git);
  }
  const std::string cpu = first_line("/proc/cpuinfo", "model name");
  char date[16] = {};
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::localtime(&now));
  return {{"commit", commit},
          {"date", date},
          {"cpu", cpu.empty() ? cpu : cpu.substr(cpu.find(':') + 2)},
          {"cores", std::thread::hardware_concurrency()},
          {"load", first_line("/proc/loadavg", "")}};
}

}  // namespace zg::bench
