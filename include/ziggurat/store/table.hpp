// The tensors of a store, how they are cut into segments, and how far each may be demoted.
//
// The table is made before the store, so that budgets, file sizes and traffic can be planned without it.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "ziggurat/base/dtype.hpp"

namespace zg {

enum class Tier : std::uint8_t { kDevice, kHost, kNvme };
inline constexpr int kTiers = 3;
const char* name_of(Tier tier);
// The index of a memory tier in the arrays that have one element for the device and one for the host.
inline std::size_t index_of(Tier tier) {
  return static_cast<std::size_t>(tier);
}

enum class Role : std::uint8_t { kWeight, kGradient, kOptimizerState, kActivation, kOther };
inline constexpr std::size_t kRoles = 5;
const char* name_of(Role role);

enum class Access : std::uint8_t {
  kRead,
  kWrite,      // read and modify
  kOverwrite,  // every byte is written before it is read, so nothing is fetched
};

using TensorId = std::int32_t;
using SegmentId = std::int32_t;

struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::int64_t count = 0;  // elements
  Role role = Role::kOther;
  Tier lowest = Tier::kNvme;          // the lowest tier that it may be demoted to
  std::int64_t segment_elements = 0;  // 0: one segment
  int priority = 0;                   // copies of a lower priority are evicted first
  // Kept on NVMe, 1 to 64; with 2 or more, a write-back leaves the version before it whole, as long as another slot
  // is not pinned.
  int versions = 1;
};

struct Tensor {
  TensorSpec spec;
  SegmentId first_segment = 0;
  std::int32_t segments = 0;
  bool removed = false;
};

struct Segment {
  TensorId tensor = 0;
  std::int64_t first_element = 0, elements = 0;
  std::int64_t bytes = 0;          // of content
  std::int64_t charge = 0;         // to the host budget and to NVMe: bytes rounded up to 4096
  std::int64_t device_charge = 0;  // to the device budget: bytes rounded up to the device's granule
  Tier lowest = Tier::kNvme;       // kNvme: it has an extent on the drives

  std::int64_t charge_at(Tier tier) const { return tier == Tier::kDevice ? device_charge : charge; }
};

class TensorTable {
 public:
  // drives: number of files that NVMe segments are striped over. 0: there is no NVMe tier, kNvme means kHost.
  // device_granule: Arena::granule() of the device, a multiple of 4096.
  explicit TensorTable(int drives, std::int64_t device_granule = 4096);

  // Throws Error(kUsage) for a name that is taken, or sizes that make no sense.
  TensorId add(const TensorSpec& spec);
  // The tensor's name is free again; its id is never used again.
  void remove(TensorId id);
  // -1: no tensor has this name.
  TensorId find(const std::string& name) const;
  const Tensor& tensor(TensorId id) const { return tensors_[static_cast<std::size_t>(id)]; }
  const Segment& segment(SegmentId id) const { return segments_[static_cast<std::size_t>(id)]; }
  std::int32_t tensor_count() const { return static_cast<std::int32_t>(tensors_.size()); }
  std::int32_t segment_count() const { return static_cast<std::int32_t>(segments_.size()); }
  int drives() const { return drives_; }
  std::int64_t device_granule() const { return device_granule_; }
  // NVMe space for all segments that may be demoted to it, in all of their versions, in whole pages.
  std::int64_t nvme_bytes() const { return nvme_bytes_; }
  // The part of each drive, if all get equal parts.
  std::int64_t drive_bytes() const;
  // The sum over all segments: with this budget, the memory tier holds everything.
  std::int64_t total_charge(Tier tier) const {
    return tier == Tier::kDevice ? total_device_charge_ : total_charge_;
  }
  // "block.3.master[2]"
  std::string segment_name(SegmentId id) const;

 private:
  int drives_;
  std::int64_t device_granule_;
  std::int64_t nvme_bytes_ = 0, total_charge_ = 0, total_device_charge_ = 0;
  std::vector<Tensor> tensors_;
  std::vector<Segment> segments_;
  std::unordered_map<std::string, TensorId> by_name_;
};

}  // namespace zg
