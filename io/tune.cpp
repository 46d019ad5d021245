#include "ziggurat/io/tune.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "io/tune_order.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// The shares of the time after which the grids with their refinements, and then the queues, must end. The
// repeats get the rest, since only they make the answer sure.
constexpr double kGridShare = 0.55, kQueueShare = 0.7;
constexpr double kNearBackend = 0.9;  // a back end gets a grid if it reaches this share of the best score
constexpr std::size_t kGrids = 2;     // at most
constexpr int kMoves = 8;             // of one climb, at most
constexpr double kOtherHill = 0.8;    // a far point with this share of the best score is climbed from, too
constexpr double kNoise = 0.04;       // of one measurement: scores that differ by less may be equal
constexpr std::size_t kFastest = 3, kCandidates = 5;
constexpr int kFailuresInARow = 3;  // then the search gives up

class Search {
 public:
  Search(const TuneOptions& options, const TuneMeter& meter) : options_(options), meter_(meter) {
    for (const TuneRecord& record : options.known) {
      // A point that failed is tried again.
      if (record.error.empty()) known_[record.round].emplace(record.point, record.sample);
    }
    cost_ = options.expected_seconds;
  }

  TuneOutcome run() {
    search();
    if (best_score_ <= 0 && failure_) throw *failure_;
    out_.search_complete = !stopped_ && !late_;
    repeat();
    put_in_order(options_.goal, out_);
    out_.verdict = verdict_of(out_);
    list_skipped();
    return std::move(out_);
  }

 private:
  using Samples = std::map<TunePoint, TuneSample>;

  // Phases.
  void search();
  std::vector<Backend> rank_backends();
  void grid(Backend backend);
  void refine(Backend backend);
  void climb(TunePoint from);
  void try_queues(const TunePoint& at);
  void choose_candidates();
  void repeat();
  bool run_round(int round, const Samples& known);

  // The sample of a point, which is measured now if there is none; null when that fails or the phase must
  // end.
  const TuneSample* sample_of(const TunePoint& point);
  std::optional<TuneSample> measure(const TunePoint& point, int round);
  void note(const TunePoint& point, int round, const TuneSample& sample);
  double score_at(const TunePoint& point) const;
  std::optional<TunePoint> best_of(std::optional<Backend> backend, int queues) const;
  bool ended() const { return stopped_ || late_; }
  void list_skipped();

  const TuneOptions& options_;
  const TuneMeter& meter_;
  std::map<int, Samples> known_;  // by round; -1: of the search
  Samples samples_;
  std::set<TunePoint> failed_;
  std::optional<Error> failure_;
  int failures_in_a_row_ = 0;
  double cost_ = 0;  // seconds that a measurement takes: a mean of the last ones
  double deadline_ = 0;
  bool stopped_ = false, late_ = false;
  double best_score_ = 0, best_rate_ = 0;
  int measured_ = 0;
  const char* phase_ = "";
  TuneOutcome out_;
};

// The entry of an ascending list that is nearest by ratio.
template <class T>
T nearest(const std::vector<T>& list, T wanted) {
  return *std::min_element(list.begin(), list.end(), [&](T a, T b) {
    const auto distance = [&](T x) {
      return x > wanted ? double(x) / double(wanted) : double(wanted) / double(x);
    };
    return distance(a) < distance(b);
  });
}

template <class T>
std::ptrdiff_t index_of(const std::vector<T>& list, T value) {
  return std::find(list.begin(), list.end(), value) - list.begin();
}

// Every second index, and the last.
std::vector<std::size_t> coarse(std::size_t count) {
  std::vector<std::size_t> picked;
  for (std::size_t i = 0; i < count; i += 2) picked.push_back(i);
  if (picked.back() != count - 1) picked.push_back(count - 1);
  return picked;
}

void Search::note(const TunePoint& point, int round, const TuneSample& sample) {
  out_.records.push_back({.point = point, .round = round, .sample = sample});
  // The slower direction decides how long what is in flight takes to complete.
  const double read = sample.read.bytes_per_second, write = sample.write.bytes_per_second;
  best_rate_ = std::max(best_rate_, read > 0 && write > 0 ? std::min(read, write) : std::max(read, write));
  if (round >= 0) return;
  samples_.emplace(point, sample);
  best_score_ = std::max(best_score_, score_of(options_.goal, sample));
}

