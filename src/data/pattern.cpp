#include "data/pattern.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "data/shown.hpp"
#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

using unicode::bit;
using unicode::Category;

constexpr std::uint32_t kNoLimit = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kLargestCount = 1000;
constexpr std::size_t kMostSteps = 4096, kMostBytes = 16384, kMostRanges = 256;
constexpr std::size_t kShown = 200;  // bytes of an expression in an error

void add_ascii(CharSet& set, char32_t first, char32_t last) {
  for (char32_t c = first; c <= last && c < 128; ++c) set.ascii[c >> 6] |= std::uint64_t{1} << (c & 63);
}

void add_range(CharSet& set, char32_t first, char32_t last) {
  add_ascii(set, first, last);
  if (last >= 128) set.ranges.emplace_back(std::max<char32_t>(first, 128), last);
}

void add_categories(CharSet& set, unicode::CategorySet categories) {
  set.categories |= categories;
  for (char32_t c = 0; c < 128; ++c) {
    if ((unicode::category_bit(c) & categories) != 0) add_ascii(set, c, c);
  }
}

void add_spaces(CharSet& set) {
  set.space = true;
  for (char32_t c = 0; c < 128; ++c) {
    if (unicode::is_space(c)) add_ascii(set, c, c);
  }
}

// \w as in Oniguruma: letters, marks, digits, connectors, symbols that are Alphabetic, and the other numbers
// of Latin-1.
void add_word(CharSet& set) {
  add_categories(
      set, unicode::kLetter | unicode::kMark | bit(Category::kNd) | bit(Category::kNl) | bit(Category::kPc));
  for (const auto& [first, last] : {std::pair<char32_t, char32_t>{0xB2, 0xB3},
                                    {0xB9, 0xB9},
                                    {0xBC, 0xBE},
                                    {0x24B6, 0x24E9},
                                    {0x1F130, 0x1F149},
                                    {0x1F150, 0x1F169},
                                    {0x1F170, 0x1F189}})
    add_range(set, first, last);
}

void negate(CharSet& set) {
  for (std::uint64_t& word : set.ascii) word = ~word;
  set.negated = !set.negated;
}

std::optional<unicode::CategorySet> categories_named(std::string_view name) {
  static const std::map<std::string_view, unicode::CategorySet> names = {
      {"L", unicode::kLetter},      {"M", unicode::kMark},      {"N", unicode::kNumber},
      {"P", unicode::kPunctuation}, {"S", unicode::kSymbol},    {"Z", unicode::kSeparator},
      {"C", unicode::kControl},     {"Lu", bit(Category::kLu)}, {"Ll", bit(Category::kLl)},
      {"Lt", bit(Category::kLt)},   {"Lm", bit(Category::kLm)}, {"Lo", bit(Category::kLo)},
      {"Mn", bit(Category::kMn)},   {"Mc", bit(Category::kMc)}, {"Me", bit(Category::kMe)},
      {"Nd", bit(Category::kNd)},   {"Nl", bit(Category::kNl)}, {"No", bit(Category::kNo)},
      {"Pc", bit(Category::kPc)},   {"Pd", bit(Category::kPd)}, {"Ps", bit(Category::kPs)},
      {"Pe", bit(Category::kPe)},   {"Pi", bit(Category::kPi)}, {"Pf", bit(Category::kPf)},
      {"Po", bit(Category::kPo)},   {"Sm", bit(Category::kSm)}, {"Sc", bit(Category::kSc)},
      {"Sk", bit(Category::kSk)},   {"So", bit(Category::kSo)}, {"Zs", bit(Category::kZs)}};
  const auto it = names.find(name);
  return it == names.end() ? std::nullopt : std::optional(it->second);
}

}  // namespace

bool CharSet::has_wide(char32_t code) const {
  bool in = categories != 0 && (unicode::category_bit(code) & categories) != 0;
  in = in || (space && unicode::is_space(code));
  for (std::size_t i = 0; !in && i < ranges.size(); ++i)
    in = code >= ranges[i].first && code <= ranges[i].second;
  return in != negated;
}

// Recursive descent over the expression, writing steps as it goes.
class Pattern::Parser {
 public:
  Parser(Pattern& pattern, std::string_view text, const std::string& where)
      : p_(pattern), text_(text), where_(where) {}

