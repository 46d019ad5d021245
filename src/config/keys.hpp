// Tables of the keys that a configuration may contain. Each section has a table, next to the function that
// reads the section, with a row for every key: its type and range, its default, its meaning, and in most rows
// the member of RunConfig that receives its value. A reader asks for a key by name and takes the rest from
// the row, so that every key that is read is also described. Error messages and the reference in docs/ are
// made from the same rows. Immutable after construction. Private to src/config.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "config/tree.hpp"

namespace zg::config {

class Keys;
class Section;

// Whether a key accepts the value "auto", as in Hugging Face's files.
//   kTakesFallback  "auto" stands for the default, and a notice names the value that was taken
//   kOwnMeaning     the reader checks for "auto" before it asks for the value
enum class Auto { kRefused, kTakesFallback, kOwnMeaning };

struct IntSpec {
  std::int64_t fallback = 0;
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
  std::int64_t multiple_of = 1;
  Auto autos = Auto::kRefused;
  const char* note = "";  // appended to the value in the notice of "auto": where the default comes from
};

struct NumberRange {
  const char* text;  // for messages and the reference
  bool (*holds)(double value);
};
inline constexpr NumberRange kNotNegative{"a number, 0 or more", [](double x) { return x >= 0; }};
inline constexpr NumberRange kPositive{"a number above 0", [](double x) { return x > 0; }};
// kRate and kSmall: values that are converted to float. kSeconds: values that are converted to nanoseconds.
inline constexpr NumberRange kRate{"a number from 0 to 1e30", [](double x) { return x >= 0 && x <= 1e30; }};
inline constexpr NumberRange kSmall{"a number from 1e-37 to 1e30",
                                    [](double x) { return x >= 1e-37 && x <= 1e30; }};
inline constexpr NumberRange kSeconds{"a number from 0 to 1e9", [](double x) { return x >= 0 && x <= 1e9; }};
inline constexpr NumberRange kBelowOne{"a number from 0 to below 1",
                                       [](double x) { return x >= 0 && x < 1; }};
inline constexpr NumberRange kShare{"a number from 0 to 1", [](double x) { return x >= 0 && x <= 1; }};

struct NumberSpec {
  double fallback = 0;
  NumberRange range = kNotNegative;
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

// A positive number of bytes, or a text such as "48MiB"; at most `max`. With the default maximum, sums over
// all drives and ranks do not overflow.
struct BytesSpec {
  std::int64_t max = std::int64_t{1} << 50;
};

// One of a few names, each of which stands for a value of the enumeration (or bool) E.
struct ChoiceSpec {
  template <class E>
  ChoiceSpec(E default_value, std::initializer_list<std::pair<const char*, E>> choices)
      : type(&typeid(E)), fallback(static_cast<int>(default_value)) {
    for (const auto& [name, value] : choices) {
      names.emplace_back(name);
      values.push_back(static_cast<int>(value));
    }
  }
  std::string fallback_name() const;  // the first name of the default; empty: the default has no name

