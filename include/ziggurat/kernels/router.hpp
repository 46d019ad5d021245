// How the router of a mixture of experts chooses a token's experts from its logits, one for each expert, and
// weighs them.
#pragma once
#include <cstdint>

namespace zg {

// The scores of experts: the softmax of a token's logits, or the sigmoid of each of them.
enum class RouterScore : std::uint8_t { kSoftmax, kSigmoid };

// The score of a group of experts, from the numbers by which its experts are chosen: the sum of the two
// largest, or the largest.
enum class GroupScore : std::uint8_t { kSumOfTwo, kLargest };

// A token's experts are the `per_token` ones with the largest score + choice bias; of equal ones, those with
// lower indices. With `groups` > 1 the experts are divided into that many groups of neighbours, and only the
// experts of the `kept_groups` groups with the largest group scores can be chosen; of equal groups, those
// with lower indices are kept. A NaN is smaller than any number.
//
// Without a choice bias logits are compared instead of scores: their order is the same, and experts whose
// scores round to the same number stay apart. Sums of two are of scores (plus bias) in any case.
//
// The weight of a chosen expert is its score, without the bias:
//
//   scale * score / (renormalize ? max(sum of the chosen experts' scores + epsilon, least_sum) : 1)
//
// The sum is made in ascending order of the experts' indices.
struct RouterRule {
  RouterScore score = RouterScore::kSoftmax;
  std::int64_t per_token = 1;
  bool renormalize = false;
  double epsilon = 0, least_sum = 0;  // not negative
  double scale = 1;                   // positive
  std::int64_t groups = 1, kept_groups = 1;
  GroupScore group_score = GroupScore::kSumOfTwo;  // kSumOfTwo needs groups of two or more experts
  bool operator==(const RouterRule&) const = default;
};

// The most experts of a router.
inline constexpr std::int64_t kMaxExperts = 1024;

// Whether number a of index i is chosen before number b of index j.
template <class A>
constexpr bool is_chosen_before(A a, std::int64_t i, A b, std::int64_t j) {
  if (a > b) return true;
  if (a < b) return false;
  const bool a_is_nan = a != a, b_is_nan = b != b;
  return a_is_nan == b_is_nan ? i < j : b_is_nan;
}

}  // namespace zg