std::optional<TuneSample> Search::measure(const TunePoint& point, int round) {
  if (meter_.progress) {
    meter_.progress(
        {.phase = phase_, .point = point, .measured = measured_, .round = round, .best_score = best_score_});
  }
  const double begin = meter_.seconds();
  std::optional<TuneSample> sample;
  try {
    sample = meter_.measure(point, round);
    failures_in_a_row_ = 0;
  } catch (const Error& e) {
    out_.records.push_back({.point = point, .round = round, .error = e.what()});
    failed_.insert(point);
    failure_ = e;
    if (++failures_in_a_row_ >= kFailuresInARow) throw;
    return std::nullopt;
  }
  if (!sample) {
    stopped_ = true;
    return std::nullopt;
  }
  ++measured_;
  const double took = meter_.seconds() - begin;
  cost_ = measured_ == 1 ? took : 0.7 * cost_ + 0.3 * took;
  note(point, round, *sample);
  return sample;
}

const TuneSample* Search::sample_of(const TunePoint& point) {
  if (const auto found = samples_.find(point); found != samples_.end()) return &found->second;
  if (ended() || failed_.contains(point)) return nullptr;
  if (!skip_reason(options_.space, point, best_rate_).empty()) return nullptr;
  if (const auto known = known_[-1].find(point); known != known_[-1].end()) {
    ++out_.taken_over;
    note(point, -1, known->second);
    return &samples_.at(point);
  }
  if (meter_.seconds() + cost_ > deadline_) {
    late_ = true;
    return nullptr;
  }
  if (!measure(point, -1)) return nullptr;
  return &samples_.at(point);
}

double Search::score_at(const TunePoint& point) const {
  const auto found = samples_.find(point);
  return found == samples_.end() ? -1 : score_of(options_.goal, found->second);
}

std::optional<TunePoint> Search::best_of(std::optional<Backend> backend, int queues) const {
  std::optional<TunePoint> best;
  for (const auto& [point, sample] : samples_) {
    if ((backend && point.backend != *backend) || (queues > 0 && point.queues != queues)) continue;
    if (!best || score_of(options_.goal, sample) > score_at(*best)) best = point;
  }
  return best;
}

void Search::search() {
  deadline_ = kGridShare * options_.seconds;
  std::vector<Backend> order = rank_backends();
  if (order.size() > kGrids) order.resize(kGrids);
  for (const Backend backend : order) {
    grid(backend);
    refine(backend);
  }
  phase_ = "queues";
  deadline_ = kQueueShare * options_.seconds;
  const bool cut = std::exchange(late_, false);  // the queues have a deadline of their own
  for (const Backend backend : order) {
    if (const auto best = best_of(backend, 1)) try_queues(*best);
  }
  late_ = late_ || cut;
}