  void parse() {
    if (text_.size() > kMostBytes)
      refuse(fmt::format("has {} bytes; {} are known here at most", text_.size(), kMostBytes));
    do {
      p_.alternatives_.push_back(next());
      sequence();
      add({.op = Op::kMatch});
    } while (take('|'));
    if (at_ < text_.size()) fail("a parenthesis without its partner");
    if (p_.alternatives_.size() > 32) fail("more than 32 alternatives");
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(Errc::kUsage, where_,
                fmt::format("the regular expression \"{}\" {}", shown(text_, kShown), why),
                "tokenise in Python instead: tools/prepare.py");
  }
  [[noreturn]] void fail(const std::string& what) const {
    refuse(fmt::format("has {} at its byte {}, which is not known here", what, at_));
  }
  std::uint32_t next() const { return static_cast<std::uint32_t>(p_.steps_.size()); }
  std::uint32_t add(const Step& step) {
    if (p_.steps_.size() >= kMostSteps)
      refuse(fmt::format("has more than {} steps, which is not known here", kMostSteps));
    p_.steps_.push_back(step);
    return next() - 1;
  }
  bool take(std::string_view what) {
    if (text_.substr(at_, what.size()) != what) return false;
    at_ += what.size();
    return true;
  }
  bool take(char c) { return take(std::string_view(&c, 1)); }
  bool at_end() const { return at_ >= text_.size(); }

  void sequence() {
    while (!at_end() && text_[at_] != '|' && text_[at_] != ')') element();
  }

  void element() {
    if (take("(?!")) return not_ahead();
    if (take("(?i:")) return group(true);
    if (take("(?:")) return group(false);
    if (text_[at_] == '(' && text_.substr(at_, 2) != "(?") {
      ++at_;
      return group(false);
    }
    if (text_[at_] == '(') fail("a group of another kind");
    Step step{.op = Op::kSet, .a = add_set(atom())};
    if (!quantifier(step.min, step.max)) {
      add(step);
      return;
    }
    step.op = Op::kRun;
    // After {n,m} Oniguruma takes a plus for another repetition.
    step.possessive = text_[at_ - 1] != '}' && take('+');
    if (!at_end() && (text_[at_] == '?' || text_[at_] == '+')) fail("a lazy or doubled repetition");
    add(step);
  }

  void not_ahead() {
    Step step{.op = Op::kNotAhead, .a = add_set(atom())};
    if (!take(')')) fail("(?!...) of more than one character");
    add(step);
  }

  // Compiles a group: a split selects an alternative, and each alternative ends with a jump to the group's
  // end.
  void group(bool ignore_case) {
    const bool outer = std::exchange(ignore_case_, ignore_case || ignore_case_);
    if (++depth_ > 16) fail("groups within groups, too many");
    const std::uint32_t before = add({.op = Op::kSplit});  // for a question mark behind the group
    std::vector<std::uint32_t> jumps;
    while (true) {
      const std::uint32_t split = add({.op = Op::kSplit});
      p_.steps_[split].a = next();
      sequence();
      jumps.push_back(add({.op = Op::kJump}));
      if (!take('|')) {
        p_.steps_[split].op = Op::kJump;  // the last has no other way
        break;
      }
      p_.steps_[split].b = next();
    }
    if (!take(')')) fail("a parenthesis without its partner");
    --depth_;
    ignore_case_ = outer;
    const bool optional = take('?');
    if (!at_end() && (text_[at_] == '*' || text_[at_] == '+' || text_[at_] == '{' || text_[at_] == '?'))
      fail("a repeated group");
    for (const std::uint32_t jump : jumps) p_.steps_[jump].a = next();
    p_.steps_[before] = optional ? Step{.op = Op::kSplit, .a = before + 1, .b = next()}
                                 : Step{.op = Op::kJump, .a = before + 1};
  }

  bool quantifier(std::uint32_t& min, std::uint32_t& max) {
    if (take('?')) {
      min = 0, max = 1;
    } else if (take('*')) {
      min = 0, max = kNoLimit;
    } else if (take('+')) {
      min = 1, max = kNoLimit;
    } else if (take('{')) {
      min = number();
      max = take(',') ? (!at_end() && text_[at_] == '}' ? kNoLimit : number()) : min;
      if (!take('}') || max < min || max == 0) fail("a count that is none");
    } else {
      return false;
    }
    return true;
  }

