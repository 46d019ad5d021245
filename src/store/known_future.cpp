#include "ziggurat/store/known_future.hpp"

#include <algorithm>

namespace zg {

// Calls visit(access, distance) for the segment's accesses in their order, until it returns false.
template <class Visit>
void KnownFuture::visit(SegmentId id, Visit&& visit) const {
  const Program* p = program_;
  if (p == nullptr || !p->knows(id)) return;
  const auto uses = p->uses(id);
  const auto rest = std::upper_bound(uses.begin(), uses.end(), at_);
  for (auto it = rest; it != uses.end(); ++it) {
    if (!visit(p->access(*it), static_cast<std::uint64_t>(*it - at_))) return;
  }
  for (auto it = uses.begin(); it != rest; ++it) {
    if (!visit(p->access(*it), static_cast<std::uint64_t>(*it + p->access_count() - at_))) return;
  }
}

void KnownFuture::follow(const Program* program, std::int32_t position) {
  base_ += accesses_;
  program_ = program;
  accesses_ = program != nullptr ? static_cast<std::uint64_t>(program->access_count()) : 0;
  at_ = position;
}

std::uint64_t KnownFuture::next_access(SegmentId id) const {
  std::uint64_t found = kNever;
  visit(id, [&](const AccessStep&, std::uint64_t distance) {
    found = distance;
    return false;
  });
  return found;
}

std::uint64_t KnownFuture::next_read(SegmentId id) const {
  std::uint64_t found = kNever;
  visit(id, [&](const AccessStep& a, std::uint64_t distance) {
    if (a.access != Access::kOverwrite) found = distance;
    return false;
  });
  return found;
}

std::uint64_t KnownFuture::next_use(SegmentId id, Tier tier, bool on_device) const {
  const Program* p = program_;
  if (p == nullptr || !p->knows(id)) return kNever;
  const auto uses = p->uses(id), behind_reads = p->behind_reads(id);
  const auto rest = static_cast<std::size_t>(std::upper_bound(uses.begin(), uses.end(), at_) - uses.begin());
  const struct {
    std::size_t begin, end;
    std::int32_t later;
  } rounds[] = {{rest, uses.size(), 0}, {0, rest, p->access_count()}};
  for (const auto& round : rounds) {
    for (std::size_t i = round.begin; i < round.end; i = static_cast<std::size_t>(behind_reads[i])) {
      const AccessStep& a = p->access(uses[i]);
      if (a.access == Access::kOverwrite) return kNever;
      if (a.tier == tier || (tier == Tier::kHost && !on_device))
        return static_cast<std::uint64_t>(uses[i] + round.later - at_);
      if (a.access != Access::kRead || a.last) return kNever;
    }
  }
  return kNever;
}

bool KnownFuture::is_overwritten(SegmentId id) const {
  if (!program_->knows(id)) return false;
  const auto uses = program_->uses(id);
  const auto next = std::upper_bound(uses.begin(), uses.end(), at_);
  return next != uses.end() && program_->access(*next).access == Access::kOverwrite;
}

}  // namespace zg
