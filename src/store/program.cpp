#include "ziggurat/store/program.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg {

// Few are compared in place, since a step adds them without allocating; a trace's file may have many in one
// op.
static bool all_differ(std::span<const AccessStep> accesses) {
  constexpr std::size_t kFew = 64;
  if (accesses.size() <= kFew) {
    for (std::size_t i = 0; i < accesses.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (accesses[i].segment == accesses[j].segment) return false;
      }
    }
    return true;
  }
  std::vector<SegmentId> named;
  for (const AccessStep& access : accesses) named.push_back(access.segment);
  std::sort(named.begin(), named.end());
  return std::adjacent_find(named.begin(), named.end()) == named.end();
}

void Program::add_op(std::span<const AccessStep> accesses, std::int64_t time) {
  ZG_ASSERT(use_first_.empty(), "the program is finished");
  ZG_ASSERT(!accesses.empty());
  ZG_ASSERT_GE(time, 0);
  op_first_.push_back(access_count());
  op_time_.push_back(time);
  ZG_ASSERT(all_differ(accesses), "named twice in one op");
  for (const AccessStep& access : accesses) {
    ZG_ASSERT(access.tier != Tier::kNvme, "nobody computes on NVMe");
    accesses_.push_back(access);
  }
}

void Program::finish(std::int32_t segment_count) {
  use_first_.assign(static_cast<std::size_t>(segment_count) + 1, 0);
  for (const AccessStep& a : accesses_) ++use_first_[static_cast<std::size_t>(a.segment) + 1];
  for (std::size_t i = 1; i < use_first_.size(); ++i) use_first_[i] += use_first_[i - 1];
  uses_.resize(accesses_.size());
  std::vector<std::int32_t> fill(use_first_.begin(), use_first_.end() - 1);
  for (std::int32_t p = 0; p < access_count(); ++p) {
    uses_[static_cast<std::size_t>(fill[static_cast<std::size_t>(access(p).segment)]++)] = p;
  }
  behind_reads_.resize(uses_.size());
  for (SegmentId id = 0; id < segment_count; ++id) {
    const auto uses = this->uses(id);
    const auto read_at = [&](std::size_t i) {
      const AccessStep& a = access(uses[i]);
      return a.access == Access::kRead && !a.last ? std::optional(a.tier) : std::nullopt;
    };
    const auto behind = behind_reads_.begin() + use_first_[static_cast<std::size_t>(id)];
    for (std::size_t i = uses.size(); i-- > 0;) {
      const bool goes_on = i + 1 < uses.size() && read_at(i) && read_at(i) == read_at(i + 1);
      const auto at = static_cast<std::ptrdiff_t>(i);
      behind[at] = goes_on ? behind[at + 1] : static_cast<std::int32_t>(i + 1);
    }
  }
}

std::span<const AccessStep> Program::op(std::int32_t index) const {
  const std::int32_t first = first_access(index);
  const std::int32_t end = index + 1 < op_count() ? first_access(index + 1) : access_count();
  return {accesses_.data() + first, static_cast<std::size_t>(end - first)};
}

std::span<const std::int32_t> Program::uses(SegmentId segment) const {
  const auto first = use_first_[static_cast<std::size_t>(segment)];
  const auto end = use_first_[static_cast<std::size_t>(segment) + 1];
  return {uses_.data() + first, static_cast<std::size_t>(end - first)};
}

std::span<const std::int32_t> Program::behind_reads(SegmentId segment) const {
  return {behind_reads_.data() + use_first_[static_cast<std::size_t>(segment)], uses(segment).size()};
}

std::uint64_t Program::hash() const {
  std::uint64_t h = 0xcbf29ce484222325ull;
  const auto mix = [&h](std::uint64_t v) { h = (h ^ v) * 0x100000001b3ull; };
  for (const std::int32_t first : op_first_) mix(static_cast<std::uint64_t>(first));
  for (const std::int64_t time : op_time_) mix(static_cast<std::uint64_t>(time));
  for (const AccessStep& a : accesses_) {
    mix(static_cast<std::uint64_t>(a.segment));
    mix(static_cast<std::uint64_t>(a.tier) * 16 + static_cast<std::uint64_t>(a.access) * 2 +
        (a.last ? 1 : 0));
  }
  return h;
}

}  // namespace zg
