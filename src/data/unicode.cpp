#include "data/unicode.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "data/utf8.hpp"

namespace zg::unicode {
namespace {

struct CodeRange {
  char32_t first, last;
};
struct Decomposition {
  char32_t code, first, second;
  bool composes;
};

#include "data/unicode_tables.inc"

#include "data/unicode_compat.inc"

constexpr char32_t kCodes = 0x110000;

// One byte for each code point, from runs.
template <std::size_t n>
std::vector<std::uint8_t> expand(const std::uint32_t (&runs)[n], std::uint32_t unit) {
  std::vector<std::uint8_t> values;
  values.reserve(kCodes);
  for (const std::uint32_t run : runs) values.insert(values.end(), run / unit, run % unit & 0xFF);
  return values;
}

std::uint64_t pair_of(char32_t first, char32_t second) {
  return (std::uint64_t{first} << 32) | second;
}

// Hangul's syllables are composed by arithmetic (chapter 3.12 of the standard).
constexpr char32_t kSyllable = 0xAC00, kLead = 0x1100, kVowel = 0x1161, kTrail = 0x11A7;
constexpr char32_t kLeads = 19, kVowels = 21, kTrails = 28, kSyllables = kLeads * kVowels * kTrails;

// Characters that become others, from a table of a code, how many it becomes, and these.
using Replacements = std::unordered_map<char32_t, std::u32string_view>;
template <std::size_t n>
Replacements replacements(const char32_t (&table)[n]) {
  Replacements all;
  for (std::size_t at = 0; at < n; at += 2 + table[at + 1])
    all.emplace(table[at], std::u32string_view(table + at + 2, table[at + 1]));
  return all;
}

class Normalizer {
 public:
  explicit Normalizer(Form form)
      : composes_(form == Form::kC || form == Form::kKC),
        classes_(expand(kCombiningRuns, 256)),
        quiet_(kCodes, true) {
    if (form == Form::kKC || form == Form::kKD) compatible_ = replacements(kCompatible);
    for (const auto& [code, unused] : compatible_) quiet_[code] = false;
    for (const Decomposition& d : kDecompositions) {
      parts_.emplace(d.code, &d);
      if (d.composes && composes_) {
        composed_.emplace(pair_of(d.first, d.second), d.code);
        quiet_[d.second] = false;
      } else {
        quiet_[d.code] = false;
      }
    }
    for (char32_t c = kSyllable; c < kSyllable + kSyllables && !composes_; ++c) quiet_[c] = false;
    for (char32_t c = 0; c < kCodes; ++c) {
      if (classes_[c] != 0) quiet_[c] = false;
    }
    for (char32_t c = kVowel; c < kVowel + kVowels; ++c) quiet_[c] = false;
    for (char32_t c = kTrail + 1; c < kTrail + kTrails; ++c) quiet_[c] = false;
  }

  // Whether the character stays itself and never joins what is before it.
  bool quiet(char32_t code) const { return quiet_[code]; }

  // Normalises characters of which none but the first is quiet, and appends them.
  void append(std::vector<char32_t>& run, std::string& out) const {
    std::vector<char32_t> codes;
    for (const char32_t code : run) decompose(code, codes);
    order(codes);
    if (composes_) compose(codes);
    for (const char32_t code : codes) utf8::append(code, out);
  }

 private:
  void decompose(char32_t code, std::vector<char32_t>& out) const {
    if (const auto compatible = compatible_.find(code); compatible != compatible_.end()) {
      out.insert(out.end(), compatible->second.begin(), compatible->second.end());
      return;
    }
    if (code - kSyllable < kSyllables) {
      const char32_t s = code - kSyllable;
      out.push_back(kLead + s / (kVowels * kTrails));
      out.push_back(kVowel + s % (kVowels * kTrails) / kTrails);
      if (s % kTrails != 0) out.push_back(kTrail + s % kTrails);
      return;
    }
    const auto it = parts_.find(code);
    if (it == parts_.end()) return out.push_back(code);
    decompose(it->second->first, out);
    if (it->second->second != 0) decompose(it->second->second, out);
  }

  // Puts the marks after each starter into the order of their classes.
  void order(std::vector<char32_t>& codes) const {
    for (auto begin = codes.begin(); begin != codes.end();) {
      const auto is_starter = [&](char32_t c) { return classes_[c] == 0; };
      begin = std::find_if_not(begin, codes.end(), is_starter);
      const auto end = std::find_if(begin, codes.end(), is_starter);
      std::stable_sort(begin, end, [&](char32_t a, char32_t b) { return classes_[a] < classes_[b]; });
      begin = end;
    }
  }

