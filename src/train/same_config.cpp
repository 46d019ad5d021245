#include "train/same_config.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

namespace zg {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kBytes = 6;  // bytes of text sent in one double, which holds 53 bits exactly

// "/tiers/nvme/0/path" is the key "tiers.nvme.0.path".
std::string key_of(std::string pointer) {
  pointer.erase(0, 1);
  std::replace(pointer.begin(), pointer.end(), '/', '.');
  return pointer;
}

std::string value_of(const Json& flat, const std::string& pointer) {
  const auto it = flat.find(pointer);
  return it == flat.end() ? "not set" : it->dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Sends process 0's text to all processes.
std::string text_of_first(Processes& processes, const std::string& mine) {
  const double size = static_cast<double>(mine.size());
  std::string text(static_cast<std::size_t>(processes.all_gather(std::span(&size, 1)).front().front()), ' ');
  for (std::size_t at = 0; at < text.size(); at += kBytes * Processes::kMost) {
    std::array<double, Processes::kMost> numbers{};
    for (std::size_t i = 0; i < kBytes * numbers.size() && at + i < mine.size(); ++i) {
      numbers[i / kBytes] =
          numbers[i / kBytes] * 256 + static_cast<double>(static_cast<unsigned char>(mine[at + i]));
    }
    const std::vector<double> first = processes.all_gather(numbers).front();
    for (std::size_t n = 0; n < first.size(); ++n) {
      const std::size_t begin = at + n * kBytes, end = std::min(begin + kBytes, text.size());
      auto number = static_cast<std::uint64_t>(first[n]);
      for (std::size_t i = end; i-- > begin; number >>= 8) text[i] = static_cast<char>(number & 0xff);
    }
  }
  return text;
}

}  // namespace

ConfigDifference first_difference(const std::string& first, const std::string& second) {
  const Json a = Json::parse(first).flatten(), b = Json::parse(second).flatten();
  std::vector<std::string> pointers;
  for (const Json* flat : {&a, &b}) {
    for (const auto& [pointer, value] : flat->items()) pointers.push_back(pointer);
  }
  std::sort(pointers.begin(), pointers.end());
  for (const std::string& pointer : pointers) {
    if (value_of(a, pointer) != value_of(b, pointer))
      return {key_of(pointer), value_of(a, pointer), value_of(b, pointer)};
  }
  return {};
}

void expect_same_config(Processes& processes, const std::string& resolved_json) {
  const std::size_t hash = std::hash<std::string>()(resolved_json);
  const double mine[] = {static_cast<double>(hash >> 32), static_cast<double>(hash & 0xffffffff)};
  const auto all = processes.all_gather(mine);
  if (std::all_of(all.begin(), all.end(), [&](const auto& theirs) { return theirs == all.front(); })) return;
  const std::string first = text_of_first(processes, resolved_json);
  const ConfigDifference found = first_difference(first, resolved_json);
  if (found.key.empty()) return;  // only another process's configuration differs
  throw Error(
      Errc::kUsage, found.key,
      fmt::format("is {} for process {}, {} for process 0", found.second, processes.number(), found.first),
      "start all processes with the same files and flags");
}

}  // namespace zg
