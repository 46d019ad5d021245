#include "model/name_pattern.hpp"

#include <fmt/core.h>

#include <bitset>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg::hf {
namespace {

constexpr std::size_t kLongestName = 255, kLongestExpression = 4096;
constexpr int kDeepest = 50, kMostRepeats = 1000;
constexpr std::int64_t kMostSteps = 200'000'000;  // a second or so

using Places = std::bitset<kLongestName + 1>;  // positions in a name, its end included
using Bytes = std::bitset<256>;

bool is_word(unsigned char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// The bytes of "\d", "\w" and "\s".
Bytes bytes_of_kind(char kind) {
  Bytes bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto c = static_cast<unsigned char>(i);
    bytes[i] = kind == 'd'   ? c >= '0' && c <= '9'
               : kind == 'w' ? is_word(c)
                             : c == ' ' || (c >= '\t' && c <= '\r');
  }
  return bytes;
}

}  // namespace

struct NamePattern::Node {
  enum class Kind {
    kByte,
    kSequence,
    kChoice,
    kRepeat,
    kBegin,
    kEnd,
    kWordEdge,
    kNoWordEdge,
    kAhead,
    kBehind
  };
  Kind kind = Kind::kSequence;
  std::vector<Node> parts = {};  // several in a sequence or a choice; other kinds have one at most
  Bytes bytes = {};              // the bytes that kByte matches
  int least = 0, most = -1;      // counts of kRepeat; -1: any number
  bool negated = false;          // for kAhead and kBehind
};

namespace {

using Node = NamePattern::Node;
using Kind = Node::Kind;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}
  Node parse() {
    if (text_.size() > kLongestExpression)
      throw std::invalid_argument(
          fmt::format("has {} characters, {} at most are expected", text_.size(), kLongestExpression));
    Node node = choice(0);
    if (at_ < text_.size()) fail("a ) without its (");
    return node;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(fmt::format("has {} at character {}", what, at_ + 1));
  }
  bool ends() const { return at_ >= text_.size(); }
  bool take(std::string_view what) {
    if (text_.substr(at_, what.size()) != what) return false;
    at_ += what.size();
    return true;
  }

  Node choice(int depth) {
    if (depth > kDeepest) fail("groups that are too deep in each other");
    Node node{Kind::kChoice};
    do {
      node.parts.push_back(sequence(depth));
    } while (take("|"));
    return node.parts.size() > 1 ? node : Node(node.parts.front());
  }

  Node sequence(int depth) {
    Node node{Kind::kSequence};
    while (!ends() && text_[at_] != '|' && text_[at_] != ')') node.parts.push_back(repeated(atom(depth)));
    return node;
  }

  Node repeated(Node node) {
    int least = 0, most = -1;
    if (take("*")) {
    } else if (take("+")) {
      least = 1;
    } else if (take("?")) {
      most = 1;
    } else if (!counts(least, most)) {
      return node;
    }
    if (node.kind == Kind::kBegin || node.kind == Kind::kEnd) fail("a repeat of ^ or $");
    if (take("+")) fail("a possessive repeat, which is not supported,");
    (void)take("?");  // a lazy repeat: the same whole names match
    if (!ends() && (text_[at_] == '*' || text_[at_] == '+' || text_[at_] == '?'))
      fail("a repeat of a repeat");
    Node repeat{Kind::kRepeat};
    repeat.parts.push_back(std::move(node));
    repeat.least = least, repeat.most = most;
    return repeat;
  }

  // "{2}", "{2,}", "{,3}" or "{2,3}"; other contents of braces are literal text.
  bool counts(int& least, int& most) {
    const std::size_t begin = at_;
    if (!take("{")) return false;
    const auto number = [&](int fallback) {
      const std::size_t first = at_;
      int n = 0;
      while (!ends() && text_[at_] >= '0' && text_[at_] <= '9') {
        n = n * 10 + (text_[at_++] - '0');
        if (n > kMostRepeats) fail(fmt::format("a repeat of more than {}", kMostRepeats));
      }
      return at_ > first ? n : fallback;
    };
    const std::size_t first = at_;
    least = number(0);
    const bool said = at_ > first;
    if (take(",")) {
      const std::size_t second = at_;
      most = number(-1);
      if (take("}") && (said || at_ > second + 1)) return check(least, most);
    } else if (said && take("}")) {
      most = least;
      return true;
    }
    at_ = begin;
    return false;
  }
  bool check(int least, int most) const {
    if (most >= 0 && most < least) fail("a repeat whose least number is above its most");
    return true;
  }

  Node atom(int depth) {
    const char c = text_[at_++];
    switch (c) {
      case '(':
        return group(depth);
      case '[':
        return set();
      case '\\':
        return escape();
      case '^':
        return {Kind::kBegin};
      case '$':
        return {Kind::kEnd};
      case '.': {
        Node any{Kind::kByte};
        any.bytes.set().reset('\n');
        return any;
      }
      case '*':
      case '+':
      case '?':
        --at_;
        fail("a repeat of nothing");
      default:
        return of_byte(c);
    }
  }

  static Node of_byte(char c) {
    Node node{Kind::kByte};
    node.bytes.set(static_cast<unsigned char>(c));
    return node;
  }

  Node group(int depth) {
    Node outer{Kind::kSequence};
    if (take("?=")) {
      outer.kind = Kind::kAhead;
    } else if (take("?!")) {
      outer.kind = Kind::kAhead, outer.negated = true;
    } else if (take("?<=")) {
      outer.kind = Kind::kBehind;
    } else if (take("?<!")) {
      outer.kind = Kind::kBehind, outer.negated = true;
    } else if (take("?P<")) {
      while (!ends() && is_word(static_cast<unsigned char>(text_[at_]))) ++at_;
      if (!take(">")) fail("a group's name without its end");
    } else if (!take("?:") && !ends() && text_[at_] == '?') {
      fail("a kind of group that is not supported");
    }
    outer.parts.push_back(choice(depth + 1));
    if (!take(")")) fail("a ( without its )");
    return outer;
  }

  Node escape() {
    if (ends()) fail("a \\ before nothing");
    const char c = text_[at_++];
    switch (c) {
      case 'd':
      case 'w':
      case 's':
        return {Kind::kByte, {}, bytes_of_kind(c)};
      case 'D':
      case 'W':
      case 'S':
        return {Kind::kByte, {}, ~bytes_of_kind(static_cast<char>(c - 'A' + 'a'))};
      case 'b':
        return {Kind::kWordEdge};
      case 'B':
        return {Kind::kNoWordEdge};
      case 'A':
        return {Kind::kBegin};
      case 'Z':
        return {Kind::kEnd};
      default:
        if (is_word(static_cast<unsigned char>(c))) fail(fmt::format("\\{}, which is not supported,", c));
        return of_byte(c);
    }
  }

  Node set() {
    Node node{Kind::kByte};
    const bool negated = take("^");
    for (bool first = true; first || ends() || text_[at_] != ']'; first = false) {
      if (ends()) fail("a [ without its ]");
      Bytes bytes = member();
      if (bytes.count() == 1 && at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
        ++at_;
        const Bytes last = member();
        if (last.count() != 1) fail("a range without an end");
        const std::size_t from = bytes._Find_first(), to = last._Find_first();
        if (to < from) fail("a range whose end is before its begin");
        for (std::size_t i = from; i <= to; ++i) bytes.set(i);
      }
      node.bytes |= bytes;
    }
    ++at_;
    if (negated) node.bytes = ~node.bytes;
    return node;
  }
  Bytes member() {
    const char c = text_[at_++];
    if (c == '\\') {
      const Node node = escape();
      if (node.kind != Kind::kByte) fail("an escape that a set cannot have");
      return node.bytes;
    }
    return of_byte(c).bytes;
  }

  const std::string_view text_;
  std::size_t at_ = 0;
};

