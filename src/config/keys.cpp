#include "config/keys.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::config {

std::string ChoiceSpec::fallback_name() const {
  const auto it = std::find(values.begin(), values.end(), fallback);
  return it == values.end() ? "" : names[static_cast<std::size_t>(it - values.begin())];
}

Keys::Keys(std::vector<Key> rows) : rows_(std::move(rows)) {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    ZG_ASSERT(&rows_[i] == find(rows_[i].name));  // no key twice
    if (const auto* alias = std::get_if<AliasSpec>(&rows_[i].spec)) ZG_ASSERT(find(alias->of) != nullptr);
  }
}

const Key* Keys::find(const std::string& name) const {
  const auto it = std::find_if(rows_.begin(), rows_.end(), [&](const Key& key) { return key.name == name; });
  return it == rows_.end() ? nullptr : &*it;
}

const Key& Keys::at(const std::string& name) const {
  const Key* key = find(name);
  ZG_ASSERT(key != nullptr, "a reader asks for \"{}\", which no row describes", name);
  if (const auto* alias = std::get_if<AliasSpec>(&key->spec)) return at(alias->of);
  return *key;
}

const std::vector<KeyGroup>& root_groups() {
  static const std::vector<KeyGroup> groups = {{"run", run_keys()},
                                               {"batch", batch_keys()},
                                               {"device", device_keys()},
                                               {"precision", precision_keys()},
                                               {"optimizers", optimizer_root_keys()},
                                               {"memory", memory_keys()},
                                               {"deepspeed", other_deepspeed_keys()}};
  return groups;
}

const Keys& root_keys() {
  static const Keys keys = [] {
    std::vector<Key> rows;
    for (const KeyGroup& group : root_groups()) rows.insert(rows.end(), group.keys.begin(), group.keys.end());
    return Keys(std::move(rows));
  }();
  return keys;
}

std::string range_text(const IntSpec& spec) {
  std::string text = "a whole number";
  if (spec.multiple_of > 1) text += fmt::format(", a multiple of {}", spec.multiple_of);
  const bool open = spec.max == std::numeric_limits<std::int64_t>::max();
  return text +
         (open ? fmt::format(", {} or more", spec.min) : fmt::format(", {} to {}", spec.min, spec.max));
}

std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> list;
  while (!text.empty()) {
    const std::size_t space = std::min(text.find(' '), text.size());
    list.emplace_back(text.substr(0, space));
    text.remove_prefix(std::min(space + 1, text.size()));
  }
  return list;
}

}  // namespace zg::config
