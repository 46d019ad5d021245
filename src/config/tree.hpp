// The configuration before it is interpreted: the files merged, overrides applied, and for every value the
// place it came from. Private to src/config.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/config/run_config.hpp"

namespace zg::config {

using Json = nlohmann::ordered_json;  // keys stay in the order they were written, and so do the warnings

struct ConfigTree {
  Json root = Json::object();
  std::map<std::string, std::string> origins;  // "zero_optimization.stage" -> "ds.json"; children inherit
  std::vector<std::string> notices;            // what merging decided on its own

  // "ds.json: zero_optimization.stage". A key that nobody wrote belongs to the first file.
  std::string where(const std::string& path) const;
  std::string origin(const std::string& path) const;
  // The same for a whole section that several sources may have filled: "a.json + b.json: model".
  std::string where_section(const std::string& path) const;
};

// JSON with comments. Throws Error(kUsage) "name:line:column": what was read, what was expected. Keys given
// twice and nesting beyond kMaxDepth are errors too.
Json parse_text(const std::string& text, const std::string& name);
inline constexpr int kMaxDepth = 64;

// Objects merge key by key, anything else is replaced by what comes later, with four exceptions that let a
// DeepSpeed file be laid over one of ours:
//   - "auto" in a later file keeps an earlier value (it means "take it from the trainer");
//   - a later optimizer.type or scheduler.type that differs drops the earlier params;
//   - a later model.from drops an earlier model.arch and its keys, and the other way round;
//   - a source that gives two of the three batch keys drops the third.
// Throws Error(kUsage) for an unreadable file or a malformed override.
ConfigTree merge_sources(const ConfigSource& source);

std::string join_path(const std::string& path, std::string_view key);
// "text \"a\"", "3", "an object": a value as an error message shows it.
std::string describe(const Json& value);

}  // namespace zg::config