  std::uint32_t number() {
    const std::size_t begin = at_;
    std::uint32_t n = 0;
    while (!at_end() && text_[at_] >= '0' && text_[at_] <= '9' && n <= kLargestCount)
      n = 10 * n + static_cast<std::uint32_t>(text_[at_++] - '0');
    if (at_ == begin || n > kLargestCount) fail("a count that is none");
    return n;
  }

  std::uint32_t add_set(CharSet set) {
    if (set.ranges.size() > kMostRanges) fail(fmt::format("a class of more than {} ranges", kMostRanges));
    p_.sets_.push_back(std::move(set));
    return static_cast<std::uint32_t>(p_.sets_.size() - 1);
  }

  char32_t character() {
    const utf8::Decoded c = utf8::decode(text_, at_);
    if (c.length == 0) fail("bytes that are no UTF-8");
    at_ += c.length;
    return c.code;
  }

  CharSet one(char32_t code) const {
    CharSet set;
    add_range(set, code, code);
    if (!ignore_case_) return set;
    if (code >= 'a' && code <= 'z') add_ascii(set, code - 32, code - 32);
    if (code >= 'A' && code <= 'Z') add_ascii(set, code + 32, code + 32);
    // The two characters beyond ASCII that fold to ASCII: the long s and the sign of kelvin.
    if (code == 's' || code == 'S') add_range(set, 0x17F, 0x17F);
    if (code == 'k' || code == 'K') add_range(set, 0x212A, 0x212A);
    return set;
  }

  CharSet atom() {
    if (at_end()) fail("an end where a character is expected");
    if (take('[')) return bracket();
    if (take('\\')) return escape(false);
    if (std::string_view("^$.*+?{}()|").find(text_[at_]) != std::string_view::npos)
      fail(fmt::format("'{}'", text_[at_]));
    const char32_t code = character();
    if (ignore_case_ && code >= 128) fail("a character beyond ASCII whose case is ignored");
    return one(code);
  }

  // Parses the rest of an escape, after its backslash.
  CharSet escape(bool in_bracket) {
    if (at_end()) fail("a backslash at its end");
    CharSet set;
    const char c = text_[at_++];
    switch (c) {
      case 's':
        add_spaces(set);
        return set;
      case 'd':
        add_categories(set, bit(Category::kNd));
        return set;
      case 'w':
        add_word(set);
        return set;
      case 'S':
      case 'D':
      case 'W':
        if (in_bracket) fail("a complement within brackets");
        if (c == 'W') add_word(set);
        if (c == 'S') add_spaces(set);
        if (c == 'D') add_categories(set, bit(Category::kNd));
        negate(set);
        return set;
      case 'p':
      case 'P':
        return property(c == 'P', in_bracket);
      default:
        break;
    }
    const auto code = static_cast<unsigned char>(c);
    if ((code | 32) >= 'a' && (code | 32) <= 'z') {
      if (c != 'n' && c != 'r' && c != 't' && c != 'f' && c != 'v') fail(fmt::format("\\{}", c));
      const char32_t control = c == 'n' ? '\n' : c == 'r' ? '\r' : c == 't' ? '\t' : c == 'f' ? '\f' : '\v';
      add_range(set, control, control);
      return set;
    }
    if (code >= 128 || (code >= '0' && code <= '9')) fail("a backslash before this");
    add_range(set, code, code);
    return set;
  }

  CharSet property(bool complement, bool in_bracket) {
    if (complement && in_bracket) fail("a complement within brackets");
    if (!take('{')) fail("\\p without its braces");
    const std::size_t end = text_.find('}', at_);
    const std::string_view name = text_.substr(at_, end == std::string_view::npos ? end : end - at_);
    const auto categories = categories_named(name);
    if (end == std::string_view::npos || !categories) fail(fmt::format("the property \"{}\"", name));
    at_ = end + 1;
    CharSet set;
    add_categories(set, *categories);
    if (complement) negate(set);
    return set;
  }

  CharSet bracket() {
    if (ignore_case_) return insensitive_bracket();
    const bool complement = take('^');
    CharSet set;
    bool first = true;
    while (first || !take(']')) {
      if (at_end()) fail("a bracket without its partner");
      if (text_[at_] == '[' || text_.substr(at_, 2) == "&&") fail("an operation on classes");
      first = false;
      CharSet item = take('\\') ? escape(true) : one(character());
      const bool single = item.categories == 0 && !item.space;
      if (single && text_.substr(at_, 1) == "-" && text_.substr(at_, 2) != "-]") {
        ++at_;
        const CharSet last = take('\\') ? escape(true) : one(character());
        if (last.categories != 0 || last.space || code_of(last) < code_of(item))
          fail("a range of no characters");
        add_range(set, code_of(item), code_of(last));
        continue;
      }
      set.ascii[0] |= item.ascii[0], set.ascii[1] |= item.ascii[1];
      set.categories |= item.categories;
      set.space = set.space || item.space;
      set.ranges.insert(set.ranges.end(), item.ranges.begin(), item.ranges.end());
    }
    if (complement) negate(set);
    return set;
  }

