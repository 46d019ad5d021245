// Orders the repeated candidates and says how sure the order is. Pure functions over the samples of the
// rounds.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/io/tune.hpp"

namespace zg::io {

// Candidates within this share of the fastest count as equally fast, and the cheapest of them is chosen.
inline constexpr double kTuneTie = 0.01;
// An order can be stable after kTuneMinRounds; after kTuneMaxRounds the search ends.
inline constexpr int kTuneMinRounds = 6, kTuneMaxRounds = 50;

double median_of(std::vector<double> values);
double mad_of(const std::vector<double>& values);  // median absolute deviation
TuneSample typical_of(const std::vector<TuneSample>& samples);

// Whether `a` is cheaper than `b`: has a smaller depth, else fewer queues, less processor time, smaller
// blocks.
bool is_cheaper(TuneGoal goal, const TuneCandidate& a, const TuneCandidate& b);

// Computes the candidates' medians, sorts and compares them, and chooses one. All have the same number of
// samples.
void put_in_order(TuneGoal goal, TuneOutcome& outcome);
// Whether the order needs no further round. It takes a smaller p than a single comparison does, since it is
// asked after every round, and would otherwise stop at the first one that is decided by chance.
bool is_stable(const TuneOutcome& outcome);
std::string verdict_of(const TuneOutcome& outcome);

}  // namespace zg::io
