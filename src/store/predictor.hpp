// Follows a step that repeats, more or less: what it did the last time is what it will do, until it shows
// otherwise.
//
// A cursor walks the record. An access is looked for in a window behind the cursor, so that threads may swap
// places; what is not there may be the start of a later part of the record (something was left out), and is
// taken for it when the access after it fits, too. Everything else is beside the record, and changes nothing.
//
// Not thread-safe: the store calls it under its mutex.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/store/program.hpp"

namespace zg {

class Predictor {
 public:
  // A step begins. The record of the last one of that name, if there is one, is what is expected.
  void begin(const std::string& name);
  // An access happened. Says whether it was expected; `passed(segment)` is called for it and for those whose
  // uses were left out.
  template <class Passed>
  bool happened(const AccessStep& access, Passed&& passed);
  // The step ends. What is expected to follow; null: not known. Never one that is expected no more.
  void end(std::int32_t segment_count);
  void expect(const Program& program, std::int32_t segment_count);

  bool active() const { return active_; }
  // What is being followed, or is expected to come next.
  const Program* program() const { return program_.get(); }
  std::int32_t cursor() const { return cursor_; }  // accesses up to it have happened; -1: none
  // Whether the same program is expected again behind its end.
  bool repeats() const { return repeats_; }
  const Program* last_recorded() const { return recorded_.get(); }

 private:
  static constexpr std::int32_t kWindow = 64;
  static constexpr int kPatience = 24;  // accesses found behind a gap before it counts as left out
  static constexpr std::size_t kLongest = 1 << 22;

  bool fits(std::int32_t position, const AccessStep& access) const {
    const AccessStep& a = program_->access(position);
    return a.segment == access.segment && a.tier == access.tier;
  }
  std::shared_ptr<const Program> find(const std::string& name) const;
  std::shared_ptr<const Program> record(std::int32_t segment_count) const;

  std::map<std::string, std::shared_ptr<const Program>> known_;
  std::map<std::string, std::string> successor_;
  bool active_ = false;
  std::string name_;
  std::shared_ptr<const Program> program_, recorded_;
  std::vector<AccessStep> log_;
  std::int32_t cursor_ = -1;
  std::uint64_t seen_ = 0;  // bit i: the access at cursor_ + 1 + i has happened
  std::int32_t candidate_ = -2;
  bool repeats_ = false;
};

template <class Passed>
bool Predictor::happened(const AccessStep& access, Passed&& passed) {
  if (log_.size() < kLongest) log_.push_back(access);
  if (program_ == nullptr) return false;
  const std::int32_t count = program_->access_count();
  const auto move_to = [&](std::int32_t cursor) {
    while (cursor_ < cursor) {
      ++cursor_;
      const bool left_out = (seen_ & 1) == 0;
      seen_ >>= 1;
      if (left_out) passed(program_->access(cursor_).segment);
    }
  };
  const auto skip_seen = [&] {
    while ((seen_ & 1) != 0) ++cursor_, seen_ >>= 1;
  };
  for (std::int32_t i = 0; i < kWindow && cursor_ + 1 + i < count; ++i) {
    if ((seen_ >> i & 1) != 0 || !fits(cursor_ + 1 + i, access)) continue;
    seen_ |= std::uint64_t{1} << i;
    skip_seen();
    if (__builtin_popcountll(seen_) >= kPatience) {
      move_to(cursor_ + __builtin_ctzll(seen_));
      skip_seen();
    }
    candidate_ = -2;
    passed(access.segment);
    return true;
  }
  if (!program_->knows(access.segment)) return false;
  // Further ahead: the nearest, if what comes next fits behind it.
  if (candidate_ >= 0 && candidate_ + 1 < count && fits(candidate_ + 1, access)) {
    move_to(candidate_ + 1);
    seen_ = 0;
    candidate_ = -2;
    passed(access.segment);
    return true;
  }
  candidate_ = -2;
  for (const std::int32_t use : program_->uses(access.segment)) {
    if (use <= cursor_ + kWindow || !fits(use, access)) continue;
    candidate_ = use;
    break;
  }
  return false;
}

}  // namespace zg