  // A bracket of ASCII letters, as in '(?i:[sdmt]|ll|ve|re).
  CharSet insensitive_bracket() {
    CharSet set;
    while (!at_end() && (text_[at_] | 32) >= 'a' && (text_[at_] | 32) <= 'z') {
      const CharSet item = one(character());
      set.ascii[0] |= item.ascii[0], set.ascii[1] |= item.ascii[1];
      set.ranges.insert(set.ranges.end(), item.ranges.begin(), item.ranges.end());
    }
    if (!take(']')) fail("a class of other than letters whose case is ignored");
    return set;
  }

  // The only character of a set.
  static char32_t code_of(const CharSet& set) {
    for (char32_t c = 0; c < 128; ++c) {
      if (set.has_ascii(static_cast<unsigned char>(c))) return c;
    }
    return set.ranges.front().first;
  }

  Pattern& p_;
  std::string_view text_;
  const std::string& where_;
  std::size_t at_ = 0;
  int depth_ = 0;
  bool ignore_case_ = false;
};

Pattern::Pattern(std::string_view expression, const std::string& where)
    : expression_(expression), where_(where) {
  Parser(*this, expression_, where_).parse();
  const std::vector<Ascii> first = first_characters();
  for (unsigned char c = 0; c < 128; ++c) {
    for (std::size_t i = 0; i < alternatives_.size(); ++i) {
      if ((first[alternatives_[i]][c >> 6] >> (c & 63)) & 1) by_first_[c] |= std::uint32_t{1} << i;
    }
  }
}

// For each step, the ASCII characters that a match from it may begin with: all, if the match may be empty.
// Steps lead only to later steps, so one pass from the last to the first computes all.
std::vector<Pattern::Ascii> Pattern::first_characters() const {
  constexpr Ascii kAll = {~std::uint64_t{0}, ~std::uint64_t{0}};
  const auto either = [](const Ascii& a, const Ascii& b) { return Ascii{a[0] | b[0], a[1] | b[1]}; };
  std::vector<Ascii> first(steps_.size(), kAll);
  for (std::size_t i = steps_.size(); i-- > 0;) {
    const Step& s = steps_[i];
    if (s.op == Op::kSet || s.op == Op::kRun) {
      const CharSet& set = sets_[s.a];
      first[i] = {set.ascii[0], set.ascii[1]};
      if (s.op == Op::kRun && s.min == 0) first[i] = either(first[i], first[i + 1]);
    } else if (s.op == Op::kSplit) {
      first[i] = either(first[s.a], first[s.b]);
    } else if (s.op == Op::kJump) {
      first[i] = first[s.a];
    }
  }
  return first;
}

// For each step, whether the match from it on may take a blank next, or look whether there is one.
std::vector<bool> Pattern::blanks_that_may_follow() const {
  std::vector<bool> follows(steps_.size());
  for (std::size_t i = steps_.size(); i-- > 0;) {
    const Step& s = steps_[i];
    const bool takes = s.op == Op::kSet || s.op == Op::kRun || s.op == Op::kNotAhead;
    const bool passes = s.op == Op::kNotAhead || (s.op == Op::kRun && s.min == 0);
    bool may = takes && sets_[s.a].has_ascii(' ');
    if (passes) may = may || follows[i + 1];
    if (s.op == Op::kSplit) may = follows[s.a] || follows[s.b];
    if (s.op == Op::kJump) may = follows[s.a];
    follows[i] = may;
  }
  return follows;
}

bool Pattern::ends_before_blanks() const {
  constexpr std::string_view kWord = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  const std::vector<bool> blank_may_follow = blanks_that_may_follow();
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const Step& s = steps_[i];
    if (s.op != Op::kSet && s.op != Op::kRun) continue;
    const CharSet& set = sets_[s.a];
    const bool word = std::any_of(kWord.begin(), kWord.end(),
                                  [&](char c) { return set.has_ascii(static_cast<unsigned char>(c)); });
    const bool again = s.op == Op::kRun && s.max > 1;
    if (word && ((again && set.has_ascii(' ')) || blank_may_follow[i + 1])) return false;
  }
  return true;
}

