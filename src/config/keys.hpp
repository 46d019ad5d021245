// What a configuration may say: a table for each section, beside the function that reads it, with a row for
// every key: its type and range, its default, and what it means. A reader asks for a key by its name and
// takes the rest from the row, so that a key which is read is a key that is described. Messages and the
// reference in docs/ are made from the same rows. Immutable after construction. Private to src/config.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

namespace zg::config {

class Keys;

// Whether a key takes "auto", as Hugging Face's files have it.
//   kTakesFallback  the default is taken, and a notice says which
//   kOwnMeaning     the reader looks for it before it asks for the value
enum class Auto { kRefused, kTakesFallback, kOwnMeaning };

struct IntSpec {
  std::int64_t fallback = 0;
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
  std::int64_t multiple_of = 1;
  Auto autos = Auto::kRefused;
  const char* note = "";  // after the value in the notice: where the default comes from
};

struct NumberSpec {
  enum class Range { kNotNegative, kPositive, kBelowOne, kShare, kAny };  // kBelowOne: [0, 1), kShare: [0, 1]
  double fallback = 0;
  Range range = Range::kNotNegative;
  Auto autos = Auto::kRefused;
  const char* note = "";
};

struct BoolSpec {
  bool fallback = false;
  Auto autos = Auto::kRefused;  // or kOwnMeaning
};

struct TextSpec {
  std::string fallback = {};
};

struct BytesSpec {};  // a positive number of bytes, or a text such as "48MiB"

// One of a few names, each of which stands for a value of an enumeration.
class ChoiceSpec {
 public:
  template <class E>
  ChoiceSpec(E fallback, std::initializer_list<std::pair<const char*, E>> choices) : type_(&typeid(E)) {
    for (const auto& [name, value] : choices) {
      if (value == fallback && fallback_.empty()) fallback_ = name;
      names_.emplace_back(name);
      values_.push_back(static_cast<int>(value));
    }
    fallback_value_ = static_cast<int>(fallback);
  }
  const std::vector<std::string>& names() const { return names_; }
  const std::string& fallback() const { return fallback_; }  // empty: none of the names stands for it
  const std::type_info& type() const { return *type_; }
  int value_of(const std::string& name) const;  // of one of the names
  int fallback_value() const { return fallback_value_; }

 private:
  const std::type_info* type_;
  std::vector<std::string> names_;
  std::vector<int> values_;
  std::string fallback_;
  int fallback_value_ = 0;
};

struct FormSpec {};  // what the reader takes from the JSON by itself; Key::form says what it may be
struct SectionSpec {
  const Keys& (*keys)();
};
struct ListSpec {  // of sections
  const Keys& (*keys)();
};
struct AliasSpec {
  const char* of;  // another key of the section
};

// What a key without effect must look like all the same. "auto" and null are always fine.
enum class Shape { kBool, kNumber, kText, kObject, kAny };

// Without effect; the meaning is the reason. Whoever gives it is told, but where nothing is said of it.
struct IgnoredSpec {
  Shape shape = Shape::kAny;
};
struct IgnoredSwitchSpec {};  // only "on" is worth a warning
struct SilentSpec {};
// It would change what is computed; the meaning is what to do instead.
struct RefusedSpec {
  enum class Form {
    kSwitch,    // may be false
    kDegree,    // may be 1, or less
    kZero,      // may be 0
    kPresence,  // may not be there
  };
  Form form = Form::kSwitch;
  const char* why = "";
  std::int64_t least = 0;  // kDegree
  Auto autos = Auto::kRefused;
};
// A section of DeepSpeed's with "enabled". Off, it does nothing there either, and nothing is said.
struct FeatureSpec {
  enum class WhenOn { kRefuse, kWarn };  // the meaning: what to do instead, or why it has no effect
  WhenOn when_on = WhenOn::kWarn;
  const char* keys = "*";  // known in it besides "enabled", separated by spaces; "*": anything
};

using Spec =
    std::variant<IntSpec, NumberSpec, BoolSpec, TextSpec, BytesSpec, ChoiceSpec, FormSpec, SectionSpec,
                 ListSpec, AliasSpec, IgnoredSpec, IgnoredSwitchSpec, SilentSpec, RefusedSpec, FeatureSpec>;

// Whether a key that is read like others belongs among those without effect all the same.
enum class Effect { kHas, kNone };

// Texts may hold `code`, as in Markdown.
struct Key {
  std::string name;
  Spec spec;
  std::string meaning;         // a sentence
  std::string otherwise = {};  // the default in words, where it is not the one of `spec`
  std::string form = {};       // the type in words, where it is more than `spec` says
  Effect effect = Effect::kHas;
};

class Keys {
 public:
  explicit Keys(std::vector<Key> rows);
  const std::vector<Key>& rows() const { return rows_; }
  // The row of a key, or of the key that it is an alias of; aborts when there is none.
  const Key& at(const std::string& name) const;
  bool has(const std::string& name) const { return find(name) != nullptr; }

 private:
  const Key* find(const std::string& name) const;
  std::vector<Key> rows_;
};

// Parts of the topmost section, each with the name of its table.
struct KeyGroup {
  const char* name;
  std::vector<Key> keys;
};
const std::vector<KeyGroup>& root_groups();
const Keys& root_keys();

// As messages say it: "a whole number, 1 or more".
std::string range_text(const IntSpec& spec);
const char* range_text(NumberSpec::Range range);
const char* name_of(Shape shape);
std::vector<std::string> words(std::string_view text);

}  // namespace zg::config
