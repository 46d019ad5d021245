// Which of the repeated candidates is ahead, and how sure that is. Pure functions over the rounds' samples.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/io/tune.hpp"

namespace zg::io {

// Candidates within this share of the fastest count as equally fast; the cheapest of them is chosen.
inline constexpr double kTuneTie = 0.01;
// Rounds after which an order may be called stable.
inline constexpr int kTuneMinRounds = 6, kTuneMaxRounds = 50;

double median_of(std::vector<double> values);
double mad_of(const std::vector<double>& values);  // median of the distances from the median
TuneSample typical_of(const std::vector<TuneSample>& samples);

// Smaller depth, then fewer queues, then less processor time, then smaller blocks.
bool is_cheaper(TuneGoal goal, const TuneCandidate& a, const TuneCandidate& b);

// Fills in medians, sorts, fights the duels and chooses. All candidates have the same number of samples.
void put_in_order(TuneGoal goal, TuneOutcome& outcome);
// No further round is needed. Stricter than what a duel takes to be decided, since it is asked after every
// round and would otherwise stop at the first lucky one.
bool is_stable(const TuneOutcome& outcome);
std::string verdict_of(const TuneOutcome& outcome);

}  // namespace zg::io
