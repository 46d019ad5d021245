#include <fmt/format.h>

#include <cctype>

#include "config/sections.hpp"
#include "ziggurat/config/keys.hpp"
#include "ziggurat/model/keys.hpp"

namespace zg {
namespace config {
namespace {

std::string code(const std::string& text) {
  return "`" + text + "`";
}

std::string or_auto(std::string type, Auto autos) {
  return autos == Auto::kRefused ? type : type + ", or `\"auto\"`";
}

// Drops the article of "a whole number, 1 or more", which a column of types need not repeat.
std::string without_article(const std::string& text) {
  return text.rfind("a ", 0) == 0 ? text.substr(2) : text;
}

// Makes a sentence, with capital and full stop, of a meaning, or of a reason as it follows "has no effect: ".
std::string sentence(std::string text) {
  const std::size_t end = text.find_first_of(" ,:;");
  const bool name = text.substr(0, end).find_first_of("._\"`") != std::string::npos;
  if (!name) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text.back() == '.' ? text : text + ".";
}

struct TypeText {
  std::string operator()(const IntSpec& s) const { return or_auto(without_article(range_text(s)), s.autos); }
  std::string operator()(const NumberSpec& s) const {
    return or_auto(without_article(s.range.text), s.autos);
  }
  std::string operator()(const BoolSpec& s) const { return or_auto("`true`, `false`", s.autos); }
  std::string operator()(const TextSpec&) const { return "text"; }
  std::string operator()(const BytesSpec&) const { return "size"; }
  std::string operator()(const ChoiceSpec& s) const {
    return fmt::format("`\"{}\"`", fmt::join(s.names, "\"`, `\""));
  }
  std::string operator()(const SectionSpec&) const { return "object"; }
  std::string operator()(const ListSpec&) const { return "list of objects"; }
  template <class T>
  std::string operator()(const T&) const {
    return "";
  }
};

struct DefaultText {
  std::string operator()(const IntSpec& s) const { return code(fmt::format("{}", s.fallback)); }
  std::string operator()(const NumberSpec& s) const { return code(fmt::format("{}", s.fallback)); }
  std::string operator()(const BoolSpec& s) const { return code(s.fallback ? "true" : "false"); }
  std::string operator()(const TextSpec& s) const { return code(fmt::format("\"{}\"", s.fallback)); }
  std::string operator()(const ChoiceSpec& s) const { return code(fmt::format("\"{}\"", s.fallback_name())); }
  template <class T>
  std::string operator()(const T&) const {
    return "none";
  }
};

class Tables {
 public:
  std::vector<KeyTable> make() {
    for (const KeyGroup& group : root_groups()) add(group.name, "", group.keys);
    tables_.push_back(std::move(no_effect_));
    tables_.push_back(std::move(refused_));
    return std::move(tables_);
  }

 private:
  // The section behind a key whose keys get a table of their own; null if the row describes it in words.
  static const SectionSpec* section_of(const Key& key) {
    return key.form.empty() ? std::get_if<SectionSpec>(&key.spec) : nullptr;
  }

  void add(const std::string& name, const std::string& path, const std::vector<Key>& keys) {
    const auto whole = [&](const Key& key) { return path.empty() ? key.name : path + "." + key.name; };
    KeyTable table{name, {"key", "type", "default", "meaning"}, {}};
    for (const Key& key : keys) {
      if (section_of(key) == nullptr && !without_effect(whole(key), key) && !refused(whole(key), key)) {
        table.rows.push_back(row_of(whole(key), key));
      }
    }
    if (!table.rows.empty()) tables_.push_back(std::move(table));
    for (const Key& key : keys) {
      if (const SectionSpec* section = section_of(key)) add(whole(key), whole(key), section->keys().rows());
      if (const auto* list = std::get_if<ListSpec>(&key.spec)) {
        add(whole(key), whole(key) + "[]", list->keys().rows());
      }
    }
    if (name == "model") {
      for (const Arch arch : kFamilies) add_family(std::string("model.") + name_of(arch), arch);
    }
  }

  void add_family(const std::string& name, Arch arch) {
    KeyTable table{name, {"key", "type", "default", "meaning"}, {}};
    for (const ModelKey& key : model_keys(arch)) {
      const std::string& fallback = key.fallback;
      const bool json = fallback.find(' ') == std::string::npos && fallback != "required";
      table.rows.push_back({code(std::string("model.") + key.name), key.type,
                            json ? code(fallback) : fallback, sentence(key.meaning)});
    }
    tables_.push_back(std::move(table));
  }

  static std::vector<std::string> row_of(const std::string& whole, const Key& key) {
    if (const auto* alias = std::get_if<AliasSpec>(&key.spec)) {
      return {code(whole), "as " + code(alias->of), "", sentence(key.meaning)};
    }
    return {code(whole), key.form.empty() ? std::visit(TypeText{}, key.spec) : key.form,
            key.otherwise.empty() ? std::visit(DefaultText{}, key.spec) : key.otherwise,
            sentence(key.meaning)};
  }

  bool without_effect(const std::string& whole, const Key& key) {
    const auto* ignored = std::get_if<IgnoredSpec>(&key.spec);
    const auto* feature = std::get_if<FeatureSpec>(&key.spec);
    const bool warns = feature != nullptr && feature->when_on == FeatureSpec::WhenOn::kWarn;
    if (key.effect == Effect::kHas && ignored == nullptr && !warns) return false;
    const bool silent = ignored != nullptr && ignored->warns == IgnoredSpec::Warns::kNever;
    no_effect_.rows.push_back({code(whole), sentence(key.meaning + (silent ? " (no warning)" : ""))});
    return true;
  }

  bool refused(const std::string& whole, const Key& key) {
    if (std::holds_alternative<FeatureSpec>(key.spec)) {
      refused_.rows.push_back({code(whole + ".enabled"), "It is not supported.", sentence(key.meaning)});
      return true;
    }
    const auto* spec = std::get_if<RefusedSpec>(&key.spec);
    if (spec == nullptr) return false;
    const char* above = spec->form == RefusedSpec::Form::kDegree ? " above 1" : "";
    refused_.rows.push_back({code(whole) + above, sentence(spec->why), sentence(key.meaning)});
    return true;
  }

  std::vector<KeyTable> tables_;
  KeyTable no_effect_{"deepspeed-no-effect", {"key", "why it has no effect"}, {}};
  KeyTable refused_{"deepspeed-refused", {"key", "why it is refused", "instead"}, {}};
};

}  // namespace
}  // namespace config

std::vector<KeyTable> config_key_tables() {
  return config::Tables().make();
}

}  // namespace zg
