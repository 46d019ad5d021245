// A strict reader of one JSON object. Callers ask for each key by its name; the key's type, range and default
// come from its row in the section's table. A key that nobody asked for is an error, which names the nearest
// known key. Private to src/config.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/keys.hpp"
#include "config/tree.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::config {

class Section {
 public:
  // Reads `object`, which lies in `tree` and has these keys; all of them must outlive the section. Notices go
  // to `warnings`. Asking for a key that has no row aborts.
  Section(const ConfigTree& tree, const Json& object, std::string path, std::vector<std::string>& warnings,
          const Keys& keys);

  // The value of the key; null when it is absent or null. From then on the key counts as known.
  const Json* find(const std::string& key);
  bool has(const std::string& key) { return find(key) != nullptr; }
  bool is_auto(const std::string& key);
  // The JSON object at `key`; null when absent.
  const Json* object(const std::string& key);
  // The name under which `key` is given: its alias, or itself. An error when both are given.
  std::string spelled(const std::string& key);
  // An error unless the key is given.
  void require(const std::string& key, const std::string& hint);

  // Reads all keys whose rows name a member of S, in the order of the rows; with `listed`, only those keys.
  template <class S>
  void read_into(S& out, std::initializer_list<std::string_view> listed = {});

  std::int64_t integer(const std::string& key) { return integer(key, spec_of<IntSpec>(key)); }
  double number(const std::string& key) { return number(key, spec_of<NumberSpec>(key)); }
  bool boolean(const std::string& key) { return boolean(key, spec_of<BoolSpec>(key).fallback); }
  std::string text(const std::string& key) { return text(key, spec_of<TextSpec>(key).fallback); }
  // A number of bytes, or a text such as "48MiB"; positive. Nothing when absent.
  std::optional<std::int64_t> bytes(const std::string& key);
  template <class E>
  E choice(const std::string& key) {
    ZG_ASSERT(*spec_of<ChoiceSpec>(key).type == typeid(E));
    return static_cast<E>(choice_value(key));
  }
  // Like those above, but with a default or range other than the row's, for keys whose default or range
  // depends on values read before.
  std::int64_t integer(const std::string& key, std::int64_t fallback);
  std::int64_t integer(const std::string& key, const IntSpec& instead);
  double number(const std::string& key, double fallback);
  double number(const std::string& key, const NumberSpec& instead);
  bool boolean(const std::string& key, bool fallback);
  std::string text(const std::string& key, const std::string& fallback);
  template <class T>
  const T& spec_of(const std::string& key) const {
    return std::get<T>(keys_->at(key).spec);
  }

  // The section at `key`, with the table that the key's row names; none when absent.
  std::optional<Section> section(const std::string& key);
  // The same, an empty one when absent.
  Section section_or_empty(const std::string& key);
  // The sections of the list at `key`; none when absent. `expected` says in errors what such a list looks
  // like.
  std::vector<Section> sections(const std::string& key, const std::string& expected);
  // Makes a section at `key` for `object`, with the table `keys`.
  Section child(const std::string& key, const Json& object, const Keys& keys) const;

  // Warns that a key has no effect, for the reason that its row gives.
  void no_effect(const std::string& key) { notice(key, "has no effect: " + keys_->at(key).meaning); }

  // Call after every key that has an effect was asked for. Handles the others: refused keys, sections that
  // nobody asked for, and keys without effect, in this order. Any key that remains is unknown: an error.
  void finish();

  std::string where(const std::string& key) const { return tree_->where(path_of(key)); }
  std::string path_of(const std::string& key) const { return key.empty() ? path_ : join_path(path_, key); }
  const Json& json() const { return *object_; }
  const Keys& keys() const { return *keys_; }
  const ConfigTree& tree() const { return *tree_; }
  // Adds the warning "file: key: text".
  void notice(const std::string& key, const std::string& text);
  [[noreturn]] void fail(const std::string& key, const std::string& what, const std::string& hint = {}) const;
  // Fails with "found ..., expected ...".
  [[noreturn]] void wrong(const std::string& key, const std::string& expected,
                          const std::string& hint = {}) const;

 private:
  bool known(const std::string& key) const;
  int choice_value(const std::string& key);
  void settle_without_effect(const Key& row);

  const ConfigTree* tree_;
  const Json* object_;
  std::string path_;
  std::vector<std::string>* warnings_;
  const Keys* keys_;
  std::vector<std::string> known_;
};

template <class S>
void Section::read_into(S& out, std::initializer_list<std::string_view> listed) {
  for (const Key& row : keys_->rows()) {
    const bool wanted =
        listed.size() == 0 || std::find(listed.begin(), listed.end(), row.name) != listed.end();
    if (wanted && row.owner != nullptr && *row.owner == typeid(S)) row.read(*this, spelled(row.name), &out);
  }
}

template <class T>
void read_value(Section& section, const std::string& key, T& out) {
  if constexpr (std::is_same_v<T, bool>) {
    out = std::holds_alternative<BoolSpec>(section.keys().at(key).spec) ? section.boolean(key)
                                                                        : section.choice<bool>(key);
  } else if constexpr (std::is_enum_v<T>) {
    out = section.choice<T>(key);
  } else if constexpr (std::is_integral_v<T>) {
    out = static_cast<T>(section.integer(key));
  } else if constexpr (std::is_floating_point_v<T>) {
    out = section.number(key);
  } else if constexpr (std::is_same_v<T, std::string>) {
    out = section.text(key);
  } else {
    static_assert(std::is_same_v<T, std::optional<std::int64_t>>, "no kind of key is read into this type");
    out = section.bytes(key);
  }
}

}  // namespace zg::config
