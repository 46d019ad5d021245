// Regular expressions of PEFT's configurations, as Python's re.fullmatch() takes them for names of modules.
// Private to src/model.
//
// They come from files that are not trusted: matching goes through sets of positions, without going back, and
// what it costs is bounded.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace zg::hf {

class NamePattern {
 public:
  // Throws std::invalid_argument with what is wrong with the expression, or not supported: references to
  // groups, flags, conditions, and possessive or atomic parts.
  explicit NamePattern(std::string_view expression);
  ~NamePattern();
  NamePattern(NamePattern&&) noexcept;
  NamePattern& operator=(NamePattern&&) = delete;

  // Whether all of the name matches. Names are short: of up to 255 bytes. Throws std::invalid_argument where
  // this and the calls before it have taken too many steps.
  bool matches(std::string_view name) const;

  struct Node;

 private:
  std::unique_ptr<Node> root_;
  mutable std::int64_t steps_ = 0;
};

}  // namespace zg::hf
