// A strict reader of one JSON object: each key is asked for by its name, and its type, range and default are
// those of its row in the section's table; what nobody asked for is an error that names the nearest known
// key. Private to src/config.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/keys.hpp"
#include "config/tree.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::config {

class Section {
 public:
  // A view of `object`, which lies in `tree` and has these keys; all of them outlive it. Notices go to
  // `warnings`. Asking for a key that is in no row aborts.
  Section(const ConfigTree& tree, const Json& object, std::string path, std::vector<std::string>& warnings,
          const Keys& keys);

  // Null when the key is absent or null. From here on it is known.
  const Json* find(const std::string& key);
  bool has(const std::string& key) { return find(key) != nullptr; }
  bool is_auto(const std::string& key);
  // The JSON object at `key`; null where there is none.
  const Json* object(const std::string& key);

  std::int64_t integer(const std::string& key) { return integer(key, spec_of<IntSpec>(key)); }
  double number(const std::string& key) { return number(key, spec_of<NumberSpec>(key)); }
  bool boolean(const std::string& key) { return boolean(key, spec_of<BoolSpec>(key).fallback); }
  std::string text(const std::string& key) { return text(key, spec_of<TextSpec>(key).fallback); }
  // A number of bytes, or a text such as "48MiB"; positive. Nothing when absent.
  std::optional<std::int64_t> bytes(const std::string& key);
  template <class E>
  E choice(const std::string& key);
  // With another default, or other limits, than those of the row, where they depend on what was read before.
  std::int64_t integer(const std::string& key, const IntSpec& instead);
  double number(const std::string& key, const NumberSpec& instead);
  std::string text(const std::string& key, const std::string& fallback);
  template <class T>
  const T& spec_of(const std::string& key) const {
    return std::get<T>(keys_->at(key).spec);
  }

  // The section at `key`, whose table its row names; none when absent.
  std::optional<Section> section(const std::string& key);
  // The same, an empty one when absent.
  Section section_or_empty(const std::string& key);
  // Entry i, an object, of the list of sections at `key`.
  Section entry(const std::string& key, std::size_t i, const Json& value);
  // A section at `key` that has these keys.
  Section child(const std::string& key, const Json& object, const Keys& keys) const;

  // What the row of a key without effect asks for, whose value does something to others: a warning.
  void no_effect(const std::string& key) { notice(key, "has no effect: " + keys_->at(key).meaning); }
  // The key of a row that is refused, or without effect: an error, a warning, or nothing.
  void settle(const Key& row);

  // Every key with an effect has been asked for by now. Settles those that are refused, then those without
  // effect; all others are unknown.
  void finish();

  std::string where(const std::string& key) const { return tree_->where(path_of(key)); }
  std::string path_of(const std::string& key) const { return key.empty() ? path_ : join_path(path_, key); }
  const Json& json() const { return *object_; }
  const Keys& keys() const { return *keys_; }
  const ConfigTree& tree() const { return *tree_; }
  // Like the notices of "auto": "file: key: text".
  void notice(const std::string& key, const std::string& text);
  [[noreturn]] void fail(const std::string& key, const std::string& what, const std::string& hint = {}) const;
  [[noreturn]] void wrong(const std::string& key, const std::string& expected,
                          const std::string& hint = {}) const;

 private:
  [[noreturn]] void unknown(const std::string& key) const;
  bool known(const std::string& key) const;
  bool boolean(const std::string& key, bool fallback);
  void refuse(const Key& row, const RefusedSpec& refused);
  void took_fallback(const std::string& key, const std::string& value, const char* note);
  std::string choice_name(const std::string& key, const std::vector<std::string>& names);

  const ConfigTree* tree_;
  const Json* object_;
  std::string path_;
  std::vector<std::string>* warnings_;
  const Keys* keys_;
  std::vector<std::string> known_;
};

template <class E>
E Section::choice(const std::string& key) {
  const ChoiceSpec& choices = spec_of<ChoiceSpec>(key);
  ZG_ASSERT(choices.type() == typeid(E));
  if (find(key) == nullptr) return static_cast<E>(choices.fallback_value());
  return static_cast<E>(choices.value_of(choice_name(key, choices.names())));
}

}  // namespace zg::config
