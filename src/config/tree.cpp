#include "config/tree.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <set>

#include "config/json_text.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/parse.hpp"

namespace zg::config {
namespace {

constexpr std::int64_t kLargestText = 16 << 20;
constexpr std::size_t kLongestKey = 200, kLongestValue = 1 << 16;
constexpr std::array<const char*, 3> kBatchKeys = {"train_batch_size", "train_micro_batch_size_per_gpu",
                                                   "gradient_accumulation_steps"};

bool is_auto(const Json& value) {
  return value.is_string() && value.get_ref<const std::string&>() == "auto";
}

// ---- parsing

// A text or a path as messages show it.
std::string shown(const std::string& text) {
  constexpr std::size_t kLongest = 100;
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

Json read_file(const std::string& path) {
  Json json = parse_text(read_text_file(path, "the configuration", kLargestText), path);
  if (!json.is_object()) {
    throw Error(Errc::kUsage, path, "found " + describe(json) + ", expected an object: { \"model\": ... }");
  }
  return json;
}

// ---- merging

// The value at `path` ("a.b") inside `root`, or null.
const Json* look_up(const Json& root, std::string_view path) {
  const Json* value = &root;
  while (!path.empty()) {
    if (!value->is_object()) return nullptr;
    const std::size_t dot = std::min(path.find('.'), path.size());
    const auto it = value->find(std::string(path.substr(0, dot)));
    if (it == value->end()) return nullptr;
    value = &*it;
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return value;
}

void forget_origins(ConfigTree& tree, const std::string& path) {
  tree.origins.erase(path);
  const std::string prefix = path + ".";
  auto it = tree.origins.lower_bound(prefix);
  while (it != tree.origins.end() && it->first.starts_with(prefix)) it = tree.origins.erase(it);
}

void drop(ConfigTree& tree, Json& object, const std::string& path, const std::string& key) {
  object.erase(key);
  forget_origins(tree, join_path(path, key));
}

void drop_old_params(ConfigTree& tree, const std::string& section, const Json& type) {
  const Json* old = look_up(tree.root, section + ".type");
  if (old == nullptr || !old->is_string() || !type.is_string()) return;
  if (lower(old->get<std::string>()) != lower(type.get<std::string>())) {
    drop(tree, tree.root[section], section, "params");
  }
}

// Drops all keys of "model" but model.dropout, which applies to models from either source.
void drop_old_model(ConfigTree& tree) {
  Json& model = tree.root["model"];
  std::vector<std::string> old;
  for (const auto& [key, value] : model.items()) old.push_back(key);
  for (const std::string& key : old) {
    if (key != "dropout") drop(tree, model, "model", key);
  }
}

void drop_old_batch_keys(ConfigTree& tree, const std::set<std::string>& given) {
  if (given.size() < 2) return;
  for (const char* key : kBatchKeys) {
    if (!given.contains(key)) drop(tree, tree.root, "", key);
  }
}

// Drops values that a source supersedes. given(path) is the value that the source has at the path, or null.
void drop_superseded(ConfigTree& tree, const std::function<const Json*(const std::string& path)>& given) {
  for (const std::string section : {"optimizer", "scheduler"}) {
    if (const Json* type = given(section + ".type")) drop_old_params(tree, section, *type);
  }
  for (const auto& [kind, other] : {std::pair{"model.from", "model.arch"}, {"model.arch", "model.from"}}) {
    const bool replaced = given(kind) != nullptr && look_up(tree.root, other) != nullptr;
    if (replaced) drop_old_model(tree);
  }
  std::set<std::string> batch;
  for (const char* key : kBatchKeys) {
    const Json* value = given(key);
    if (value != nullptr && !value->is_null() && !is_auto(*value)) batch.insert(key);
  }
  drop_old_batch_keys(tree, batch);
}

void merge_object(ConfigTree& tree, Json& base, const Json& incoming, const std::string& path,
                  const std::string& origin) {
  for (const auto& [key, value] : incoming.items()) {
    const std::string child = join_path(path, key);
    const auto it = base.find(key);
    if (it != base.end() && it->is_object() && value.is_object()) {
      merge_object(tree, *it, value, child, origin);
      continue;
    }
    // Not for aio.backend: it is not a DeepSpeed key, and "auto" is one of its values.
    if (it != base.end() && is_auto(value) && !it->is_null() && !is_auto(*it) && child != "aio.backend") {
      tree.notices.push_back(
          fmt::format("{}: {}: \"auto\": kept {} of {}", origin, child, describe(*it), tree.origin(child)));
      continue;
    }
    forget_origins(tree, child);
    base[key] = value;
    tree.origins[child] = origin;
  }
}

// ---- overrides

struct Override {
  std::string text;
  std::string path;
  std::vector<std::string> keys;
  Json value;
};

[[noreturn]] void malformed(const std::string& text, const std::string& what) {
  throw Error(Errc::kUsage, fmt::format("{} {}", kOverrideOrigin, shown(text)), what,
              "write it like optimizer.params.lr=3e-4 or tiers.nvme.0.path=/mnt/fast");
}

Override parse_override(const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos) malformed(text, "has no '=': expected key=value");
  Override result{text, text.substr(0, equals), {}, {}};
  std::size_t begin = 0;
  for (;;) {
    const std::size_t dot = result.path.find('.', begin);
    result.keys.push_back(result.path.substr(begin, dot - begin));
    if (result.keys.back().empty()) malformed(text, "has an empty key before the '='");
    if (result.keys.back().size() > kLongestKey)
      malformed(text, fmt::format("has a key of {} characters, {} at most expected",
                                  result.keys.back().size(), kLongestKey));
    if (dot == std::string::npos) break;
    begin = dot + 1;
  }
  if (result.keys.size() > static_cast<std::size_t>(kMaxDepth)) malformed(text, "has too many keys");
  const std::string value = text.substr(equals + 1);
  // A value that is not JSON is text: 48MiB, WarmupLR, /mnt/fast.
  const std::string name = fmt::format("{} {}", kOverrideOrigin, shown(text));
  const bool text_value = !Json::accept(value);
  if (text_value && value.size() > kLongestValue)
    malformed(text,
              fmt::format("has a value of {} characters, {} at most expected", value.size(), kLongestValue));
  result.value = text_value ? Json(value) : parse_text(value, name);
  return result;
}

// The value at `key` of `container`, created if need be. A container that is neither object nor list is
// replaced by one.
Json& step_into(Json& container, const std::string& key, const std::string& path, const Override& change) {
  const std::optional<std::size_t> index = number_in<std::size_t>(key);
  if (!container.is_structured()) container = index ? Json::array() : Json::object();
  if (container.is_object()) return container[key];
  if (!index || *index > container.size()) {
    malformed(change.text, fmt::format("{} is a list of {}: expected an index from 0 to {}, found \"{}\"",
                                       path, container.size(), container.size(), key));
  }
  if (*index == container.size()) container.push_back(nullptr);
  return container[*index];
}

void apply_override(ConfigTree& tree, const Override& change) {
  Json* place = &tree.root;
  std::string path;
  for (const std::string& key : change.keys) {
    if (!place->is_structured()) tree.origins[path] = kOverrideOrigin;  // step_into() replaces it
    place = &step_into(*place, key, path, change);
    path = join_path(path, key);
  }
  forget_origins(tree, path);
  *place = change.value;
  tree.origins[path] = kOverrideOrigin;
}

void apply_overrides(ConfigTree& tree, const std::vector<std::string>& texts) {
  std::vector<Override> changes;
  for (const std::string& text : texts) changes.push_back(parse_override(text));
  // All overrides count as one source, whatever their order: first they drop what they supersede, then they
  // are applied.
  drop_superseded(tree, [&](const std::string& path) {
    const auto last = std::find_if(changes.rbegin(), changes.rend(),
                                   [&](const Override& change) { return change.path == path; });
    return last == changes.rend() ? nullptr : &last->value;
  });
  for (const Override& change : changes) apply_override(tree, change);
}

}  // namespace

std::string join_path(const std::string& path, std::string_view key) {
  return path.empty() ? std::string(key) : path + "." + std::string(key);
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string describe(const Json& value) {
  constexpr std::size_t kLongest = 60;
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (value.is_array()) return text.size() <= kLongest ? text : fmt::format("a list of {}", value.size());
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return value.is_string() ? "text " + text : text;
}

std::string ConfigTree::origin(const std::string& path) const {
  for (std::string p = path;;) {
    if (const auto it = origins.find(p); it != origins.end()) return it->second;
    const std::size_t dot = p.rfind('.');
    if (dot == std::string::npos) break;
    p.resize(dot);
  }
  const auto first = origins.find("");
  return first == origins.end() ? "configuration" : first->second;
}

std::string ConfigTree::where(const std::string& path) const {
  return path.empty() ? origin(path) : origin(path) + ": " + path;
}

std::string ConfigTree::where_section(const std::string& path) const {
  std::vector<std::string> sources = {origin(path)};
  const std::string prefix = path + ".";
  for (auto it = origins.lower_bound(prefix); it != origins.end() && it->first.starts_with(prefix); ++it) {
    if (std::find(sources.begin(), sources.end(), it->second) == sources.end()) sources.push_back(it->second);
  }
  return fmt::format("{}: {}", fmt::join(sources, " + "), path);
}

Json parse_text(const std::string& text, const std::string& name) {
  const JsonBounds bounds{.depth = kMaxDepth, .values = 200'000, .comments = true};
  const std::string problem = json_out_of_bounds(text, bounds);
  if (!problem.empty()) throw Error(Errc::kUsage, name, problem);
  const JsonText look(text);
  if (!look.too_large.empty())
    throw Error(Errc::kUsage, name, look.too_large, "name a configuration, not a data file");
  const Json json = parse_json<Json>(text, name, look.mend, bounds);
  if (!look.twice.empty())
    throw Error(Errc::kUsage, name + ": " + look.twice, look.twice_lines + " of the same object",
                "remove one of the two");
  return json;
}

ConfigTree merge_sources(const ConfigSource& source) {
  if (source.files.empty()) {
    throw Error(Errc::kUsage, "configuration", "no file is given",
                "name at least one, e.g. configs/quickstart.json");
  }
  ConfigTree tree;
  tree.origins[""] = source.files.front();
  for (const std::string& file : source.files) {
    const Json incoming = read_file(file);
    drop_superseded(tree, [&](const std::string& path) { return look_up(incoming, path); });
    merge_object(tree, tree.root, incoming, "", file);
  }
  apply_overrides(tree, source.overrides);
  return tree;
}

}  // namespace zg::config
