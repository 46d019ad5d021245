// The order in which drives serve transfers in a timed run.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <iterator>
#include <optional>

#include "store/node.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg {

// A transfer of a link, or a piece of it.
struct LinkJob {
  ActionNode* copy = nullptr;
  std::int64_t first = 0, bytes = 0;
  bool last = false;
  std::uint64_t order = 0;
  bool operator<(const LinkJob& o) const {
    if (copy->urgency != o.copy->urgency) return copy->urgency < o.copy->urgency;
    return order < o.order;
  }
};

// What waits for drives whose reads and writes take turns, and what is in flight on them. It chooses as
// io::FairQueue does, whose blocks are whole jobs here. Not thread-safe.
class DriveQueue {
 public:
  void push(const LinkJob& job, Urgency urgency) { of(class_of(urgency), job).push_back(job); }
  void hurry(const ActionNode& copy) {
    for (std::size_t c = 1; c < waiting_.size(); ++c) {
      for (std::deque<LinkJob>& jobs : waiting_[c]) {
        const auto theirs = [&](const LinkJob& job) { return job.copy == &copy; };
        std::copy_if(jobs.begin(), jobs.end(), std::back_inserter(of(0, copy)), theirs);
        std::erase_if(jobs, theirs);
      }
    }
  }
  // The next job to serve, if any, which is in flight until done(). Jobs join those in flight while these
  // have fewer bytes than `window`; 0: no bound.
  std::optional<LinkJob> next(std::int64_t window) {
    while (window == 0 || in_flight_bytes_ < window) {
      const auto job = choose();
      if (!job) break;
      in_flight_bytes_ += job->bytes;
      in_flight_.push_back(*job);
    }
    if (in_flight_.empty()) return std::nullopt;
    const LinkJob first = in_flight_.front();
    in_flight_.pop_front();
    return first;
  }
  void done(const LinkJob& job) { in_flight_bytes_ -= job.bytes; }

 private:
  static constexpr std::size_t kClasses = io::kPriorities;
  static constexpr int kMostPassed = io::kFairShare - io::kPriorities + 1;

  static std::size_t class_of(Urgency urgency) {
    return urgency == Urgency::kDemand ? 0 : urgency == Urgency::kWriteBack ? 2 : 1;
  }
  std::deque<LinkJob>& of(std::size_t c, const ActionNode& copy) {
    return waiting_[c][writes_drives(link_of(copy.action)) ? 1 : 0];
  }
  std::deque<LinkJob>& of(std::size_t c, const LinkJob& job) { return of(c, *job.copy); }
  bool any(std::size_t c) const { return !waiting_[c][0].empty() || !waiting_[c][1].empty(); }

  std::optional<LinkJob> choose() {
    std::size_t chosen = kClasses;
    for (std::size_t c = kClasses; c-- > 0;) {
      if (any(c) && (chosen == kClasses || passed_[chosen] < kMostPassed)) chosen = c;
    }
    if (chosen == kClasses) return std::nullopt;
    passed_[chosen] = 0;
    for (std::size_t below = chosen + 1; below < kClasses; ++below) passed_[below] += any(below) ? 1 : 0;
    auto& [reads, writes] = waiting_[chosen];
    const bool both = !reads.empty() && !writes.empty();
    const bool write = both ? balance_[chosen] > 0 : reads.empty();
    std::deque<LinkJob>& from = write ? writes : reads;
    const LinkJob job = from.front();
    from.pop_front();
    balance_[chosen] = both ? balance_[chosen] + (write ? -job.bytes : job.bytes) : 0;
    return job;
  }

  std::array<std::array<std::deque<LinkJob>, 2>, kClasses> waiting_;  // reads, writes
  std::array<int, kClasses> passed_{};
  std::array<std::int64_t, kClasses> balance_{};
  std::deque<LinkJob> in_flight_;
  std::int64_t in_flight_bytes_ = 0;
};

}  // namespace zg
