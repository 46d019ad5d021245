// A strict reader of one JSON object: each key is asked for by name, with its type and range; what nobody
// asked for is an error that names the nearest known key. Private to src/config.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/tree.hpp"

namespace zg::config {

// Whether a key takes "auto", as Hugging Face's files have it: the fallback is taken, and a notice says
// which.
enum class Auto { kRefused, kTakesFallback };

struct IntSpec {
  std::int64_t fallback = 0;
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
  std::int64_t multiple_of = 1;
  Auto autos = Auto::kRefused;
  const char* note = "";  // after the value in the notice: where the fallback comes from
};

struct NumberSpec {
  enum class Range { kNotNegative, kPositive, kBelowOne, kShare, kAny };  // kBelowOne: [0, 1), kShare: [0, 1]
  double fallback = 0;
  Range range = Range::kNotNegative;
  Auto autos = Auto::kRefused;
  const char* note = "";
};

// What a key without effect must look like all the same. "auto" and null are always fine.
enum class Shape { kBool, kNumber, kText, kObject, kAny };

template <class E>
using Choices = std::initializer_list<std::pair<const char*, E>>;

class Section {
 public:
  // A view of `object`, which lies in `tree`; both outlive it. Notices go to `warnings`.
  Section(const ConfigTree& tree, const Json& object, std::string path, std::vector<std::string>& warnings);

  // Null when the key is absent or null. From here on it is known.
  const Json* find(const std::string& key);
  bool has(const std::string& key) { return find(key) != nullptr; }
  bool is_auto(const std::string& key);

  std::int64_t integer(const std::string& key, const IntSpec& spec);
  double number(const std::string& key, const NumberSpec& spec);
  bool boolean(const std::string& key, bool fallback);
  std::string text(const std::string& key, const std::string& fallback);
  // A number of bytes, or a text such as "48MiB"; positive. Nothing when absent.
  std::optional<std::int64_t> bytes(const std::string& key);
  template <class E>
  E choice(const std::string& key, E fallback, Choices<E> choices);
  std::optional<Section> section(const std::string& key);
  // A section at `key` that reads `object` instead of what is there; for parts that may be left out.
  Section child(const std::string& key, const Json& object) const;

  // A known key that does nothing here: a warning with the reason.
  void ignored(const std::string& key, Shape shape, const std::string& reason);
  // A switch that may only be off (false, null or absent).
  void must_be_off(const std::string& key, const std::string& message, const std::string& hint);
  // A switch that does nothing here, so that only "on" deserves a warning.
  void off_or_ignored(const std::string& key, const std::string& reason);

  // Every key has been asked for by now: the others are unknown.
  void finish();

  std::string where(const std::string& key) const { return tree_->where(path_of(key)); }
  std::string path_of(const std::string& key) const { return key.empty() ? path_ : join_path(path_, key); }
  const Json& json() const { return *object_; }
  const ConfigTree& tree() const { return *tree_; }
  // Like the notices of "auto": "file: key: text".
  void notice(const std::string& key, const std::string& text);
  [[noreturn]] void fail(const std::string& key, const std::string& what, const std::string& hint = {}) const;
  [[noreturn]] void wrong(const std::string& key, const std::string& expected,
                          const std::string& hint = {}) const;

 private:
  [[noreturn]] void unknown(const std::string& key) const;
  void took_fallback(const std::string& key, const std::string& value, const char* note);
  std::string choice_name(const std::string& key, const std::vector<std::string>& names);

  const ConfigTree* tree_;
  const Json* object_;
  std::string path_;
  std::vector<std::string>* warnings_;
  std::vector<std::string> known_;
};

template <class E>
E Section::choice(const std::string& key, E fallback, Choices<E> choices) {
  if (find(key) == nullptr) return fallback;
  std::vector<std::string> names;
  for (const auto& [name, value] : choices) names.emplace_back(name);
  const std::string chosen = choice_name(key, names);
  for (const auto& [name, value] : choices) {
    if (chosen == name) return value;
  }
  return fallback;  // choice_name() returns one of the names
}

}  // namespace zg::config