// The back ends that are worth a grid, the best first.
std::vector<Backend> Search::rank_backends() {
  phase_ = "back ends";
  const TuneSpace& space = options_.space;
  if (space.backends.size() == 1) return space.backends;
  constexpr std::pair<std::int64_t, int> kTelling[] = {
      {kMiB, 32}, {256 * kKiB, 128}, {kMiB, 4}, {4 * kMiB, 16}};
  for (const auto& [block_size, depth] : kTelling) {
    for (const Backend backend : space.backends) {
      sample_of({backend, nearest(space.block_sizes, block_size), nearest(space.depths, depth), 1});
    }
  }
  std::vector<std::pair<double, Backend>> ranked;
  for (const Backend backend : space.backends) {
    if (const auto best = best_of(backend, 1)) ranked.emplace_back(score_at(*best), backend);
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Backend> order;
  for (const auto& [score, backend] : ranked) {
    if (score >= kNearBackend * ranked.front().first) order.push_back(backend);
  }
  return order;
}

void Search::grid(Backend backend) {
  phase_ = "grid";
  const TuneSpace& space = options_.space;
  const auto middle_block = index_of(space.block_sizes, nearest(space.block_sizes, kMiB));
  const auto middle_depth = index_of(space.depths, nearest(space.depths, 16));
  // From the middle outwards, since the best point is most often there and the time may run out.
  std::vector<std::pair<std::ptrdiff_t, TunePoint>> points;
  for (const std::size_t b : coarse(space.block_sizes.size())) {
    for (const std::size_t d : coarse(space.depths.size())) {
      const auto distance = std::abs(static_cast<std::ptrdiff_t>(b) - middle_block) +
                            std::abs(static_cast<std::ptrdiff_t>(d) - middle_depth);
      points.emplace_back(distance, TunePoint{backend, space.block_sizes[b], space.depths[d], 1});
    }
  }
  std::stable_sort(points.begin(), points.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& entry : points) sample_of(entry.second);
}

// Climbs from `from` until none of the eight neighbours is better.
void Search::climb(TunePoint from) {
  const TuneSpace& space = options_.space;
  for (int move = 0; move < kMoves && !ended(); ++move) {
    const auto b = index_of(space.block_sizes, from.block_size);
    const auto d = index_of(space.depths, from.queue_depth);
    TunePoint best = from;
    for (std::ptrdiff_t i = b - 1; i <= b + 1; ++i) {
      for (std::ptrdiff_t j = d - 1; j <= d + 1; ++j) {
        if (i < 0 || j < 0 || i >= std::ssize(space.block_sizes) || j >= std::ssize(space.depths)) continue;
        const TunePoint near{from.backend, space.block_sizes[static_cast<std::size_t>(i)],
                             space.depths[static_cast<std::size_t>(j)], from.queues};
        if (sample_of(near) != nullptr && score_at(near) > score_at(best)) best = near;
      }
    }
    if (best == from) return;
    from = best;
  }
}

void Search::refine(Backend backend) {
  phase_ = "refine";
  const auto top = best_of(backend, 1);
  if (!top) return;
  // Climbs from another hill too, if there is one: the grid may have hit the top of this one and the side of
  // that.
  std::optional<TunePoint> second;
  for (const auto& [point, sample] : samples_) {
    if (point.backend != backend || score_at(point) < kOtherHill * score_at(*top)) continue;
    const auto far = [](std::int64_t a, std::int64_t b) { return std::max(a, b) > 4 * std::min(a, b); };
    if (!far(point.block_size, top->block_size) && !far(point.queue_depth, top->queue_depth)) continue;
    if (!second || score_at(point) > score_at(*second)) second = point;
  }
  climb(*top);
  if (second) climb(*second);
  const TunePoint best = *best_of(backend, 1);
  const auto& depths = options_.space.depths;
  for (auto d = index_of(depths, best.queue_depth) - 1; d >= 0; --d) {
    TunePoint shallower = best;
    shallower.queue_depth = depths[static_cast<std::size_t>(d)];
    if (sample_of(shallower) == nullptr || score_at(shallower) < (1 - kNoise) * score_at(best)) break;
  }
}

void Search::try_queues(const TunePoint& at) {
  TunePoint best = at;
  for (const int queues : options_.space.queues) {
    if (queues <= 1) continue;
    TunePoint here = at;
    here.queues = queues;
    // The queues share the depth, so more queues may need a larger one.
    TunePoint deeper = here;
    deeper.queue_depth *= 2;
    const auto& depths = options_.space.depths;
    const bool can_be_deeper = index_of(depths, deeper.queue_depth) < std::ssize(depths);
    sample_of(here);
    if (can_be_deeper && sample_of(deeper) != nullptr && score_at(deeper) > score_at(here)) here = deeper;
    if (score_at(here) < (1 - kNoise) * score_at(best)) break;
    if (score_at(here) > score_at(best)) best = here;
  }
  if (best.queues > 1 && score_at(best) > (1 + kTuneTie) * score_at(at)) climb(best);
}

// Picks the fastest points, the best of another back end if it is near, and the cheapest of those that may be
// as fast.
void Search::choose_candidates() {
  std::vector<TuneCandidate> all;
  for (const auto& [point, sample] : samples_) {
    TuneCandidate c{.point = point, .samples = {sample}, .typical = sample};
    c.median = score_of(options_.goal, sample);
    all.push_back(std::move(c));
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const TuneCandidate& a, const TuneCandidate& b) { return a.median > b.median; });
  // Everything before `picked` is picked.
  auto picked = all.begin() + static_cast<std::ptrdiff_t>(std::min(kFastest, all.size()));
  const auto pick = [&](auto which) {
    std::rotate(picked, which, which + 1);
    ++picked;
  };
  const auto other = std::find_if(picked, all.end(), [&](const TuneCandidate& c) {
    return c.median >= kOtherHill * all.front().median &&
           std::none_of(all.begin(), picked,
                        [&](const auto& p) { return p.point.backend == c.point.backend; });
  });
  if (other != all.end()) pick(other);
  while (picked - all.begin() < static_cast<std::ptrdiff_t>(kCandidates)) {
    auto cheapest = all.end();
    for (auto c = picked; c != all.end(); ++c) {
      if (c->median < (1 - kNoise) * all.front().median) continue;
      if (cheapest == all.end() || is_cheaper(options_.goal, *c, *cheapest)) cheapest = c;
    }
    if (cheapest == all.end()) break;
    pick(cheapest);
  }
  all.erase(picked, all.end());
  out_.candidates = std::move(all);
}

