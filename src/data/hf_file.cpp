#include "data/hf_file.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

using Json = nlohmann::json;

constexpr const char* kInPython = "tokenise in Python instead: tools/prepare.py";
constexpr std::int64_t kLargestId = 1 << 24;
constexpr int kDeepest = 8;  // sequences within sequences

class Reader {
 public:
  explicit Reader(const std::string& name) : name_(name) {}

  HfDescription read(std::string_view text) {
    Json root;
    try {
      root = Json::parse(text);
    } catch (const Json::exception& e) {
      throw Error(Errc::kUsage, name_, fmt::format("is no JSON: {}", e.what()),
                  "the tokenizer.json of a Hugging Face model is expected");
    }
    if (!root.is_object() || !root.contains("model")) {
      throw Error(Errc::kUsage, name_, "has no \"model\"",
                  "the tokenizer.json of a Hugging Face model is expected");
    }
    read_model(object(root, "model", ""));
    read_added(root);
    if (const Json* part = find(root, "normalizer")) read_normalizer(*part, "normalizer", 0);
    if (const Json* part = find(root, "pre_tokenizer")) read_split(*part, "pre_tokenizer", 0);
    if (const Json* part = find(root, "post_processor")) read_template(*part, "post_processor", 0);
    if (const Json* part = find(root, "decoder")) read_decoder(*part, "decoder", 0);
    return std::move(d_);
  }

 private:
  [[noreturn]] void fail(const std::string& place, const std::string& what,
                         const std::string& hint = {}) const {
    throw Error(Errc::kUsage, name_, place + ": " + what, hint);
  }
  [[noreturn]] void unknown(const std::string& place, const std::string& found, const char* known) const {
    fail(place, fmt::format("{} found; {} is known here", found, known), kInPython);
  }
  static std::string shown(const Json& value) {
    const auto nested = [](const Json& part) { return part.is_structured(); };
    if (value.is_structured() && std::any_of(value.begin(), value.end(), nested))
      return value.is_object() ? "a larger object" : "a larger list";
    const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= 60 ? text : text.substr(0, 60) + "...";
  }

  // The member, or null where it is missing or null.
  static const Json* find(const Json& in, const char* key) {
    const auto it = in.find(key);
    return it == in.end() || it->is_null() ? nullptr : &*it;
  }
  static std::string join(const std::string& place, const std::string& key) {
    return place.empty() ? key : place + "." + key;
  }
  const Json& object(const Json& in, const char* key, const std::string& place) const {
    const Json* value = find(in, key);
    if (value == nullptr || !value->is_object()) {
      fail(join(place, key), (value == nullptr ? "nothing" : shown(*value)) + " found, an object expected");
    }
    return *value;
  }
  const Json& list(const Json& in, const char* key, const std::string& place) const {
    const Json* value = find(in, key);
    if (value == nullptr || !value->is_array()) {
      fail(join(place, key), (value == nullptr ? "nothing" : shown(*value)) + " found, a list expected");
    }
    return *value;
  }
  std::string text(const Json& in, const char* key, const std::string& place,
                   const std::optional<std::string>& otherwise = std::nullopt) const {
    const Json* value = find(in, key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr || !value->is_string()) {
      fail(join(place, key), (value == nullptr ? "nothing" : shown(*value)) + " found, a text expected");
    }
    return value->get<std::string>();
  }
  bool flag(const Json& in, const char* key, const std::string& place, bool otherwise) const {
    const Json* value = find(in, key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) fail(join(place, key), shown(*value) + " found, true or false expected");
    return value->get<bool>();
  }
  std::int32_t id(const Json& value, const std::string& place) const {
    if (!value.is_number_integer() || value < 0 || value >= kLargestId) {
      fail(place, fmt::format("{} found, a number from 0 to below {} expected", shown(value), kLargestId));
    }
    return value.get<std::int32_t>();
  }
  // The type of a part, and its place with the type.
  std::string type(const Json& part, const std::string& place) const {
    if (!part.is_object()) fail(place, shown(part) + " found, an object expected");
    return text(part, "type", place);
  }

