// The reports of a store: statistics, where segments are and why, the state of all parts. It reads the other
// parts and changes nothing. Called under the store's mutex.
#pragma once
#include <string>
#include <vector>

#include "store/node.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

struct StoreParts;

class StoreReport {
 public:
  explicit StoreReport(const StoreParts& parts) : p_(parts) {}
  StoreStatistics statistics() const;
  TensorStatistics statistics(TensorId tensor) const;
  std::vector<SegmentReport> segments(TensorId tensor) const;
  std::string explain(TensorId tensor) const;
  std::string state() const;
  void check() const;
  std::string describe(const ActionNode& node) const;
  std::string what_holds(Tier tier) const;  // the tier's memory by role, as text

 private:
  SegmentReport segment(SegmentId segment) const;
  void list_moves_and_leases(std::string& text) const;
  void check_waiters(SegmentId segment) const;
  void check_copy(SegmentId segment, Tier tier) const;

  const StoreParts& p_;
};

}  // namespace zg
