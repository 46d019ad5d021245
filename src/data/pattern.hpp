// The regular expressions by which tokenizers cut a text into pieces. Supports the syntax that released
// models use: characters, classes, properties of general categories, alternatives, groups with or without
// (?i:), greedy and possessive repetition, and (?!x) of one class. A match is the same as Oniguruma's.
// Expressions come from files that need not be trusted, so their size is bounded, and so is the cost of a
// match.
//
// Immutable after construction: any thread may call.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/unicode.hpp"

namespace zg {

// A set of characters.
struct CharSet {
  std::uint64_t ascii[2] = {};
  unicode::CategorySet categories = 0;  // this and the next members are for characters beyond ASCII
  bool space = false;                   // whether characters with the property White_Space are in the set
  std::vector<std::pair<char32_t, char32_t>> ranges;
  bool negated = false;

  bool has_ascii(unsigned char c) const { return (ascii[c >> 6] >> (c & 63)) & 1; }
  bool has_wide(char32_t code) const;
};

class Pattern {
 public:
  // Throws Error(kUsage) naming `where` and the part of the expression that is not supported.
  Pattern(std::string_view expression, const std::string& where);

  // A budget for matching a whole text. It counts characters that repetitions take, and steps, including
  // repeated ones. It is larger than released models' patterns need, and stops patterns that would take
  // exponential time.
  class Effort {
   public:
    explicit Effort(std::size_t text_bytes) : left_(kSteps + kStepsPerByte * text_bytes) {}

   private:
    friend class Pattern;
    static constexpr std::size_t kSteps = 4096, kStepsPerByte = 256;
    std::size_t left_;
  };

  // The end of the match that starts at `at`; npos: none. The text must be UTF-8. Throws Error(kUsage), which
  // names the file and the expression, when the effort is spent.
  std::size_t match(std::string_view text, std::size_t at, Effort& effort) const;
  static constexpr std::size_t npos = std::string_view::npos;

  // Whether every match ends at a blank that follows an ASCII letter or digit, and does not depend on whether
  // a blank or the text's end follows it.
  bool ends_before_blanks() const;
  // Whether there is a match at every blank.
  bool takes_any_blank() const;
  // Whether no match contains a blank.
  bool takes_no_blank() const;

 private:
  enum class Op : std::uint8_t { kSet, kRun, kSplit, kJump, kNotAhead, kMatch };
  struct Step {
    Op op;
    bool possessive = false;
    std::uint32_t a = 0, b = 0;      // kSplit, kJump: next steps, of which a is tried first; else a: the set
    std::uint32_t min = 1, max = 1;  // kRun
  };
  class Parser;

  using Ascii = std::array<std::uint64_t, 2>;  // a bit for each character

  bool takes(const CharSet& set, std::string_view text, std::size_t& at) const;
  std::vector<Ascii> first_characters() const;
  std::vector<bool> blanks_that_may_follow() const;
  std::size_t run(std::uint32_t step, std::string_view text, std::size_t at, Effort& effort) const;
  [[noreturn]] void give_up(std::string_view text, std::size_t at) const;

  std::string expression_, where_;  // for errors
  std::vector<CharSet> sets_;
  std::vector<Step> steps_;
  std::vector<std::uint32_t> alternatives_;       // the first step of each alternative, in order
  std::array<std::uint32_t, 128> by_first_ = {};  // bit i: alternative i may begin with this character
};

}  // namespace zg