  const std::type_info* type;  // of E
  std::vector<std::string> names;
  std::vector<int> values;  // parallel to `names`
  int fallback;
};

struct FormSpec {};  // the reader interprets the JSON itself; Key::form says what is allowed
struct SectionSpec {
  const Keys& (*keys)();
};
struct ListSpec {  // a list of sections
  const Keys& (*keys)();
};
struct AliasSpec {
  const char* of;                     // another key of the section
  const char* kind = "the old name";  // what kind of alias it is, for messages
};

// The form that even the value of a key without effect must have. "auto" and null are always accepted.
struct Shape {
  const char* text;
  bool (*holds)(const Json& value);
};
// A key without effect; its row's `meaning` is the reason. It warns when it is given, only when it is
// switched on, or never.
struct IgnoredSpec {
  enum class Warns { kGiven, kOn, kNever };
  Shape shape;
  Warns warns = Warns::kGiven;
};
inline constexpr IgnoredSpec kIgnoredFlag{{"true or false", [](const Json& v) { return v.is_boolean(); }}};
inline constexpr IgnoredSpec kIgnoredNumber{{"a number", [](const Json& v) { return v.is_number(); }}};
inline constexpr IgnoredSpec kIgnoredText{{"a text", [](const Json& v) { return v.is_string(); }}};
inline constexpr IgnoredSpec kIgnoredObject{{"an object", [](const Json& v) { return v.is_object(); }}};
inline constexpr IgnoredSpec kIgnored{{"any value", [](const Json&) { return true; }}};
inline constexpr IgnoredSpec kIgnoredSwitch{kIgnoredFlag.shape, IgnoredSpec::Warns::kOn};
inline constexpr IgnoredSpec kSilent{kIgnored.shape, IgnoredSpec::Warns::kNever};

// A key that would change the computation but is not supported, so it is an error; its row's `meaning` says
// what to do instead.
struct RefusedSpec {
  enum class Form {
    kSwitch,    // false is accepted
    kDegree,    // 1 or less is accepted
    kPresence,  // nothing is accepted
  };
  Form form = Form::kSwitch;
  const char* why = "";
  std::int64_t least = 0;  // the smallest value of a kDegree key
  Auto autos = Auto::kRefused;
};
// A DeepSpeed section that does nothing, here as in DeepSpeed, unless its "enabled" is true. Its row's
// `meaning` says what to do instead, or why the section has no effect.
struct FeatureSpec {
  enum class WhenOn { kRefuse, kWarn };
  WhenOn when_on = WhenOn::kWarn;
  const char* keys = "*";  // keys known in it besides "enabled", separated by spaces; "*": any key
};

using Spec = std::variant<IntSpec, NumberSpec, BoolSpec, TextSpec, BytesSpec, ChoiceSpec, FormSpec,
                          SectionSpec, ListSpec, AliasSpec, IgnoredSpec, RefusedSpec, FeatureSpec>;

// kNone: the value is read and checked like others, but it has no effect, and causes a warning if it is not
// the default.
enum class Effect { kHas, kNone };

// Reads `key` of the section into `out`, according to the type of `out`. Defined in config/reader.hpp.
template <class T>
void read_value(Section& section, const std::string& key, T& out);

// The row of one key. Texts may hold `code`, as in Markdown.
struct Key {
  Key(std::string key, Spec kind, std::string what, std::string fallback = {}, std::string type = {},
      Effect has_effect = Effect::kHas)
      : name(std::move(key)),
        spec(std::move(kind)),
        meaning(std::move(what)),
        otherwise(std::move(fallback)),
        form(std::move(type)),
        effect(has_effect) {}
  // The value goes to `member` of S, whose initialiser is the default.
  template <class S, class T>
  Key(std::string key, T S::*member, Spec kind, std::string what, std::string fallback = {},
      std::string type = {})
      : Key(std::move(key), std::move(kind), std::move(what), std::move(fallback), std::move(type)) {
    S defaults;
    std::visit([&](auto& s) { set_fallback(s, defaults.*member); }, spec);
    // Limits the value so that the cast to the member's type cannot overflow.
    if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(std::int64_t)) {
      if (auto* whole = std::get_if<IntSpec>(&spec))
        whole->max = std::min<std::int64_t>(whole->max, std::numeric_limits<T>::max());
    }
    owner = &typeid(S);
    read = [member](Section& section, const std::string& spelled, void* out) {
      read_value(section, spelled, static_cast<S*>(out)->*member);
    };
  }

  std::string name;
  Spec spec;
  std::string meaning;    // a sentence
  std::string otherwise;  // the default in words, if it is not the default in `spec`
  std::string form;       // the type in words, if `spec` does not fully describe it
  Effect effect;
  // The struct whose member the value is read into; null: the section's reader asks for the value itself.
  const std::type_info* owner = nullptr;
  std::function<void(Section&, const std::string& spelled, void* out)> read;

 private:
  template <class SpecType, class T>
  static void set_fallback(SpecType& s, const T& value) {
    if constexpr (requires { s.fallback = static_cast<decltype(s.fallback)>(value); })
      s.fallback = static_cast<decltype(s.fallback)>(value);
  }
};

class Keys {
 public:
  explicit Keys(std::vector<Key> rows);
  const std::vector<Key>& rows() const { return rows_; }
  // The row of a key, or for an alias the row of the key that it stands for; aborts when there is none.
  const Key& at(const std::string& name) const;

 private:
  const Key* find(const std::string& name) const;
  std::vector<Key> rows_;
};

// Groups of keys of the topmost section, each with the name of its table.
struct KeyGroup {
  const char* name;
  std::vector<Key> keys;
};
const std::vector<KeyGroup>& root_groups();
const Keys& root_keys();

// The range as messages write it: "a whole number, 1 or more".
std::string range_text(const IntSpec& spec);
// Splits a text at its spaces.
std::vector<std::string> words(std::string_view text);

}  // namespace zg::config
