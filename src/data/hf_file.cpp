#include "data/hf_file.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <unordered_map>

#include "data/shown.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/json.hpp"

namespace zg {
namespace {

using Json = nlohmann::json;

constexpr const char* kInPython = "tokenise in Python instead: tools/prepare.py";
constexpr std::int64_t kLargestId = 1 << 24;
// \w+|[^\w\s]+ with Rust's \w, which, unlike Oniguruma's, has joiners and no numbers except digits.
constexpr const char* kWords =
    "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\u200c\u200d\u24b6-\u24e9"
    "\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]+|"
    "[^\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\u200c\u200d\u24b6-\u24e9"
    "\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189\\s]+";
constexpr const char* kExpected = "the tokenizer.json of a Hugging Face model is expected";
constexpr int kDeepest = 8;  // sequences within sequences
// Limits far above any released model's file: parts of one kind, tokens that a template puts before or after
// a text, bytes of texts that are searched for, and how far ids may exceed the number of tokens.
constexpr std::size_t kMostNormalizers = 64, kMostSplits = 64, kMostReplaced = 32, kMostTemplateTokens = 1024;
constexpr std::size_t kLongestText = 1024, kMostAddedBytes = 4 << 20;
constexpr std::int64_t kSpareIds = 1'000'000;
constexpr JsonBounds kBounds = {.depth = 64, .values = 3'000'000};
constexpr std::size_t kMostTokens = 1 << 20;

class Reader {
  using Behavior = HfSplitStep::Behavior;

 public:
  explicit Reader(const std::string& name) : name_(name) {}

  HfDescription read(std::string_view text) {
    const Json root = parse_json<Json>(text, name_, kExpected, kBounds);
    if (!root.is_object() || !root.contains("model"))
      throw Error(Errc::kUsage, name_, "has no \"model\"", kExpected);
    read_model(object(root, "model", ""));
    read_added(root);
    check_ids();
    if (const Json* part = find(root, "normalizer")) read_normalizer(*part, "normalizer", 0);
    if (const Json* part = find(root, "pre_tokenizer")) read_split(*part, "pre_tokenizer", 0);
    if (const Json* part = find(root, "post_processor")) read_template(*part, "post_processor", 0);
    const Json* decoder = find(root, "decoder");
    if (decoder != nullptr) read_decoder(*decoder, "decoder", 0);
    d_.blanks_between = decoder == nullptr;
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
  static std::string json_shown(const Json& value) {
    const auto nested = [](const Json& part) { return part.is_structured(); };
    if (value.is_structured() && std::any_of(value.begin(), value.end(), nested))
      return value.is_object() ? "a larger object" : "a larger list";
    return shown(value.dump(-1, ' ', true, Json::error_handler_t::replace));
  }

  // The member; null if it is missing or null.
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
      fail(join(place, key),
           (value == nullptr ? "nothing" : json_shown(*value)) + " found, an object expected");
    }
    return *value;
  }
  const Json& list(const Json& in, const char* key, const std::string& place) const {
    const Json* value = find(in, key);
    if (value == nullptr || !value->is_array()) {
      fail(join(place, key), (value == nullptr ? "nothing" : json_shown(*value)) + " found, a list expected");
    }
    return *value;
  }
  // A string that is searched for in texts: it must be neither empty nor long.
  std::string searched(const Json& in, const char* key, const std::string& place) const {
    std::string value = text(in, key, place);
    if (value.empty()) fail(join(place, key), "is empty");
    check_length(value, join(place, key));
    return value;
  }
  void check_length(const std::string& value, const std::string& place) const {
    if (value.size() > kLongestText)
      fail(place, fmt::format("has {} bytes; {} are known here at most", value.size(), kLongestText),
           kInPython);
  }
  template <class Parts>
  void check_count(const Parts& parts, std::size_t most, const std::string& place) const {
    if (parts.size() > most)
      fail(place, fmt::format("has more than {} parts, which is not known here", most), kInPython);
  }
  std::string text(const Json& in, const char* key, const std::string& place,
                   const std::optional<std::string>& otherwise = std::nullopt) const {
    const Json* value = find(in, key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr || !value->is_string()) {
      fail(join(place, key), (value == nullptr ? "nothing" : json_shown(*value)) + " found, a text expected");
    }
    return value->get<std::string>();
  }
  bool flag(const Json& in, const char* key, const std::string& place, bool otherwise) const {
    const Json* value = find(in, key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) fail(join(place, key), json_shown(*value) + " found, true or false expected");
    return value->get<bool>();
  }
  static bool is_id(const Json& value) {
    return value.is_number_integer() && value >= 0 && value < kLargestId;
  }
  std::int32_t id(const Json& value, const std::string& place) const {
    if (!is_id(value)) {
      fail(place,
           fmt::format("{} found, a number from 0 to below {} expected", json_shown(value), kLargestId));
    }
    return value.get<std::int32_t>();
  }
  // The type of a part, and its place with the type.
  std::string type(const Json& part, const std::string& place) const {
    if (!part.is_object()) fail(place, json_shown(part) + " found, an object expected");
    return text(part, "type", place);
  }

