// Flows that share resources: how fast each one goes while several are under way. A resource is anything with
// a rate: a link in bytes per second, memory, a drive's time. Pure functions; units are the caller's.
#pragma once
#include <span>
#include <vector>

namespace zg {

// What a flow takes of a resource from its begin to its end, in the resource's unit (bytes, or seconds of a
// drive).
struct FlowDemand {
  int resource = 0;
  double amount = 0;
};

struct Flow {
  double own_seconds = 0;  // the least time that it takes, whatever the resources give; 0: no such limit
  std::vector<FlowDemand> demands = {};
};

// The time that a flow takes alone, in seconds. `capacities`: units per second, by resource; above 0.
double seconds_alone(const Flow& flow, std::span<const double> capacities);

// The share of its speed alone that each flow has while all are under way, from above 0 to 1: max-min fair.
// All shares rise together until a resource is used up; the flows that use it keep what they have, and the
// others go on rising. No resource is overdrawn, and each flow goes at full speed or uses a resource that is
// used up.
std::vector<double> fair_shares(std::span<const Flow* const> flows, std::span<const double> capacities);

}  // namespace zg
