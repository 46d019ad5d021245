// The configuration before it is interpreted: all files merged, overrides applied, and the source of every
// value. Private to src/config.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/config/run_config.hpp"

namespace zg::config {

constexpr const char* kOverrideOrigin = "--set";  // the origin of values from overrides

using Json = nlohmann::ordered_json;  // keeps the keys' order, so that warnings come in that order

struct ConfigTree {
  Json root = Json::object();
  // The source of each value: "zero_optimization.stage" -> "ds.json". It applies to the value's children too.
  std::map<std::string, std::string> origins;
  std::vector<std::string> notices;  // which values were kept over a later "auto"

  // A key as errors name it: "ds.json: zero_optimization.stage". A key that is in no source counts as the
  // first file's.
  std::string where(const std::string& path) const;
  std::string origin(const std::string& path) const;
  // The same for a section to which several sources may have contributed: "a.json + b.json: model".
  std::string where_section(const std::string& path) const;
};

// Parses JSON with comments. Throws Error(kUsage) at "name", with line and column, for a text that is not
// JSON, a key that is given twice, nesting deeper than kMaxDepth, and a text or number that is too large.
Json parse_text(const std::string& text, const std::string& name);
inline constexpr int kMaxDepth = 64;

// Merges all sources. Objects are merged key by key; any other value is replaced by a later one, with four
// exceptions that let a DeepSpeed file be laid over one of ours:
//   - "auto" in a later file keeps an earlier value, since it means "take it from the trainer";
//   - a later optimizer.type or scheduler.type that differs drops the earlier params;
//   - a later model.from drops an earlier model.arch and its keys, and the other way round;
//   - a source that gives two of the three batch keys drops the third.
// Throws Error(kUsage) for an unreadable file or a malformed override.
ConfigTree merge_sources(const ConfigSource& source);

std::string join_path(const std::string& path, std::string_view key);
std::string lower(std::string text);
// A value as an error message shows it: text "a", 3, an object.
std::string describe(const Json& value);

}  // namespace zg::config
