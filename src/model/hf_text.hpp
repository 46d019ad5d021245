// Formatting of names from files in errors, and a strict parser for the files' JSON. Private to src/model.
#pragma once
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/json.hpp"

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

// Finds a key that an object has twice; nlohmann's parser would silently keep the last one.
class RepeatedKeys : public nlohmann::json_sax<nlohmann::json> {
 public:
  const std::string& found() const { return found_; }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return keys_.emplace_back(), true; }
  bool end_object() override { return keys_.pop_back(), true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }
  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    found_ = key;
    return false;
  }

 private:
  std::vector<std::unordered_set<std::string>> keys_;
  std::string found_;
};

// Parses one JSON object. Throws Error(kUsage) at `where` for a text that is no JSON or no object, is nested
// too deep, or has a key twice.
inline nlohmann::json parse_object(const std::string& text, const std::string& where) {
  nlohmann::json object =
      parse_json(text, where, "mend the text there, or save the file again", {.depth = 100});
  if (!object.is_object())
    throw Error(Errc::kUsage, where, "is JSON, but no object {...}", "is this the right file?");
  RepeatedKeys repeated;
  if (!nlohmann::json::sax_parse(text, &repeated)) {
    throw Error(Errc::kUsage, where, fmt::format("the key {} appears twice", in_quotes(repeated.found())),
                "keep one of the two");
  }
  return object;
}

}  // namespace zg::hf
