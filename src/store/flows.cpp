#include "ziggurat/store/flows.hpp"

#include <algorithm>
#include <limits>

#include "ziggurat/base/error.hpp"

namespace zg {

double seconds_alone(const Flow& flow, std::span<const double> capacities) {
  double seconds = flow.own_seconds;
  for (const FlowDemand& d : flow.demands)
    seconds = std::max(seconds, d.amount / capacities[static_cast<std::size_t>(d.resource)]);
  return seconds;
}

std::vector<double> fair_shares(std::span<const Flow* const> flows, std::span<const double> capacities) {
  std::vector<double> shares(flows.size(), 0);
  std::vector<double> alone;
  for (const Flow* flow : flows) alone.push_back(seconds_alone(*flow, capacities));
  std::vector<bool> rises(flows.size(), true);
  std::vector<double> left(capacities.begin(), capacities.end()), wanted(capacities.size());
  for (std::size_t open = flows.size(); open > 0;) {
    // What the rising flows together take of each resource at their full speeds.
    std::fill(wanted.begin(), wanted.end(), 0.0);
    for (std::size_t f = 0; f < flows.size(); ++f) {
      if (!rises[f] || alone[f] == 0) continue;
      for (const FlowDemand& d : flows[f]->demands)
        wanted[static_cast<std::size_t>(d.resource)] += d.amount / alone[f];
    }
    double share = 1;
    int fullest = -1;
    for (std::size_t r = 0; r < wanted.size(); ++r) {
      if (wanted[r] > left[r] && left[r] / wanted[r] < share)
        share = left[r] / wanted[r], fullest = static_cast<int>(r);
    }
    for (std::size_t f = 0; f < flows.size(); ++f) {
      if (!rises[f]) continue;
      const auto uses = [&](const FlowDemand& d) { return d.resource == fullest && d.amount > 0; };
      const std::vector<FlowDemand>& demands = flows[f]->demands;
      if (fullest >= 0 && std::none_of(demands.begin(), demands.end(), uses)) continue;
      rises[f] = false, --open;
      shares[f] = share;
      for (const FlowDemand& d : demands) {
        double& rest = left[static_cast<std::size_t>(d.resource)];
        if (alone[f] > 0) rest = std::max(0.0, rest - share * d.amount / alone[f]);
      }
    }
  }
  return shares;
}

}  // namespace zg