// Measures all candidates once, in random order, but takes the samples in `known` as they are. False: time is
// up, or the user stopped it, before all were measured.
bool Search::run_round(int round, const Samples& known) {
  std::vector<std::size_t> order(out_.candidates.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const NamedRandom random(options_.seed, fmt::format("io tune round {}", round));
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i, i)]);

  const auto left = std::count_if(out_.candidates.begin(), out_.candidates.end(),
                                  [&](const TuneCandidate& c) { return !known.contains(c.point); });
  if (left > 0 && meter_.seconds() + static_cast<double>(left) * cost_ > options_.seconds) {
    late_ = true;
    return false;
  }
  Samples seen;
  for (const std::size_t i : order) {
    const TunePoint& point = out_.candidates[i].point;
    if (const auto found = known.find(point); found != known.end()) {
      ++out_.taken_over;
      note(point, round, found->second);
      seen.insert(*found);
    } else if (const auto sample = measure(point, round)) {
      seen.emplace(point, *sample);
    } else if (stopped_) {
      return false;
    }
  }
  std::erase_if(out_.candidates, [&](const TuneCandidate& c) { return failed_.contains(c.point); });
  for (TuneCandidate& c : out_.candidates) {
    if (out_.rounds == 0) c.samples.clear();  // that of the search is biased: it was picked for being high
    c.samples.push_back(seen.at(c.point));
  }
  ++out_.rounds;
  return true;
}

void Search::repeat() {
  phase_ = "repeat";
  choose_candidates();
  if (out_.candidates.empty() || stopped_) {
    out_.end = stopped_ ? TuneEnd::kStopped : TuneEnd::kTime;
    return;
  }
  late_ = false;
  for (int round = 0; out_.rounds < kTuneMaxRounds && !out_.candidates.empty(); ++round) {
    // A known round counts if it has all candidates, or if it was interrupted and has only some of them. Else
    // it is a round of other candidates; its number is taken, but its samples say nothing here.
    const Samples& known = known_[round];
    const auto is_candidate = [&](const auto& sample) {
      return std::any_of(out_.candidates.begin(), out_.candidates.end(),
                         [&](const TuneCandidate& c) { return c.point == sample.first; });
    };
    const bool has_all = std::all_of(out_.candidates.begin(), out_.candidates.end(),
                                     [&](const TuneCandidate& c) { return known.contains(c.point); });
    if (!has_all && !std::all_of(known.begin(), known.end(), is_candidate)) continue;
    if (!run_round(round, known)) break;
    put_in_order(options_.goal, out_);
    if (is_stable(out_)) {
      out_.end = TuneEnd::kStable;
      return;
    }
  }
  out_.end = stopped_ ? TuneEnd::kStopped : TuneEnd::kTime;
}

