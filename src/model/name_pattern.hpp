// Regular expressions of PEFT's configurations, as Python's re.fullmatch() takes them for names of modules.
// Private to src/model.
//
// The expressions come from untrusted files. So matching advances sets of positions, without backtracking,
// and its cost is bounded.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace zg::hf {

class NamePattern {
 public:
  // Throws std::invalid_argument with a description of the fault if the expression is wrong or not supported.
  // Unsupported: references to groups, flags, conditions, and possessive or atomic parts.
  explicit NamePattern(std::string_view expression);
  ~NamePattern();
  NamePattern(NamePattern&&) noexcept;
  NamePattern& operator=(NamePattern&&) = delete;

  // Whether all of the name matches. Names have at most 255 bytes. Throws std::invalid_argument if all calls
  // together have taken too many steps.
  bool matches(std::string_view name) const;

  struct Node;

 private:
  std::unique_ptr<Node> root_;
  mutable std::int64_t steps_ = 0;
};

}  // namespace zg::hf
