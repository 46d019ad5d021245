#include "ziggurat/store/table.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg {

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

TensorId TensorTable::add(const TensorSpec& spec) {
  ZG_ASSERT(spec.count > 0, "{}", spec.name);
  Tensor tensor{spec, segment_count(), 0};
  if (tensor.spec.lowest == Tier::kNvme && drives_ == 0) tensor.spec.lowest = Tier::kHost;
  const std::int64_t step = spec.segment_elements > 0 ? spec.segment_elements : spec.count;
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  for (std::int64_t first = 0; first < spec.count; first += step) {
    Segment s;
    s.tensor = tensor_count();
    s.first_element = first;
    s.elements = std::min(step, spec.count - first);
    s.bytes = s.elements * element;
    s.charge = arena_charge(s.bytes);
    s.lowest = tensor.spec.lowest;
    if (s.lowest == Tier::kNvme) nvme_bytes_ += s.charge;
    total_charge_ += s.charge;
    segments_.push_back(s);
    ++tensor.segments;
  }
  tensors_.push_back(tensor);
  return tensor_count() - 1;
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
