// Predicts the accesses of a step that repeats, more or less: what the step did the last time.
//
// A cursor walks along the record of that step. Each access is looked up in a window of the record after the
// cursor, so that accesses of different threads may change their order. An access that is not in the window
// may be the beginning of a later part of the record, if the step has skipped some of it; the cursor jumps
// there once the next access also matches. All other accesses are not in the record, and are ignored.
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
  // A step begins. Its accesses are expected to be those of the last step of this name, if there was one.
  void begin(const std::string& name);
  // An access happened. Returns whether the record has it. Calls passed(segment) for the access, and for each
  // recorded access that the step has skipped.
  template <class Passed>
  bool happened(const AccessStep& access, Passed&& passed);
  // The step ends. From now on program() is the step that is expected to follow.
  void end(std::int32_t segment_count);
  void expect(const Program& program, std::int32_t segment_count);

  bool active() const { return active_; }
  // The record of the current step or, between steps, of the step that is expected next. Null: none.
  const Program* program() const { return program_.get(); }
  std::int32_t cursor() const { return cursor_; }  // accesses up to here have happened or were skipped
  // Whether the same step is expected to follow the current one.
  bool repeats() const { return repeats_; }
  const Program* last_recorded() const { return recorded_.get(); }

 private:
  static constexpr std::int32_t kWindow = 64;
  static constexpr int kPatience = 24;  // accesses found after a gap before the gap counts as skipped
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
  std::uint64_t seen_ = 0;  // bit i: access cursor_ + 1 + i of the record has happened
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
  // Beyond the window: the cursor jumps if the candidate of the access before is followed by this access.
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
