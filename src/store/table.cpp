#include "ziggurat/store/table.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg {
namespace {
constexpr std::int64_t kMostSegments = std::int64_t{1} << 30;
constexpr int kMostVersions = 64;
constexpr std::int64_t kPage = 4096;
}  // namespace

const char* name_of(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kNvme:
      return "nvme";
  }
  return "?";
}

const char* name_of(Role role) {
  switch (role) {
    case Role::kWeight:
      return "weight";
    case Role::kGradient:
      return "gradient";
    case Role::kOptimizerState:
      return "optimizer state";
    case Role::kActivation:
      return "activation";
    case Role::kOther:
      return "other";
  }
  return "?";
}

TensorTable::TensorTable(int drives, std::int64_t device_granule)
    : drives_(drives), device_granule_(device_granule) {
  ZG_ASSERT(device_granule > 0 && device_granule % kPage == 0, "a granule of {} bytes", device_granule);
}

TensorId TensorTable::add(const TensorSpec& spec) {
  const auto refuse = [&](const std::string& what, const char* hint) {
    throw Error(Errc::kUsage, fmt::format("tensor \"{}\"", spec.name), what, hint);
  };
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  if (spec.name.empty()) refuse("has no name", "give each tensor a name of its own");
  if (find(spec.name) >= 0) refuse("exists already", "give each tensor a name of its own");
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  if (spec.count <= 0 || spec.count > kMost / element)
    refuse(fmt::format("has {} elements", spec.count), "expected 1 or more");
  if (spec.segment_elements < 0)
    refuse(fmt::format("has segments of {} elements", spec.segment_elements),
           "expected 0 (one segment) or more");
  if (spec.versions < 1 || spec.versions > kMostVersions)
    refuse(fmt::format("has {} versions", spec.versions), "expected 1 to 64");
  if ((spec.count - 1) / std::max<std::int64_t>(1, spec.segment_elements) >=
          kMostSegments - segment_count() &&
      spec.segment_elements > 0)
    refuse("has too many segments", "make the segments larger");
  Tensor tensor{spec, segment_count(), 0};
  if (tensor.spec.lowest == Tier::kNvme && drives_ == 0) tensor.spec.lowest = Tier::kHost;
  const std::int64_t step = spec.segment_elements > 0 ? spec.segment_elements : spec.count;
  for (std::int64_t first = 0; first < spec.count; first += step) {
    Segment s;
    s.tensor = tensor_count();
    s.first_element = first;
    s.elements = std::min(step, spec.count - first);
    s.bytes = s.elements * element;
    s.charge = arena_charge(s.bytes);
    s.device_charge = arena_charge(s.bytes, device_granule_);
    s.lowest = tensor.spec.lowest;
    if (s.lowest == Tier::kNvme) nvme_bytes_ += s.charge * spec.versions;
    total_charge_ += s.charge;
    total_device_charge_ += s.device_charge;
    segments_.push_back(s);
    ++tensor.segments;
  }
  tensors_.push_back(tensor);
  by_name_.emplace(spec.name, tensor_count() - 1);
  return tensor_count() - 1;
}

void TensorTable::remove(TensorId id) {
  Tensor& t = tensors_[static_cast<std::size_t>(id)];
  if (t.removed) return;
  for (SegmentId s = t.first_segment; s < t.first_segment + t.segments; ++s) {
    total_charge_ -= segment(s).charge;
    total_device_charge_ -= segment(s).device_charge;
    if (segment(s).lowest == Tier::kNvme) nvme_bytes_ -= segment(s).charge * t.spec.versions;
  }
  by_name_.erase(t.spec.name);
  t.spec.name += fmt::format(" (removed, {})", id);
  t.removed = true;
}

TensorId TensorTable::find(const std::string& name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? -1 : it->second;
}

std::int64_t TensorTable::drive_bytes() const {
  return drives_ == 0 ? 0 : round_up((nvme_bytes_ + drives_ - 1) / drives_, io::Engine::alignment());
}

std::string TensorTable::segment_name(SegmentId id) const {
  const Tensor& t = tensor(segment(id).tensor);
  if (t.segments == 1) return t.spec.name;
  return fmt::format("{}[{}]", t.spec.name, id - t.first_segment);
}

}  // namespace zg