void Search::list_skipped() {
  for (const Backend backend : options_.space.backends) {
    for (const std::int64_t block_size : options_.space.block_sizes) {
      for (const int depth : options_.space.depths) {
        const TunePoint point{backend, block_size, depth, 1};
        if (samples_.contains(point)) continue;
        std::string why = skip_reason(options_.space, point, best_rate_);
        if (!why.empty()) out_.skipped.emplace_back(point, std::move(why));
      }
    }
  }
}

}  // namespace

const char* name_of(TuneGoal goal) {
  constexpr const char* kNames[] = {"both", "read", "write"};
  return kNames[static_cast<int>(goal)];
}

double score_of(TuneGoal goal, const TuneSample& sample) {
  const double read = sample.read.bytes_per_second, write = sample.write.bytes_per_second;
  if (goal == TuneGoal::kRead) return read;
  if (goal == TuneGoal::kWrite) return write;
  return read + write > 0 ? 2 * read * write / (read + write) : 0;
}

double cpu_of(TuneGoal goal, const TuneSample& sample) {
  if (goal == TuneGoal::kRead) return sample.read.cpu_seconds_per_gb;
  if (goal == TuneGoal::kWrite) return sample.write.cpu_seconds_per_gb;
  return (sample.read.cpu_seconds_per_gb + sample.write.cpu_seconds_per_gb) / 2;
}

std::string block_text(std::int64_t block_size) {
  if (block_size % kMiB == 0) return fmt::format("{} MiB", block_size / kMiB);
  if (block_size % kKiB == 0) return fmt::format("{} KiB", block_size / kKiB);
  return fmt::format("{} B", block_size);
}

std::string text_of(const TunePoint& point) {
  std::string text =
      fmt::format("{} {} x {}", name_of(point.backend), block_text(point.block_size), point.queue_depth);
  if (point.queues > 1) text += fmt::format(", {} queues", point.queues);
  return text;
}

TuneSpace TuneSpace::usual(std::vector<Backend> backends, int cores) {
  TuneSpace space;
  space.backends = std::move(backends);
  for (std::int64_t b = 64 * kKiB; b <= 16 * kMiB; b *= 2) space.block_sizes.push_back(b);
  for (int d = 1; d <= 256; d *= 2) space.depths.push_back(d);
  for (int q = 2; q <= std::min(cores, 16); q *= 2) space.queues.push_back(q);
  return space;
}

std::string skip_reason(const TuneSpace& space, const TunePoint& point, double best_rate) {
  const std::int64_t in_flight = point.block_size * point.queue_depth;
  if (in_flight * space.paths > space.memory_bytes) {
    return fmt::format("would take {} of buffers, more than the cap of {}",
                       format_bytes(in_flight * space.paths), format_bytes(space.memory_bytes));
  }
  if (space.file_bytes > 0 && in_flight > space.file_bytes / 2) {
    return fmt::format("would have more than half of the file ({}) in flight",
                       format_bytes(space.file_bytes));
  }
  if (point.backend == Backend::kThreads && point.queue_depth > space.max_threads) {
    return fmt::format("would take more than {} threads", space.max_threads);
  }
  if (point.backend == Backend::kThreads && point.queues > 1) return "more threads are what queues would be";
  if (point.queues > point.queue_depth) return "has more queues than depth";
  if (best_rate > 0 && static_cast<double>(in_flight * space.paths) > best_rate * space.max_drain_seconds) {
    return fmt::format("would have more in flight than the drives move in {}",
                       format_seconds(space.max_drain_seconds));
  }
  return {};
}

TuneOutcome tune(const TuneOptions& options, const TuneMeter& meter) {
  const TuneSpace& s = options.space;
  ZG_ASSERT(!s.backends.empty() && !s.block_sizes.empty() && !s.depths.empty(), "an empty search space");
  return Search(options, meter).run();
}

}  // namespace zg::io
