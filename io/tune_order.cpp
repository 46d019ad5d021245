#include "io/tune_order.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

constexpr double kDecided = 0.05;  // p of the sign test below which a comparison is decided
constexpr double kStable = 0.01;   // p below which it needs no further rounds

// P(at most `k` of `n` fair coins show heads).
double binomial_tail(int k, int n) {
  double sum = 0;
  for (int i = 0; i <= k; ++i) {
    sum +=
        std::exp(std::lgamma(n + 1.0) - std::lgamma(i + 1.0) - std::lgamma(n - i + 1.0) - n * std::log(2.0));
  }
  return std::min(1.0, sum);
}

TuneSide typical_side(const std::vector<TuneSample>& samples, TuneSide TuneSample::*side) {
  const auto median = [&](double TuneSide::*field) {
    std::vector<double> values;
    for (const TuneSample& s : samples) values.push_back(s.*side.*field);
    return median_of(std::move(values));
  };
  return {median(&TuneSide::bytes_per_second), median(&TuneSide::cpu_seconds_per_gb), median(&TuneSide::p50),
          median(&TuneSide::p99)};
}

std::vector<double> scores_of(TuneGoal goal, const TuneCandidate& candidate) {
  std::vector<double> scores;
  for (const TuneSample& sample : candidate.samples) scores.push_back(score_of(goal, sample));
  return scores;
}

// The 95% interval of the median: the values between which it lies, by inverting the sign test. Takes six
// values.
void put_interval(TuneComparison& comparison, std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  const int n = static_cast<int>(ratios.size());
  comparison.ratio = median_of(ratios);
  int cut = 0;  // values outside of the interval, at each end
  while (2 * binomial_tail(cut, n) <= 0.05) ++cut;
  if (cut == 0) return;
  comparison.low = ratios[static_cast<std::size_t>(cut - 1)];
  comparison.high = ratios[static_cast<std::size_t>(n - cut)];
}

TuneComparison compare(TuneGoal goal, const TuneCandidate& leader, const TuneCandidate& other, int rounds) {
  TuneComparison comparison;
  comparison.rounds = rounds;
  if (rounds == 0) return comparison;
  const std::vector<double> a = scores_of(goal, leader), b = scores_of(goal, other);
  ZG_ASSERT_EQ(a.size(), b.size());
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) {
    comparison.wins += a[i] > b[i];
    comparison.losses += a[i] < b[i];
    ratios.push_back(b[i] > 0 ? a[i] / b[i] : 1);
  }
  comparison.p = sign_test(comparison.wins, comparison.losses);
  put_interval(comparison, std::move(ratios));
  if (comparison.low >= 1 - kTuneTie && comparison.high > 0 && comparison.high <= 1 + kTuneTie) {
    comparison.order = TuneOrder::kEqual;
  } else if (comparison.p < kDecided && comparison.wins > comparison.losses) {
    comparison.order = TuneOrder::kAhead;
  }
  return comparison;
}

}  // namespace

double sign_test(int wins, int losses) {
  return std::min(1.0, 2 * binomial_tail(std::min(wins, losses), wins + losses));
}

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

double mad_of(const std::vector<double>& values) {
  const double median = median_of(values);
  std::vector<double> distances;
  for (const double v : values) distances.push_back(std::abs(v - median));
  return median_of(std::move(distances));
}

TuneSample typical_of(const std::vector<TuneSample>& samples) {
  return {typical_side(samples, &TuneSample::read), typical_side(samples, &TuneSample::write)};
}

bool is_cheaper(TuneGoal goal, const TuneCandidate& a, const TuneCandidate& b) {
  const auto price = [&](const TuneCandidate& c) {
    return std::tuple(c.point.queue_depth, c.point.queues, cpu_of(goal, c.typical), c.point.block_size,
                      c.point.backend);
  };
  return price(a) < price(b);
}

void put_in_order(TuneGoal goal, TuneOutcome& outcome) {
  auto& candidates = outcome.candidates;
  for (TuneCandidate& c : candidates) {
    const std::vector<double> scores = scores_of(goal, c);
    c.typical = typical_of(c.samples);
    c.median = median_of(scores);
    c.mad = mad_of(scores);
  }
  std::stable_sort(candidates.begin(), candidates.end(), [&](const TuneCandidate& a, const TuneCandidate& b) {
    return a.median != b.median ? a.median > b.median : is_cheaper(goal, a, b);
  });
  outcome.comparisons.clear();
  outcome.found = !candidates.empty();
  outcome.chosen = 0;
  outcome.sure = outcome.found && outcome.rounds > 0;
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    outcome.comparisons.push_back(compare(goal, candidates[0], candidates[i], outcome.rounds));
    outcome.sure = outcome.sure && outcome.comparisons.back().order != TuneOrder::kUnclear;
    const bool tied = candidates[i].median >= (1 - kTuneTie) * candidates[0].median;
    if (tied && is_cheaper(goal, candidates[i], candidates[static_cast<std::size_t>(outcome.chosen)])) {
      outcome.chosen = static_cast<int>(i);
    }
  }
}

bool is_stable(const TuneOutcome& outcome) {
  if (outcome.rounds < kTuneMinRounds) return false;
  return std::all_of(outcome.comparisons.begin(), outcome.comparisons.end(), [](const TuneComparison& c) {
    return c.order == TuneOrder::kEqual || (c.order == TuneOrder::kAhead && c.p < kStable);
  });
}

std::string verdict_of(const TuneOutcome& outcome) {
  if (!outcome.found) return "nothing could be measured";
  const TuneCandidate& first = outcome.candidates.front();
  const TuneCandidate& chosen = outcome.candidates[static_cast<std::size_t>(outcome.chosen)];
  std::string text;
  if (outcome.rounds == 0) {
    text = fmt::format("not sure: there was no time to repeat {}, which was measured once",
                       text_of(first.point));
  } else if (outcome.candidates.size() == 1) {
    text = fmt::format("{} is the only point that could be measured", text_of(first.point));
  } else {
    int ahead = 0, equal = 0;
    for (const TuneComparison& comparison : outcome.comparisons) {
      ahead += comparison.order == TuneOrder::kAhead;
      equal += comparison.order == TuneOrder::kEqual;
    }
    const int unclear = static_cast<int>(outcome.comparisons.size()) - ahead - equal;
    const auto others = [&](int count) {
      const int all = static_cast<int>(outcome.comparisons.size());
      return count < all ? fmt::format("{} of the {} others", count, all)
             : all == 1  ? std::string("the other candidate")
             : all == 2  ? std::string("both others")
                         : fmt::format("all {} others", all);
    };
    std::vector<std::string> parts;
    if (ahead > 0) parts.push_back("is ahead of " + others(ahead));
    if (equal > 0) parts.push_back(fmt::format("is within {:.0f}% of {}", kTuneTie * 100, others(equal)));
    if (unclear > 0)
      parts.push_back(fmt::format("cannot be told from {} by {} round(s)", others(unclear), outcome.rounds));
    text = fmt::format("{}: {} {}", unclear == 0 ? "sure" : "not sure", text_of(first.point),
                       fmt::join(parts, ", and "));
  }
  if (outcome.chosen != 0) {
    text += fmt::format(". Chosen is {}, the cheapest within {:.0f}% of it by median", text_of(chosen.point),
                        kTuneTie * 100);
  }
  if (!outcome.search_complete) text += ". The search itself was cut short: better points may lie beyond";
  return text + ".";
}

}  // namespace zg::io
