#include "ziggurat/store/replay.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/store/dry_run.hpp"

namespace zg {
namespace {

ReplayCounts operator-(const ReplayCounts& a, const ReplayCounts& b) {
  return {a.accesses - b.accesses, a.hits - b.hits, a.host_hits - b.host_hits,
          a.device_evictions - b.device_evictions, a.host_evictions - b.host_evictions};
}

// The most accesses of one call of reuse_distances(), which takes some 30 bytes for each.
constexpr std::int64_t kMostDistances = 1 << 27;

class Replayer final : private DryRunObserver {
 public:
  Replayer(const AccessTrace& trace, const Budgets& budgets, const PolicyFactory& policy,
           const ReplayOptions& options)
      : trace_(trace),
        options_(options),
        past_matters_(policy && !policy()->uses_future()),
        residency_(trace.table, budgets, policy),
        of_op_(static_cast<std::size_t>(trace.table.segment_count()), -1) {
    for (const std::int32_t which : trace.sequence) {
      ops_per_round_ += trace.programs[static_cast<std::size_t>(which)].op_count();
    }
    for (const SegmentId id : options.keep) residency_.pin(id, Tier::kHost);
  }

  ReplayResult run() {
    if (place_content()) {
      for (int round = 0; round < options_.rounds && !repeats(); ++round) {
        if (!run_round()) break;
      }
    }
    summarize();
    return std::move(result_);
  }

 private:
  bool fail(const NoRoom& obstacle, std::int32_t op) {
    result_.obstacle = obstacle;
    result_.obstacle_run = static_cast<std::int64_t>(result_.runs.size());
    result_.obstacle_op = op;
    return false;
  }

  // Gives a segment content, at the lowest tier that it may be demoted to.
  std::optional<NoRoom> place(SegmentId id) {
    const Tier lowest = trace_.table.segment(id).lowest;
    if (lowest == Tier::kNvme) {
      residency_.assume_content(id, Tier::kNvme);
      return std::nullopt;
    }
    moves_.clear();
    return residency_.decide_free({id, lowest, Access::kOverwrite, false}, moves_);
  }

  bool place_content() {
    std::vector<bool> seen(of_op_.size());
    for (const std::int32_t which : trace_.sequence) {
      const Program& program = trace_.programs[static_cast<std::size_t>(which)];
      for (std::int32_t i = 0; i < program.access_count(); ++i) {
        const AccessStep& a = program.access(i);
        if (seen[static_cast<std::size_t>(a.segment)]) continue;
        seen[static_cast<std::size_t>(a.segment)] = true;
        if (a.access == Access::kOverwrite) continue;
        if (auto failure = place(a.segment)) return fail(*failure, 0);
      }
    }
    return true;
  }

  bool run_round() {
    const LinkBytes before = residency_.copies().traffic();
    const ReplayCounts counted = counts_;
    for (std::size_t i = 0; i < trace_.sequence.size(); ++i) {
      const LinkBytes start = residency_.copies().traffic();
      const Program& program = trace_.programs[static_cast<std::size_t>(trace_.sequence[i])];
      program_ = &program;
      std::int32_t op = 0;
      if (auto failure = dry_run(residency_, program, this, &op)) return fail(*failure, op);
      result_.runs.push_back(residency_.copies().traffic() - start);
    }
    result_.rounds.push_back(residency_.copies().traffic() - before);
    result_.counts.push_back(counts_ - counted);
    places_.push_back(residency_.copies().fingerprint());
    return true;
  }

  std::optional<NoRoom> before(std::int32_t op) override {
    report();
    for (const AccessStep& a : program_->op(op)) {
      if (a.access == Access::kOverwrite) continue;
      if (!residency_.copies().has_content(a.segment)) {
        if (auto failure = place(a.segment)) return failure;
      }
      ++counts_.accesses;
      if (residency_.copies().present(a.segment, a.tier)) {
        ++counts_.hits;
      } else if (residency_.copies().present(a.segment, Tier::kHost)) {
        ++counts_.host_hits;
      }
    }
    return std::nullopt;
  }

  // Counts evictions. Copies that the operation's own writes made stale, or whose content is dead, are not
  // evicted.
  void after(std::int32_t op, std::span<const Action> moves) override {
    ++stamp_;
    for (const AccessStep& a : program_->op(op)) {
      if (a.access != Access::kRead || a.last) of_op_[static_cast<std::size_t>(a.segment)] = stamp_;
    }
    for (const Action& move : moves) {
      if (move.kind != Action::Kind::kFree || of_op_[static_cast<std::size_t>(move.segment)] == stamp_)
        continue;
      ++(move.tier == Tier::kDevice ? counts_.device_evictions : counts_.host_evictions);
    }
  }

  void report() {
    if (!options_.progress || stamp_ % 4096 != 0) return;
    const double share =
        static_cast<double>(stamp_) / (static_cast<double>(ops_per_round_) * options_.rounds);
    if (!options_.progress(std::min(share, 1.0))) throw Error(Errc::kInterrupted, "replay", "interrupted");
  }

