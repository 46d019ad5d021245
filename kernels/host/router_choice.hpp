// The choice of a token's experts. Pure functions; any thread.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ziggurat/kernels/router.hpp"

namespace zg::host {

// The `most` first of the indices that add() was given, by is_chosen_before(). Indices must ascend.
template <class A>
class FirstOf {
 public:
  FirstOf(const A* numbers, std::int64_t most) : numbers_(numbers), most_(most) {}
  void add(std::int32_t i) {
    const A x = numbers_[i];
    if (count_ == most_ && !(x > last_ || (last_ != last_ && x == x))) return;  // i comes after all others
    std::int64_t place = count_ < most_ ? count_++ : count_ - 1;
    for (; place > 0; --place) {
      const std::int32_t j = index_[place - 1];
      if (!is_chosen_before(x, i, numbers_[j], j)) break;
      index_[place] = j;
    }
    index_[place] = i;
    last_ = numbers_[index_[count_ - 1]];
  }
  // Copies them in ascending order.
  void write(std::int32_t* to) const {
    std::copy(index_, index_ + count_, to);
    std::sort(to, to + count_);
  }
  // The sum of their numbers.
  A sum() const {
    A sum = 0;
    for (std::int64_t i = 0; i < count_; ++i) sum += numbers_[index_[i]];
    return sum;
  }

 private:
  const A* numbers_;
  std::int64_t most_, count_ = 0;
  A last_ = 0;  // of the indices, the last one's number
  std::int32_t index_[kMaxExperts];
};

// The score of the group whose experts have these numbers.
template <class A>
A group_score(GroupScore score, std::int64_t size, const A* numbers) {
  FirstOf<A> first(numbers, score == GroupScore::kLargest ? 1 : 2);
  for (std::int32_t i = 0; i < size; ++i) first.add(i);
  return first.sum();
}

// Writes a token's experts in ascending order. They are compared by `numbers`, and sums of two by `scores`.
template <class A>
void choose_experts(const RouterRule& rule, std::int64_t experts, const A* numbers, const A* scores,
                    std::int32_t* chosen) {
  std::int32_t kept[kMaxExperts];
  std::int64_t kept_groups = 1;
  kept[0] = 0;
  const std::int64_t size = experts / rule.groups;
  if (rule.groups > 1) {
    const A* const compared = rule.group_score == GroupScore::kLargest ? numbers : scores;
    A of_group[kMaxExperts];
    FirstOf<A> first(of_group, rule.kept_groups);
    for (std::int32_t g = 0; g < rule.groups; ++g) {
      of_group[g] = group_score(rule.group_score, size, compared + g * size);
      first.add(g);
    }
    kept_groups = rule.kept_groups;
    first.write(kept);
  }
  FirstOf<A> first(numbers, rule.per_token);
  for (std::int64_t k = 0; k < kept_groups; ++k) {
    for (std::int64_t e = kept[k] * size; e < (kept[k] + 1) * size; ++e)
      first.add(static_cast<std::int32_t>(e));
  }
  first.write(chosen);
}

}  // namespace zg::host