bool Pattern::takes_any_blank() const {
  return std::any_of(alternatives_.begin(), alternatives_.end(), [&](std::uint32_t first) {
    const Step& s = steps_[first];
    const bool one = s.op == Op::kSet || (s.op == Op::kRun && s.min <= 1);
    return one && sets_[s.a].has_ascii(' ') && steps_[first + 1].op == Op::kMatch;
  });
}

bool Pattern::takes_no_blank() const {
  return std::none_of(steps_.begin(), steps_.end(), [&](const Step& s) {
    return (s.op == Op::kSet || s.op == Op::kRun) && sets_[s.a].has_ascii(' ');
  });
}

bool Pattern::takes(const CharSet& set, std::string_view text, std::size_t& at) const {
  if (at >= text.size()) return false;
  const auto byte = static_cast<unsigned char>(text[at]);
  if (byte < 128) {
    if (!set.has_ascii(byte)) return false;
    ++at;
    return true;
  }
  const utf8::Decoded c = utf8::decode(text, at);
  if (!set.has_wide(c.code)) return false;
  at += c.length;
  return true;
}

// Backtracks with an explicit stack. An entry has a step to continue with, its place in the text and, for a
// run, how far back it may give up characters. Between two tries steps only lead forward, so it is enough to
// check the effort after each try.
std::size_t Pattern::run(std::uint32_t step, std::string_view text, std::size_t at, Effort& effort) const {
  struct Choice {
    std::uint32_t step;
    std::size_t at, least;
  };
  thread_local std::vector<Choice> choices;
  choices.clear();
  const std::size_t begin = at;
  std::size_t spent = 0;
  while (true) {
    const Step& s = steps_[step];
    ++spent;
    bool ok = true;
    switch (s.op) {
      case Op::kMatch:
        if (spent > effort.left_) give_up(text, begin);
        effort.left_ -= spent;
        return at;
      case Op::kJump:
        step = s.a;
        continue;
      case Op::kSplit:
        choices.push_back({s.b, at, at});
        step = s.a;
        continue;
      case Op::kSet:
        ok = takes(sets_[s.a], text, at);
        break;
      case Op::kNotAhead: {
        std::size_t ahead = at;
        ok = !takes(sets_[s.a], text, ahead);
        break;
      }
      case Op::kRun: {
        std::uint32_t n = 0;
        std::size_t least = at;
        while (n < s.max && takes(sets_[s.a], text, at)) {
          if (++n == s.min) least = at;
        }
        spent += n;
        ok = n >= s.min;
        if (ok && n > s.min && !s.possessive) choices.push_back({step + 1, at, least});
        break;
      }
    }
    if (ok) {
      ++step;
      continue;
    }
    if (spent > effort.left_) give_up(text, begin);
    if (choices.empty()) {
      effort.left_ -= spent;
      return npos;
    }
    Choice& back = choices.back();
    step = back.step;
    if (back.at > back.least) {  // a run gives up its last character
      do --back.at;
      while (utf8::is_continuation(text[back.at]));
      at = back.at;
      if (back.at == back.least) choices.pop_back();
    } else {
      at = back.at;
      choices.pop_back();
    }
  }
}

void Pattern::give_up(std::string_view text, std::size_t at) const {
  throw Error(Errc::kUsage, where_,
              fmt::format("the regular expression \"{}\" tries too many ways to match a text at \"{}\"",
                          shown(expression_, kShown), shown(text.substr(at))),
              "no released model's does; take the model's own tokenizer.json, or tokenise in Python: "
              "tools/prepare.py");
}

std::size_t Pattern::match(std::string_view text, std::size_t at, Effort& effort) const {
  const auto first = static_cast<unsigned char>(at < text.size() ? text[at] : 0);
  std::uint32_t left = first < 128 && at < text.size() ? by_first_[first] : ~std::uint32_t{0};
  for (std::size_t i = 0; i < alternatives_.size(); ++i, left >>= 1) {
    if ((left & 1) == 0) continue;
    const std::size_t end = run(alternatives_[i], text, at, effort);
    if (end != npos) return end;
  }
  return npos;
}

}  // namespace zg