  // Sets result_.cycle if the last round ended with the same placement as an earlier one, on which alone
  // decisions depend.
  bool repeats() {
    const std::size_t n = places_.size();
    for (std::size_t c = 1; c < n && !past_matters_; ++c) {
      if (places_[n - 1 - c] != places_[n - 1]) continue;
      result_.cycle = static_cast<int>(c);
      return true;
    }
    return false;
  }
  // A policy that decides by past uses has state that cannot be compared here. For such policies this checks
  // whether the second half of the rounds does the same over and over again.
  void find_repetition() {
    const std::size_t n = places_.size(), half = n / 2;
    const auto same = [&](std::size_t a, std::size_t b) {
      return places_[a] == places_[b] && result_.rounds[a] == result_.rounds[b];
    };
    for (std::size_t c = 1; 2 * c <= half && result_.cycle == 0; ++c) {
      bool all = true;
      for (std::size_t i = n - half + c; i < n && all; ++i) all = same(i, i - c);
      if (all) result_.cycle = static_cast<int>(c);
    }
  }

  void summarize() {
    result_.peak = {residency_.copies().peak(Tier::kDevice), residency_.copies().peak(Tier::kHost)};
    const std::size_t n = result_.rounds.size();
    if (n == 0) return;
    if (past_matters_) {
      find_repetition();
    } else if (result_.cycle == 0) {
      repeats();
    }
    const std::size_t last = result_.cycle > 0 ? static_cast<std::size_t>(result_.cycle) : (n + 1) / 2;
    LinkBytes sum;
    ReplayCounts counts;
    for (std::size_t i = n - last; i < n; ++i) {
      sum += result_.rounds[i];
      counts = counts - (ReplayCounts{} - result_.counts[i]);
    }
    const auto mean = [&](std::int64_t value) {
      const auto k = static_cast<std::int64_t>(last);
      return (value + k / 2) / k;
    };
    for (std::size_t l = 0; l < kLinks; ++l) result_.per_round.of[l] = mean(sum.of[l]);
    result_.counts_per_round = {mean(counts.accesses), mean(counts.hits), mean(counts.host_hits),
                                mean(counts.device_evictions), mean(counts.host_evictions)};
  }

  const AccessTrace& trace_;
  const ReplayOptions& options_;
  bool past_matters_;
  Residency residency_;
  std::vector<std::int64_t> of_op_;  // by segment: the last operation that made its copies stale or dead
  std::int64_t stamp_ = 0, ops_per_round_ = 0;
  ReplayCounts counts_;
  const Program* program_ = nullptr;  // the one that is being replayed
  std::vector<Action> moves_;
  std::vector<std::uint64_t> places_;  // after each round
  ReplayResult result_;
};

}  // namespace

ReplayResult replay(const AccessTrace& trace, const Budgets& budgets, const PolicyFactory& policy,
                    const ReplayOptions& options) {
  return Replayer(trace, budgets, policy, options).run();
}

std::optional<Budgets> smallest_budgets(const AccessTrace& trace, std::int64_t device,
                                        const std::function<bool(double)>& progress, bool direct) {
  std::vector<const Program*> programs;
  for (const Program& program : trace.programs) programs.push_back(&program);
  int done = 0;
  const auto fits = [&](const Budgets& budgets) {
    if (progress && !progress(std::min(1.0, ++done / 64.0)))
      throw Error(Errc::kInterrupted, "replay", "interrupted");
    return !replay(trace, budgets, default_policy(), {.rounds = 2}).obstacle;
  };
  return smallest_budgets(trace.table, largest_operation(trace.table, programs), device, direct,
                          {.fits = fits});
}

// A Fenwick tree by position has the bytes of each segment at its last use so far; the distance of a use is
// the sum over all positions after the segment's previous use. A first round fills the tree, a second one
// reads it.
std::vector<std::int64_t> reuse_distances(const TensorTable& table,
                                          std::span<const Program* const> sequence) {
  std::int64_t all = 0;
  for (const Program* program : sequence) all += program->access_count();
  if (all > kMostDistances)
    throw Error(Errc::kMemory, "reuse distances",
                fmt::format("are of {} accesses, and memory is taken for {}", all, kMostDistances),
                "record fewer steps, or steps with fewer evaluations between them");
  std::vector<SegmentId> accesses;
  for (const Program* program : sequence) {
    for (std::int32_t i = 0; i < program->access_count(); ++i) accesses.push_back(program->access(i).segment);
  }
  const std::size_t n = accesses.size();
  std::vector<std::int64_t> tree(2 * n + 1), last(static_cast<std::size_t>(table.segment_count()), -1),
      found(n);
  const auto add = [&](std::size_t at, std::int64_t bytes) {
    for (std::size_t i = at + 1; i < tree.size(); i += i & (~i + 1)) tree[i] += bytes;
  };
  const auto sum_below = [&](std::size_t end) {
    std::int64_t sum = 0;
    for (std::size_t i = end; i > 0; i -= i & (~i + 1)) sum += tree[i];
    return sum;
  };
  for (std::size_t p = 0; p < 2 * n; ++p) {
    const SegmentId id = accesses[p % n];
    const std::int64_t bytes = table.segment(id).charge;
    std::int64_t& before = last[static_cast<std::size_t>(id)];
    if (before >= 0) {
      if (p >= n) found[p - n] = sum_below(p) - sum_below(static_cast<std::size_t>(before) + 1);
      add(static_cast<std::size_t>(before), -bytes);
    }
    before = static_cast<std::int64_t>(p);
    add(p, bytes);
  }
  return found;
}

}  // namespace zg
