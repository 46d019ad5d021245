// How errors show names from files, and a strict parser of their JSON. Private to src/model.
#pragma once
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg::hf {

// A name from a file as an error shows it: in quotes, cut off after 100 bytes, and without control
// characters.
inline std::string in_quotes(std::string_view text) {
  constexpr std::size_t kShown = 100;
  std::string out = "\"";
  for (const char c : text.substr(0, kShown))
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return out + (text.size() > kShown ? "...\"" : "\"");
}

// "[3, 4]"
template <class Range>
std::string shape_text(const Range& shape) {
  std::string text = "[";
  for (const auto n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

// Parses one JSON object. Throws Error(kUsage) at `where` for a text that is no JSON or no object, is nested
// too deep, or has a key twice (nlohmann's parser would silently keep the last one).
inline nlohmann::json parse_object(const std::string& text, const std::string& where) {
  using nlohmann::json;
  constexpr int kMaxDepth = 100;
  std::vector<std::unordered_set<std::string>> keys;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxDepth)
      throw Error(Errc::kUsage, where, fmt::format("is nested deeper than {}", kMaxDepth));
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw Error(Errc::kUsage, where,
                  fmt::format("the key {} appears twice", in_quotes(parsed.get<std::string>())),
                  "keep one of the two");
    }
    return true;
  };
  json object;
  try {
    object = json::parse(text, watch);
  } catch (const json::parse_error& e) {
    throw Error(Errc::kUsage, where, fmt::format("is not valid JSON at byte {} of {}", e.byte, text.size()),
                "mend the text there, or save the file again");
  } catch (const json::out_of_range& e) {
    throw Error(Errc::kUsage, where, fmt::format("has a number that no fp64 number holds ({})", e.what()),
                "mend the number, or save the file again");
  }
  // nlohmann's parser takes a zero byte for the end of its input, and would ignore what follows.
  if (text.find('\0') != text.npos)
    throw Error(Errc::kUsage, where, "has a zero byte in it", "save the file again");
  if (!object.is_object()) throw Error(Errc::kUsage, where, "is JSON, but no object {...}");
  return object;
}

}  // namespace zg::hf