  // 0: the two do not compose.
  char32_t composed(char32_t first, char32_t second) const {
    if (first - kLead < kLeads && second - kVowel < kVowels)
      return kSyllable + ((first - kLead) * kVowels + second - kVowel) * kTrails;
    if (first - kSyllable < kSyllables && (first - kSyllable) % kTrails == 0 && second > kTrail &&
        second < kTrail + kTrails)
      return first + (second - kTrail);
    const auto it = composed_.find(pair_of(first, second));
    return it == composed_.end() ? 0 : it->second;
  }

  // A character joins the last starter unless one between them has its class or a higher one.
  void compose(std::vector<char32_t>& codes) const {
    std::size_t starter = codes.size(), kept = 0;
    int last_class = -1;
    for (const char32_t code : codes) {
      const int its_class = classes_[code];
      const bool reachable = starter < kept && (last_class < its_class || last_class == -1);
      const char32_t joined = reachable ? composed(codes[starter], code) : 0;
      if (joined != 0) {
        codes[starter] = joined;
        continue;
      }
      if (its_class == 0) {
        starter = kept;
        last_class = -1;
      } else {
        last_class = its_class;
      }
      codes[kept++] = code;
    }
    codes.resize(kept);
  }

  bool composes_;
  std::vector<std::uint8_t> classes_;
  std::vector<bool> quiet_;
  Replacements compatible_;
  std::unordered_map<char32_t, const Decomposition*> parts_;
  std::unordered_map<std::uint64_t, char32_t> composed_;
};

template <Form form>
const Normalizer& only_normalizer() {
  static const Normalizer normalizer(form);
  return normalizer;
}

const Normalizer& normalizer_of(Form form) {
  switch (form) {
    case Form::kC:
      return only_normalizer<Form::kC>();
    case Form::kD:
      return only_normalizer<Form::kD>();
    case Form::kKC:
      return only_normalizer<Form::kKC>();
    case Form::kKD:
      break;
  }
  return only_normalizer<Form::kKD>();
}

}  // namespace

CategorySet category_bit(char32_t code) {
  static const std::vector<std::uint8_t> categories = expand(kCategoryRuns, 32);
  return CategorySet{1} << categories[code];
}

bool is_space(char32_t code) {
  if (code < 0x80) return code == ' ' || (code >= 0x9 && code <= 0xD);
  return std::any_of(std::begin(kWhiteSpace), std::end(kWhiteSpace),
                     [&](const CodeRange& r) { return code >= r.first && code <= r.last; });
}

bool is_word(char32_t code) {
  constexpr CategorySet kWord =
      kLetter | kMark | bit(Category::kNd) | bit(Category::kNl) | bit(Category::kPc);
  if ((category_bit(code) & kWord) != 0 || code == 0x200C || code == 0x200D) return true;
  // Symbols that are Alphabetic: letters in circles and squares.
  return (code >= 0x24B6 && code <= 0x24E9) || (code >= 0x1F130 && code <= 0x1F149) ||
         (code >= 0x1F150 && code <= 0x1F169) || (code >= 0x1F170 && code <= 0x1F189);
}

std::string normal_form(std::string_view text, Form form) {
  // No character below U+0300 is changed or joined by one below it in form C; their bytes are below 0xCC. In
  // the other forms that is so of ASCII.
  const unsigned char changing = form == Form::kC ? 0xCC : 0x80;
  const auto plain = [&](char c) { return static_cast<unsigned char>(c) < changing; };
  if (std::all_of(text.begin(), text.end(), plain)) return std::string(text);
  const Normalizer& normalizer = normalizer_of(form);
  std::string out;
  out.reserve(text.size());
  std::vector<char32_t> run;  // of characters; all but the first are not quiet
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded c = utf8::decode(text, at);
    at += c.length;
    if (normalizer.quiet(c.code)) {
      if (run.size() == 1 && normalizer.quiet(run[0])) {
        utf8::append(run[0], out);
      } else if (!run.empty()) {
        normalizer.append(run, out);
      }
      run.clear();
    }
    run.push_back(c.code);
  }
  normalizer.append(run, out);
  return out;
}

std::string lowercase(std::string_view text) {
  static const Replacements small = replacements(kSmall);
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded c = utf8::decode(text, at);
    const auto it = small.find(c.code);
    if (it == small.end()) {
      out.append(text, at, c.length);
    } else {
      for (const char32_t code : it->second) utf8::append(code, out);
    }
    at += c.length;
  }
  return out;
}

}  // namespace zg::unicode
