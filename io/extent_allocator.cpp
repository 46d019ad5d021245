#include "io/extent_allocator.hpp"

#include <algorithm>
#include <iterator>

#include "ziggurat/base/error.hpp"

namespace zg::io {

ExtentAllocator::ExtentAllocator(std::int64_t grains) : grains_(grains) {
  ZG_ASSERT_GE(grains, 0);
  if (grains > 0) free({0, grains});
}

bool ExtentAllocator::allocate(std::int64_t grains, std::vector<GrainRun>& runs) {
  ZG_ASSERT(grains > 0, "{} grains", grains);
  if (grains > free_) return false;
  const auto fits = by_size_.lower_bound({grains, 0});
  if (fits != by_size_.end()) {
    take(fits, grains, runs);
    return true;
  }
  while (grains > 0) {
    // None holds all of it; for the rest of it the best fit is the right one again.
    auto run = by_size_.lower_bound({grains, 0});
    if (run == by_size_.end()) --run;
    const std::int64_t n = std::min(grains, run->first);
    take(run, n, runs);
    grains -= n;
  }
  return true;
}

void ExtentAllocator::take(std::set<std::pair<std::int64_t, std::int64_t>>::iterator run,
                           std::int64_t grains, std::vector<GrainRun>& runs) {
  const auto [size, begin] = *run;
  by_size_.erase(run);
  by_begin_.erase(begin);
  if (size > grains) {
    by_begin_.emplace(begin + grains, size - grains);
    by_size_.emplace(size - grains, begin + grains);
  }
  free_ -= grains;
  runs.push_back({begin, grains});
}

void ExtentAllocator::erase(std::map<std::int64_t, std::int64_t>::iterator run) {
  by_size_.erase({run->second, run->first});
  by_begin_.erase(run);
}

void ExtentAllocator::free(GrainRun run) {
  ZG_ASSERT(run.begin >= 0 && run.grains > 0 && run.begin <= grains_ - run.grains, "[{}, +{}) of {} grains",
            run.begin, run.grains, grains_);
  free_ += run.grains;
  const auto after = by_begin_.lower_bound(run.begin);
  if (after != by_begin_.begin()) {
    const auto before = std::prev(after);
    const std::int64_t end = before->first + before->second;
    ZG_ASSERT(end <= run.begin, "[{}, +{}) is free in part already", run.begin, run.grains);
    if (end == run.begin) {
      run = {before->first, before->second + run.grains};
      erase(before);
    }
  }
  if (after != by_begin_.end()) {
    ZG_ASSERT(after->first >= run.begin + run.grains, "[{}, +{}) is free in part already", run.begin,
              run.grains);
    if (after->first == run.begin + run.grains) {
      run.grains += after->second;
      erase(after);
    }
  }
  by_begin_.emplace(run.begin, run.grains);
  by_size_.emplace(run.grains, run.begin);
}

}  // namespace zg::io
