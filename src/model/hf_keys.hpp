// Typed access to the keys of a config.json, and of the "model" section of a run. Private to src/model.
#pragma once
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/model/config.hpp"

namespace zg::hf {

using nlohmann::json;

inline constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kMaxLayers = 1 << 16;

// Where the keys come from. A config.json has many keys that do not concern the engine (dropout, special
// tokens, versions); the "model" section of a run must have none.
enum class Origin { kConfigJson, kModelSection };

// Typed access to the keys of one JSON object. A null value counts as absent.
class Keys {
 public:
  Keys(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  const json& object() const { return object_; }
  bool has(const std::string& key) const { return object_.contains(key) && !object_[key].is_null(); }
  bool is_null(const std::string& key) const { return object_.contains(key) && object_[key].is_null(); }
  const json& at(const std::string& key) const { return object_[key]; }

  // A whole number in [1, max]. Without a fallback the key is required.
  std::int64_t size(const std::string& key, std::optional<std::int64_t> fallback = {},
                    std::int64_t max = kMaxSize) const {
    if (!has(key)) return absent(key, fallback, "a whole number");
    const json& value = at(key);
    // An unsigned number from 2^63 on would become negative as an int64.
    const bool fits =
        value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() <= kMaxSize);
    const std::int64_t n = fits ? value.get<std::int64_t>() : 0;
    if (n < 1 || n > max) wrong(key, fmt::format("a whole number from 1 to {}", max));
    return n;
  }
  double positive(const std::string& key, double fallback) const {
    if (!has(key)) return fallback;
    const double x = at(key).is_number() ? at(key).get<double>() : 0;
    if (!(x > 0) || !std::isfinite(x)) wrong(key, "a number > 0");
    return x;
  }
  double deviation(const std::string& key, double fallback) const {
    if (has(key) && at(key) == 0) return 0;
    return positive(key, fallback);
  }
  // A number above 0, or 0 where the key is absent or null.
  double positive_or_zero(const std::string& key) const { return has(key) ? positive(key, 0) : 0; }
  bool flag(const std::string& key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_boolean()) wrong(key, "true or false");
    return at(key).get<bool>();
  }
  std::string text(const std::string& key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_string()) wrong(key, "a text");
    return at(key).get<std::string>();
  }
  // Refuses a switch that is not `wanted`: it would change what is computed, and the engine supports only one
  // setting.
  void demand(const std::string& key, bool wanted) const {
    if (flag(key, wanted) != wanted) unsupported(key, wanted ? "true" : "false");
  }

  // Numbers above 0.
  std::vector<double> numbers(const std::string& key) const {
    std::vector<double> list;
    if (!has(key)) return list;
    if (!at(key).is_array()) wrong(key, "a list of numbers");
    for (const json& number : at(key)) {
      const double x = number.is_number() ? number.get<double>() : 0;
      if (!(x > 0) || !std::isfinite(x)) wrong(key, "a list of numbers > 0");
      list.push_back(x);
    }
    return list;
  }

  [[noreturn]] void wrong(const std::string& key, const std::string& expected) const {
    throw Error(Errc::kUsage, where_, fmt::format("\"{}\" is {}; {} is expected", key, shown(key), expected),
                fmt::format("correct \"{}\"", key));
  }
  [[noreturn]] void unsupported(const std::string& key, const std::string& supported) const {
    throw Error(Errc::kUsage, where_,
                fmt::format("\"{}\" is {}; only {} is supported", key, shown(key), supported),
                "the model computes something else than this engine does; choose another model");
  }

 private:
  std::string shown(const std::string& key) const {
    constexpr std::size_t kShown = 100;
    const std::string value = at(key).dump(-1, ' ', true, json::error_handler_t::replace);
    return value.size() > kShown ? value.substr(0, kShown) + "..." : value;
  }
  std::int64_t absent(const std::string& key, std::optional<std::int64_t> fallback,
                      const char* expected) const {
    if (fallback) return *fallback;
    throw Error(Errc::kUsage, where_, fmt::format("\"{}\" is missing; {} is expected", key, expected),
                fmt::format("add \"{}\"", key));
  }

  const json& object_;
  std::string where_;
};

// A "model" section may leave the size of the vocabulary to the tokenizer (0).
inline std::int64_t vocabulary(const Keys& keys, Origin origin) {
  if (origin == Origin::kModelSection) return keys.size("vocab_size", 0);
  return keys.size("vocab_size");
}

inline std::int64_t divided(const Keys& keys, const char* total_key, std::int64_t total,
                            const char* parts_key, std::int64_t parts) {
  if (total % parts == 0) return total / parts;
  throw Error(Errc::kUsage, keys.where(),
              fmt::format("\"{}\" {} is no multiple of \"{}\" {}", total_key, total, parts_key, parts),
              fmt::format("choose \"{}\" so that it divides \"{}\"", parts_key, total_key));
}

// Names of one function in transformers: GELU by tanh, to the bit or to rounding.
inline void demand_gelu(const Keys& keys, const std::string& key) {
  const std::string name = keys.text(key, "gelu_new");
  for (const char* same :
       {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"}) {
    if (name == same) return;
  }
  keys.unsupported(key, "the GELU by tanh (\"gelu_new\", \"gelu_pytorch_tanh\" or \"gelu_fast\")");
}

}  // namespace zg::hf