  // Calls `use` for each part of a Sequence, in order; false if `part` is no Sequence.
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
    if (kind != "BPE") unknown("model.type", "\"" + shown(kind) + "\"", "\"BPE\"");
    if (const Json* dropout = find(model, "dropout"); dropout != nullptr && *dropout != 0)
      unknown("model.dropout", json_shown(*dropout), "none");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const std::string affix = text(model, key, place, ""); !affix.empty())
        unknown(join(place, key), "\"" + shown(affix) + "\"", "none");
    }
    d_.byte_fallback = flag(model, "byte_fallback", place, false);
    d_.fuse_unknown = flag(model, "fuse_unk", place, false);
    d_.ignore_merges = flag(model, "ignore_merges", place, false);
    const Json& vocabulary = object(model, "vocab", place);
    if (vocabulary.empty()) fail("model.vocab", "is empty");
    check_count(vocabulary, kMostTokens, "model.vocab");
    d_.tokens.reserve(vocabulary.size());
    for (auto it = vocabulary.begin(); it != vocabulary.end(); ++it) {
      const std::string& token = it.key();
      const auto where = [&] { return fmt::format("model.vocab: token \"{}\"", shown(token)); };
      if (!is_id(*it)) id(*it, where());
      const auto number = it->get<std::int32_t>();
      const auto [owner, added] = owners_.emplace(number, &token);
      if (!added)
        fail(where(), fmt::format("has the number {}, as \"{}\" has", number, shown(*owner->second)));
      d_.tokens.emplace_back(token, number);
    }
    if (const std::string token = text(model, "unk_token", place, ""); !token.empty()) {
      if (!vocabulary.contains(token))
        fail("model.unk_token", fmt::format("\"{}\" is not in model.vocab", shown(token)));
      d_.unknown = vocabulary.at(token).get<std::int32_t>();
    }
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
          wrong(fmt::format("\"{}\" found, two tokens with one blank between them expected", shown(pair)));
        left = pair.substr(0, blank), right = pair.substr(blank + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>(), right = merge[1].get<std::string>();
      } else {
        wrong(json_shown(merge) + " found, two tokens expected");
      }
      const auto number = [&](const std::string& token) {
        const auto it = vocabulary.find(token);
        if (token.empty() || it == vocabulary.end())
          wrong(fmt::format("token \"{}\" is not in model.vocab", shown(token)));
        return it->get<std::int32_t>();
      };
      d_.merges.push_back({number(left), number(right), number(left + right)});
    }
  }

  void read_added(const Json& root) {
    if (find(root, "added_tokens") == nullptr) return;
    const Json& added = list(root, "added_tokens", "");
    const Json& vocabulary = root["model"]["vocab"];
    std::map<std::string_view, std::int32_t> ids;  // of those that are not in the vocabulary
    std::set<std::string_view> seen;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < added.size(); ++i) {
      const std::string place = fmt::format("added_tokens[{}]", i);
      const Json& from = added[i];
      if (!from.is_object()) fail(place, json_shown(from) + " found, an object expected");
      AddedToken token;
      token.content = text(from, "content", place);
      check_length(token.content, place + ".content");
      token.id = id(from.contains("id") ? from["id"] : Json(), place + ".id");
      token.single_word = flag(from, "single_word", place, false);
      token.lstrip = flag(from, "lstrip", place, false);
      token.rstrip = flag(from, "rstrip", place, false);
      token.normalized = flag(from, "normalized", place, !flag(from, "special", place, false));
      if (token.content.empty()) continue;
      const auto& content = from["content"].get_ref<const std::string&>();
      const auto in_vocabulary = vocabulary.find(content);
      const std::int32_t known = in_vocabulary != vocabulary.end()
                                     ? in_vocabulary->get<std::int32_t>()
                                     : ids.emplace(content, token.id).first->second;
      const auto owner = owners_.emplace(token.id, &content).first;
      if (known != token.id || *owner->second != content) {
        fail(place,
             fmt::format("\"{}\" has the number {}, which is that of \"{}\"; its own in model.vocab is {}",
                         shown(content), token.id, shown(*owner->second), known));
      }
      if (!seen.insert(content).second) continue;
      if ((bytes += content.size()) > kMostAddedBytes) {
        fail("added_tokens", fmt::format("have more than {} bytes, which is not known here", kMostAddedBytes),
             kInPython);
      }
      d_.added.push_back(std::move(token));
    }
  }

  // A table indexed by id also has room for ids without a token, so there may not be many of them.
  void check_ids() {
    const auto count = static_cast<std::int64_t>(owners_.size());
    for (const auto& [number, token] : owners_) {
      d_.ids = std::max<std::int64_t>(d_.ids, number + 1);
      if (number >= 4 * count + kSpareIds)
        fail("model.vocab", fmt::format("token \"{}\" has the number {}, where there are {} tokens",
                                        shown(*token), number, count));
    }
  }

  void read_normalizer(const Json& part, const std::string& place, int depth) {
    const auto again = [this](const Json& p, const std::string& at, int d) { read_normalizer(p, at, d); };
    if (sequence(part, "normalizers", place, depth, again)) return;
    const std::string kind = type(part, place);
    using Kind = HfNormalizerStep::Kind;
    static const std::map<std::string, unicode::Form> forms = {{"NFC", unicode::Form::kC},
                                                               {"NFD", unicode::Form::kD},
                                                               {"NFKC", unicode::Form::kKC},
                                                               {"NFKD", unicode::Form::kKD}};
    if (const auto form = forms.find(kind); form != forms.end()) {
      d_.normalizer.push_back({.kind = Kind::kForm, .form = form->second});
    } else if (kind == "Lowercase") {
      d_.normalizer.push_back({.kind = Kind::kLowercase});
    } else if (kind == "Prepend") {
      d_.normalizer.push_back({.kind = Kind::kPrepend, .to = text(part, "prepend", place)});
      check_length(d_.normalizer.back().to, place + ".prepend");
    } else if (kind == "Replace") {
      const Json& pattern = object(part, "pattern", place);
      if (!pattern.contains("String")) unknown(place + ".pattern", json_shown(pattern), "{\"String\": ...}");
      d_.normalizer.push_back({.kind = Kind::kReplace,
                               .from = searched(pattern, "String", place + ".pattern"),
                               .to = text(part, "content", place)});
    } else {
      unknown(place + ".type", "\"" + shown(kind) + "\"",
              "NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace or a Sequence of them");
    }
    check_count(d_.normalizer, kMostNormalizers, "normalizer");
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
    } else if (kind == "Whitespace") {
      add_pattern(kWords, Behavior::kRemoved, true);  // characters that match neither are removed
    } else if (kind == "WhitespaceSplit") {
      add_pattern("\\s+", Behavior::kRemoved, false);
    } else {
      unknown(place + ".type", "\"" + shown(kind) + "\"",
              "ByteLevel, Split, Digits, Metaspace, Whitespace, WhitespaceSplit or a Sequence of them");
    }
    check_count(d_.splits, kMostSplits, "pre_tokenizer");
  }

  void add_pattern(const char* expression, HfSplitStep::Behavior behavior, bool invert) {
    d_.splits.push_back({.kind = HfSplitStep::Kind::kPattern,
                         .behavior = behavior,
                         .invert = invert,
                         .pattern = std::make_shared<const Pattern>(expression, name_)});
  }

  void read_metaspace(const Json& part, const std::string& place) {
    using Prepend = HfSplitStep::Prepend;
    if (!d_.splits.empty()) unknown(place, "Metaspace after another part", "Metaspace as the first");
    HfSplitStep step{.kind = HfSplitStep::Kind::kMetaspace};
    step.text = searched(part, "replacement", place);
    if (utf8::decode(step.text, 0).length != step.text.size())
      fail(place + ".replacement", fmt::format("\"{}\" found, one character expected", shown(step.text)));
    step.split = flag(part, "split", place, true);
    const bool old = flag(part, "add_prefix_space", place, true);  // older form of prepend_scheme
    const std::string scheme = text(part, "prepend_scheme", place, old ? "always" : "never");
    if (scheme != "always" && scheme != "first" && scheme != "never")
      unknown(place + ".prepend_scheme", "\"" + shown(scheme) + "\"", "always, first or never");
    step.prepend = scheme == "always"  ? Prepend::kAlways
                   : scheme == "first" ? Prepend::kFirst
                                       : Prepend::kNever;
    d_.splits.push_back(std::move(step));
  }

  void read_split_step(const Json& part, const std::string& place) {
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
      unknown(place + ".behavior", "\"" + shown(behavior) + "\"", "Isolated or another of five");
    step.behavior = it->second;
    step.invert = flag(part, "invert", place, false);
    const Json& pattern = object(part, "pattern", place);
    if (pattern.contains("Regex")) {
      step.kind = HfSplitStep::Kind::kPattern;
      step.pattern = std::make_shared<const Pattern>(text(pattern, "Regex", place + ".pattern"),
                                                     name_ + ": " + place + ".pattern.Regex");
    } else {
      step.text = searched(pattern, "String", place + ".pattern");
    }
    d_.splits.push_back(std::move(step));
  }

  void read_template(const Json& part, const std::string& place, int depth) {
    const auto again = [this](const Json& p, const std::string& at, int d) { read_template(p, at, d); };
    if (sequence(part, "processors", place, depth, again)) return;
    const std::string kind = type(part, place);
    if (kind == "ByteLevel") return;
    if (kind == "RobertaProcessing" || kind == "BertProcessing") {
      add_pair(part, "cls", place, d_.begin);
      add_pair(part, "sep", place, d_.end);
      return;
    }
    if (kind != "TemplateProcessing") {
      unknown(place + ".type", "\"" + shown(kind) + "\"",
              "TemplateProcessing, RobertaProcessing, BertProcessing, ByteLevel or a Sequence of them");
    }
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
      if (!items[i].is_object()) fail(at, json_shown(items[i]) + " found, an object expected");
      const std::string token = text(object(items[i], "SpecialToken", at), "id", at);
      const Json& ids = list(object(special, token.c_str(), place + ".special_tokens"), "ids", place);
      for (const Json& value : ids) add_around(value, at, after ? d_.end : d_.begin);
    }
    if (!after) fail(place + ".single", "the text is not in the template");
  }

  // ["<s>", 0]
  void add_pair(const Json& part, const char* key, const std::string& place, std::vector<std::int32_t>& to) {
    const Json& pair = list(part, key, place);
    if (pair.size() != 2)
      fail(join(place, key), json_shown(pair) + " found, a token and its number expected");
    add_around(pair[1], join(place, key), to);
  }

  void add_around(const Json& value, const std::string& place, std::vector<std::int32_t>& to) {
    const std::int32_t number = id(value, place);
    if (owners_.find(number) == owners_.end())
      fail(place, fmt::format("{} found, which is the number of no token", number));
    to.push_back(number);
    check_count(to, kMostTemplateTokens, "post_processor");
  }

  void read_decoder(const Json& part, const std::string& place, int depth) {
    const auto again = [this](const Json& p, const std::string& at, int d) { read_decoder(p, at, d); };
    if (sequence(part, "decoders", place, depth, again)) return;
    const std::string kind = type(part, place);
    if (kind == "ByteLevel" || kind == "ByteFallback" || kind == "Fuse") return;
    if (kind == "Metaspace") {
      d_.replaced.emplace_back(searched(part, "replacement", place), " ");
      const bool old = flag(part, "add_prefix_space", place, true);
      d_.strip_blank = text(part, "prepend_scheme", place, old ? "always" : "never") != "never";
    } else if (kind == "Replace" && object(part, "pattern", place).contains("String")) {
      d_.replaced.emplace_back(searched(object(part, "pattern", place), "String", place + ".pattern"),
                               text(part, "content", place));
    } else if (kind == "Strip" && text(part, "content", place) == " " && part.value("start", Json()) == 1 &&
               part.value("stop", Json()) == 0) {
      d_.strip_blank = true;
    } else {
      unknown(
          place, json_shown(part),
          "ByteLevel, ByteFallback, Fuse, Replace of a text, Metaspace, Strip of one blank at the start or a "
          "Sequence of them");
    }
    check_count(d_.replaced, kMostReplaced, "decoder");
  }

  const std::string& name_;
  HfDescription d_;
  std::unordered_map<std::int32_t, const std::string*> owners_;  // the token of each id
};

}  // namespace

HfDescription read_hf_tokenizer(std::string_view json, const std::string& name) {
  return Reader(name).read(json);
}

}  // namespace zg