class Matcher {
 public:
  Matcher(std::string_view name, std::int64_t& steps) : name_(name), steps_(steps) {}

  // The ends of a node's matches that begin at one of the places `begins`.
  Places ends(const Node& node, const Places& begins) {
    if ((steps_ += 1 + static_cast<std::int64_t>(begins.count())) > kMostSteps)
      throw std::invalid_argument("takes too many steps to match");
    switch (node.kind) {
      case Kind::kByte:
        return filtered(begins, [&](std::size_t i) { return i < name_.size() && node.bytes[byte(i)]; }) << 1;
      case Kind::kSequence: {
        Places at = begins;
        for (const Node& part : node.parts) {
          if (at.none()) break;
          at = ends(part, at);
        }
        return at;
      }
      case Kind::kChoice: {
        Places all;
        for (const Node& part : node.parts) all |= ends(part, begins);
        return all;
      }
      case Kind::kRepeat:
        return repeats(node, begins);
      case Kind::kBegin:
        return filtered(begins, [](std::size_t i) { return i == 0; });
      case Kind::kEnd:
        return filtered(begins, [&](std::size_t i) { return i == name_.size(); });
      case Kind::kWordEdge:
        return filtered(begins, [&](std::size_t i) { return is_edge(i); });
      case Kind::kNoWordEdge:
        return filtered(begins, [&](std::size_t i) { return !is_edge(i); });
      case Kind::kAhead:
        return filtered(begins, [&](std::size_t i) {
          return ends(node.parts.front(), Places().set(i)).any() != node.negated;
        });
      case Kind::kBehind:
        return filtered(begins, [&](std::size_t i) {
          bool found = false;
          for (std::size_t j = 0; j <= i && !found; ++j) found = ends(node.parts.front(), Places().set(j))[i];
          return found != node.negated;
        });
    }
    return {};
  }

 private:
  Places repeats(const Node& node, const Places& begins) {
    Places at = begins;
    for (int i = 0; i < node.least && at.any(); ++i) {
      const Places next = ends(node.parts.front(), at);
      if (next == at) break;
      at = next;
    }
    Places all = at;
    for (int i = node.least; (node.most < 0 || i < node.most) && at.any(); ++i) {
      at = ends(node.parts.front(), at) & ~all;  // only new places
      all |= at;
    }
    return all;
  }
  template <class F>
  static Places filtered(const Places& places, const F& keep) {
    Places kept;
    for (std::size_t i = places._Find_first(); i < places.size(); i = places._Find_next(i)) kept[i] = keep(i);
    return kept;
  }
  std::size_t byte(std::size_t i) const { return static_cast<unsigned char>(name_[i]); }
  bool is_edge(std::size_t i) const {
    const auto word = [&](std::size_t at) {
      return at < name_.size() && is_word(static_cast<unsigned char>(name_[at]));
    };
    return (i > 0 && word(i - 1)) != word(i);
  }

  const std::string_view name_;
  std::int64_t& steps_;
};

}  // namespace

NamePattern::NamePattern(std::string_view expression)
    : root_(std::make_unique<Node>(Parser(expression).parse())) {}
NamePattern::~NamePattern() = default;
NamePattern::NamePattern(NamePattern&&) noexcept = default;

bool NamePattern::matches(std::string_view name) const {
  ZG_ASSERT_LE(name.size(), kLongestName);
  return Matcher(name, steps_).ends(*root_, Places().set(0))[name.size()];
}

}  // namespace zg::hf