  // Parts that a Sequence holds, one after the other; false: it is none.
  template <class Use>
  bool sequence(const Json& part, const char* key, const std::string& place, int depth,
                const Use& use) const {
    if (type(part, place) != "Sequence") return false;
    if (depth >= kDeepest) fail(place, "sequences within sequences, too many");
    const Json& parts = list(part, key, place);
    for (std::size_t i = 0; i < parts.size(); ++i)
      use(parts[i], fmt::format("{}.{}[{}]", place, key, i), depth + 1);
    return true;
  }

  void read_model(const Json& model) {
    const std::string place = "model";
    const std::string kind = text(model, "type", place, model.contains("merges") ? "BPE" : "none");
    if (kind != "BPE") unknown("model.type", "\"" + kind + "\"", "\"BPE\"");
    if (const Json* dropout = find(model, "dropout"); dropout != nullptr && *dropout != 0)
      unknown("model.dropout", shown(*dropout), "none");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const std::string affix = text(model, key, place, ""); !affix.empty())
        unknown(join(place, key), "\"" + affix + "\"", "none");
    }
    d_.unknown = text(model, "unk_token", place, "");
    d_.byte_fallback = flag(model, "byte_fallback", place, false);
    d_.fuse_unknown = flag(model, "fuse_unk", place, false);
    d_.ignore_merges = flag(model, "ignore_merges", place, false);
    const Json& vocabulary = object(model, "vocab", place);
    if (vocabulary.empty()) fail("model.vocab", "is empty");
    std::map<std::int32_t, std::string> owners;
    for (const auto& [token, value] : vocabulary.items()) {
      const std::string where = fmt::format("model.vocab: token \"{}\"", token);
      const std::int32_t number = id(value, where);
      const auto [it, added] = owners.emplace(number, token);
      if (!added) fail(where, fmt::format("has the number {}, as \"{}\" has", number, it->second));
      d_.tokens.emplace_back(token, number);
    }
    if (!d_.unknown.empty() && !vocabulary.contains(d_.unknown))
      fail("model.unk_token", fmt::format("\"{}\" is not in model.vocab", d_.unknown));
    read_merges(model, vocabulary);
  }

  void read_merges(const Json& model, const Json& vocabulary) {
    const Json& merges = list(model, "merges", "model");
    d_.merges.reserve(merges.size());
    for (std::size_t i = 0; i < merges.size(); ++i) {
      const Json& merge = merges[i];
      const auto wrong = [&](const std::string& what) { fail(fmt::format("model.merges[{}]", i), what); };
      std::string left, right;
      if (merge.is_string()) {
        const auto& pair = merge.get_ref<const std::string&>();
        const std::size_t blank = pair.find(' ');
        if (blank == std::string::npos || pair.find(' ', blank + 1) != std::string::npos)
          wrong(fmt::format("\"{}\" found, two tokens with one blank between them expected", pair));
        left = pair.substr(0, blank), right = pair.substr(blank + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>(), right = merge[1].get<std::string>();
      } else {
        wrong(shown(merge) + " found, two tokens expected");
      }
      for (const std::string& token : {left, right, left + right}) {
        if (token.empty() || !vocabulary.contains(token))
          wrong(fmt::format("token \"{}\" is not in model.vocab", token));
      }
      d_.merges.emplace_back(std::move(left), std::move(right));
    }
  }

  void read_added(const Json& root) {
    if (find(root, "added_tokens") == nullptr) return;
    const Json& added = list(root, "added_tokens", "");
    std::map<std::string, std::int32_t> ids(d_.tokens.begin(), d_.tokens.end());
    std::set<std::string> seen;
    std::map<std::int32_t, std::string> owners;
    for (const auto& [token, number] : d_.tokens) owners.emplace(number, token);
    for (std::size_t i = 0; i < added.size(); ++i) {
      const std::string place = fmt::format("added_tokens[{}]", i);
      const Json& from = added[i];
      if (!from.is_object()) fail(place, shown(from) + " found, an object expected");
      AddedToken token;
      token.content = text(from, "content", place);
      token.id = id(from.contains("id") ? from["id"] : Json(), place + ".id");
      token.single_word = flag(from, "single_word", place, false);
      token.lstrip = flag(from, "lstrip", place, false);
      token.rstrip = flag(from, "rstrip", place, false);
      token.normalized = flag(from, "normalized", place, !flag(from, "special", place, false));
      if (token.content.empty()) continue;
      const auto known = ids.emplace(token.content, token.id).first;
      const auto owner = owners.emplace(token.id, token.content).first;
      if (known->second != token.id || owner->second != token.content) {
        fail(place,
             fmt::format("\"{}\" has the number {}, which is that of \"{}\"; its own in model.vocab is {}",
                         token.content, token.id, owner->second, known->second));
      }
      if (seen.insert(token.content).second) d_.added.push_back(std::move(token));
    }
  }

  void read_normalizer(const Json& part, const std::string& place, int depth) {
    const auto again = [this](const Json& p, const std::string& at, int d) { read_normalizer(p, at, d); };
    if (sequence(part, "normalizers", place, depth, again)) return;
    const std::string kind = type(part, place);
    using Kind = HfNormalizerStep::Kind;
    if (kind == "NFC") {
      d_.normalizer.push_back({Kind::kNfc, {}, {}});
    } else if (kind == "Prepend") {
      d_.normalizer.push_back({Kind::kPrepend, {}, text(part, "prepend", place)});
    } else if (kind == "Replace") {
      const Json& pattern = object(part, "pattern", place);
      if (!pattern.contains("String")) unknown(place + ".pattern", shown(pattern), "{\"String\": ...}");
      HfNormalizerStep step{Kind::kReplace, text(pattern, "String", place + ".pattern"),
                            text(part, "content", place)};
      if (step.from.empty()) fail(place + ".pattern.String", "is empty");
      d_.normalizer.push_back(std::move(step));
    } else {
      unknown(place + ".type", "\"" + kind + "\"", "NFC, Prepend, Replace or a Sequence of them");
    }
  }

  void read_split(const Json& part, const std::string& place, int depth) {
    const auto again = [this](const Json& p, const std::string& at, int d) { read_split(p, at, d); };
    if (sequence(part, "pretokenizers", place, depth, again)) return;
    if (d_.bytes) fail(place, "stands after ByteLevel, which must be the last", kInPython);
    const std::string kind = type(part, place);
    if (kind == "ByteLevel") {
      d_.bytes = true;
      d_.prefix_space = flag(part, "add_prefix_space", place, true);
      if (d_.prefix_space && !d_.splits.empty())
        unknown(place + ".add_prefix_space", "true after another part", "false");
      if (flag(part, "use_regex", place, true)) d_.splits.push_back({.kind = HfSplitStep::Kind::kGpt2});
    } else if (kind == "Digits") {
      const bool each = flag(part, "individual_digits", place, false);
      d_.splits.push_back({.kind = each ? HfSplitStep::Kind::kEachDigit : HfSplitStep::Kind::kDigits});
    } else if (kind == "Metaspace") {
      read_metaspace(part, place);
    } else if (kind == "Split") {
      read_split_step(part, place);
    } else {
      unknown(place + ".type", "\"" + kind + "\"",
              "ByteLevel, Split, Digits, Metaspace or a Sequence of them");
    }
  }

  void read_metaspace(const Json& part, const std::string& place) {
    using Prepend = HfSplitStep::Prepend;
    if (!d_.splits.empty()) unknown(place, "Metaspace after another part", "Metaspace as the first");
    HfSplitStep step{.kind = HfSplitStep::Kind::kMetaspace};
    step.text = text(part, "replacement", place);
    if (step.text.empty()) fail(place + ".replacement", "is empty");
    step.split = flag(part, "split", place, true);
    const bool old = flag(part, "add_prefix_space", place, true);  // what files had before prepend_scheme
    const std::string scheme = text(part, "prepend_scheme", place, old ? "always" : "never");
    if (scheme != "always" && scheme != "first" && scheme != "never")
      unknown(place + ".prepend_scheme", "\"" + scheme + "\"", "always, first or never");
    step.prepend = scheme == "always"  ? Prepend::kAlways
                   : scheme == "first" ? Prepend::kFirst
                                       : Prepend::kNever;
    d_.splits.push_back(std::move(step));
  }

  void read_split_step(const Json& part, const std::string& place) {
    using Behavior = HfSplitStep::Behavior;
    static const std::map<std::string, Behavior> behaviors = {
        {"Isolated", Behavior::kIsolated},
        {"Removed", Behavior::kRemoved},
        {"MergedWithPrevious", Behavior::kMergedWithPrevious},
        {"MergedWithNext", Behavior::kMergedWithNext},
        {"Contiguous", Behavior::kContiguous}};
    HfSplitStep step{.kind = HfSplitStep::Kind::kText};
    const std::string behavior = text(part, "behavior", place);
    const auto it = behaviors.find(behavior);
    if (it == behaviors.end())
      unknown(place + ".behavior", "\"" + behavior + "\"", "Isolated or another of five");
    step.behavior = it->second;
    step.invert = flag(part, "invert", place, false);
    const Json& pattern = object(part, "pattern", place);
    if (pattern.contains("Regex")) {
      step.kind = HfSplitStep::Kind::kPattern;
      step.pattern = std::make_shared<const Pattern>(text(pattern, "Regex", place + ".pattern"),
                                                     name_ + ": " + place + ".pattern.Regex");
    } else {
      step.text = text(pattern, "String", place + ".pattern");
      if (step.text.empty()) fail(place + ".pattern.String", "is empty");
    }
    d_.splits.push_back(std::move(step));
  }

  void read_template(const Json& part, const std::string& place, int depth) {
    const auto again = [this](const Json& p, const std::string& at, int d) { read_template(p, at, d); };
    if (sequence(part, "processors", place, depth, again)) return;
    const std::string kind = type(part, place);
    if (kind == "ByteLevel") return;
    if (kind != "TemplateProcessing")
      unknown(place + ".type", "\"" + kind + "\"", "TemplateProcessing, ByteLevel or a Sequence of them");
    const Json& items = list(part, "single", place);
    const Json& special = object(part, "special_tokens", place);
    bool after = false;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const std::string at = fmt::format("{}.single[{}]", place, i);
      if (items[i].is_object() && items[i].contains("Sequence")) {
        if (after) fail(at, "the text stands in the template twice");
        after = true;
        continue;
      }
      if (!items[i].is_object()) fail(at, shown(items[i]) + " found, an object expected");
      const std::string token = text(object(items[i], "SpecialToken", at), "id", at);
      const Json& ids = list(object(special, token.c_str(), place + ".special_tokens"), "ids", place);
      for (const Json& value : ids) (after ? d_.end : d_.begin).push_back(id(value, at));
    }
    if (!after) fail(place + ".single", "the text is not in the template");
  }

  void read_decoder(const Json& part, const std::string& place, int depth) {
    const auto again = [this](const Json& p, const std::string& at, int d) { read_decoder(p, at, d); };
    if (sequence(part, "decoders", place, depth, again)) return;
    const std::string kind = type(part, place);
    if (kind == "ByteLevel" || kind == "ByteFallback" || kind == "Fuse") return;
    if (kind == "Metaspace") {
      d_.replaced.emplace_back(text(part, "replacement", place), " ");
      const bool old = flag(part, "add_prefix_space", place, true);
      d_.strip_blank = text(part, "prepend_scheme", place, old ? "always" : "never") != "never";
    } else if (kind == "Replace" && object(part, "pattern", place).contains("String")) {
      d_.replaced.emplace_back(text(object(part, "pattern", place), "String", place + ".pattern"),
                               text(part, "content", place));
    } else if (kind == "Strip" && text(part, "content", place) == " " && part.value("start", Json()) == 1 &&
               part.value("stop", Json()) == 0) {
      d_.strip_blank = true;
    } else {
      unknown(
          place, shown(part),
          "ByteLevel, ByteFallback, Fuse, Replace of a text, Metaspace, Strip of one blank at the start or a "
          "Sequence of them");
    }
    if (!d_.replaced.empty() && d_.replaced.back().first.empty()) fail(place, "replaces an empty text");
  }

  const std::string& name_;
  HfDescription d_;
};

}  // namespace

HfDescription read_hf_tokenizer(std::string_view json, const std::string& name) {
  return Reader(name).read(json);
}

}  // namespace zg
