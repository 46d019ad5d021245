#include "io/extent_allocator.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "ziggurat/base/error.hpp"

namespace zg::io {

ExtentAllocator::ExtentAllocator(std::int64_t grains) : grains_(grains) {
  ZG_ASSERT_GE(grains, 0);
  spare_.reserve(kSpares);
  if (grains > 0) free({0, grains});
}

ExtentAllocator::Node ExtentAllocator::new_node() {
  ByBegin by_begin{{0, 0}};
  BySize by_size{{0, 0}};
  return {by_begin.extract(by_begin.begin()), by_size.extract(by_size.begin())};
}

ExtentAllocator::Node ExtentAllocator::extract(GrainRun run) {
  return {by_begin_.extract(run.begin), by_size_.extract({run.grains, run.begin})};
}

void ExtentAllocator::insert(Node node, GrainRun run) {
  node.by_begin.key() = run.begin;
  node.by_begin.mapped() = run.grains;
  node.by_size.value() = {run.grains, run.begin};
  by_begin_.insert(std::move(node.by_begin));
  by_size_.insert(std::move(node.by_size));
}

void ExtentAllocator::keep(Node node) {
  if (spare_.size() < kSpares) spare_.push_back(std::move(node));
}

void ExtentAllocator::reserve(std::size_t frees) {
  while (spare_.size() < frees) spare_.push_back(new_node());
}

bool ExtentAllocator::allocate(std::int64_t grains, std::vector<GrainRun>& runs) {
  ZG_ASSERT(grains > 0, "{} grains", grains);
  if (grains > free_) return false;
  while (grains > 0) {
    // The best fit; where none holds all of it, the largest, and for the rest the best fit again.
    auto run = by_size_.lower_bound({grains, 0});
    if (run == by_size_.end()) --run;
    const std::int64_t n = std::min(grains, run->first);
    take({run->second, run->first}, n, runs);
    grains -= n;
  }
  return true;
}

void ExtentAllocator::take(GrainRun run, std::int64_t grains, std::vector<GrainRun>& runs) {
  runs.push_back({run.begin, grains});
  Node node = extract(run);
  if (run.grains > grains) {
    insert(std::move(node), {run.begin + grains, run.grains - grains});
  } else {
    keep(std::move(node));
  }
  free_ -= grains;
}

bool ExtentAllocator::take_at(GrainRun run) {
  const auto behind = by_begin_.upper_bound(run.begin);
  if (run.grains <= 0 || behind == by_begin_.begin()) return false;
  const GrainRun whole{std::prev(behind)->first, std::prev(behind)->second};
  const std::int64_t end = run.begin + run.grains, rest = whole.begin + whole.grains - end;
  if (rest < 0) return false;
  Node tail = new_node();
  Node node = extract(whole);
  if (rest > 0) insert(std::move(tail), {end, rest});
  if (run.begin > whole.begin) {
    insert(std::move(node), {whole.begin, run.begin - whole.begin});
  } else {
    keep(std::move(node));
  }
  free_ -= run.grains;
  return true;
}

void ExtentAllocator::free(GrainRun run) {
  ZG_ASSERT(run.begin >= 0 && run.grains > 0 && run.begin <= grains_ - run.grains, "[{}, +{}) of {} grains",
            run.begin, run.grains, grains_);
  const std::int64_t freed = run.grains, end = run.begin + run.grains;
  GrainRun before, after;
  const auto next = by_begin_.lower_bound(run.begin);
  if (next != by_begin_.begin()) before = {std::prev(next)->first, std::prev(next)->second};
  if (next != by_begin_.end()) after = {next->first, next->second};
  ZG_ASSERT(before.begin + before.grains <= run.begin && (after.grains == 0 || after.begin >= end),
            "[{}, +{}) is free in part already", run.begin, run.grains);
  const bool joins_before = before.grains > 0 && before.begin + before.grains == run.begin;
  const bool joins_after = after.grains > 0 && after.begin == end;
  Node node;
  if (joins_before) {
    run = {before.begin, before.grains + run.grains};
    node = extract(before);
  }
  if (joins_after) {
    run.grains += after.grains;
    if (joins_before) keep(std::move(node));
    node = extract(after);
  }
  if (!joins_before && !joins_after) {
    if (spare_.empty()) spare_.push_back(new_node());
    node = std::move(spare_.back());
    spare_.pop_back();
  }
  insert(std::move(node), run);
  free_ += freed;
}

}  // namespace zg::io
