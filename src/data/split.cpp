#include "data/split.hpp"

#include <algorithm>

#include "data/bpe.hpp"
#include "data/unicode.hpp"
#include "data/utf8.hpp"

namespace zg {
namespace {

using Kind = HfSplitStep::Kind;
using Behavior = HfSplitStep::Behavior;

struct Part {
  std::string_view text;
  bool matches;
};

std::size_t number_length(std::string_view text, std::size_t at) {
  const utf8::Decoded c = utf8::decode(text, at);
  return (unicode::category_bit(c.code) & unicode::kNumber) != 0 ? c.length : 0;
}

// The length of the match at `at`; 0: none.
std::size_t match_length(const HfSplitStep& step, std::string_view text, std::size_t at,
                         Pattern::Effort& effort) {
  switch (step.kind) {
    case Kind::kPattern: {
      const std::size_t end = step.pattern->match(text, at, effort);
      return end == Pattern::npos ? 0 : end - at;
    }
    case Kind::kText:
      return text.compare(at, step.text.size(), step.text) == 0 ? step.text.size() : 0;
    case Kind::kGpt2:
      return gpt2_piece(text, at);
    case Kind::kEachDigit:
      return number_length(text, at);
    case Kind::kDigits: {
      std::size_t end = at;
      for (std::size_t n; end < text.size() && (n = number_length(text, end)) > 0;) end += n;
      return end - at;
    }
    case Kind::kMetaspace:
      break;
  }
  return 0;
}

// Calls use(part, whether it matches) for matches and what is between them, in order.
template <class Use>
void for_parts(const HfSplitStep& step, std::string_view text, Pattern::Effort& effort, const Use& use) {
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t n = match_length(step, text, at, effort);
    if (n == 0) {
      at += utf8::decode(text, at).length;
      continue;
    }
    if (done < at) use(text.substr(done, at - done), step.invert);
    use(text.substr(at, n), !step.invert);
    done = at += n;
  }
  if (done < text.size()) use(text.substr(done), step.invert);
}

std::string_view joined(std::string_view left, std::string_view right) {
  return {left.data(), left.size() + right.size()};
}

// A match joins its neighbour, unless that is the end of a pair already.
void join_matches(Behavior behavior, std::vector<Part>& parts, Pieces& out) {
  const bool next = behavior == Behavior::kMergedWithNext;
  if (next) std::reverse(parts.begin(), parts.end());
  const std::size_t begin = out.size();
  bool previous = false;
  for (const Part& part : parts) {
    const bool same =
        behavior == Behavior::kContiguous ? part.matches == previous : part.matches && !previous;
    if (same && out.size() > begin) {
      out.back() = next ? joined(part.text, out.back()) : joined(out.back(), part.text);
    } else {
      out.push_back(part.text);
    }
    previous = part.matches;
  }
  if (next) std::reverse(out.begin() + static_cast<std::ptrdiff_t>(begin), out.end());
}

}  // namespace

void split_pieces(const HfSplitStep& step, Pieces& pieces, Pattern::Effort& effort) {
  Pieces out;
  std::vector<Part> parts;
  for (const std::string_view piece : pieces) {
    if (step.behavior == Behavior::kIsolated || step.behavior == Behavior::kRemoved) {
      for_parts(step, piece, effort, [&](std::string_view part, bool matches) {
        if (!matches || step.behavior == Behavior::kIsolated) out.push_back(part);
      });
    } else {
      parts.clear();
      for_parts(step, piece, effort, [&](std::string_view part, bool matches) {
        parts.push_back({part, matches});
      });
      join_matches(step.behavior, parts, out);
    }
  }
  pieces.swap(out);
}

bool keeps_blanks_first(const HfSplitStep& step) {
  const bool apart = step.behavior == Behavior::kIsolated || step.behavior == Behavior::kRemoved;
  switch (step.kind) {
    case Kind::kGpt2:
    case Kind::kDigits:
    case Kind::kEachDigit:
      return true;
    case Kind::kPattern:
      return apart && step.pattern->ends_before_blanks();
    case Kind::kText:
      return apart && step.text.find(' ') == std::string::npos;
    case Kind::kMetaspace:
      break;
  }
  return false;
}

bool removes_blanks(const HfSplitStep& step) {
  if (step.kind != Kind::kPattern || step.behavior != Behavior::kRemoved) return false;
  return step.invert ? step.pattern->takes_no_blank() : step.pattern->takes_any_blank();
}

bool begins_at_blank(const HfSplitStep& step) {
  if (step.kind == Kind::kGpt2) return true;
  return step.kind == Kind::kPattern && step.pattern->takes_any_blank();
}

}  // namespace zg
