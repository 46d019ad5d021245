// ziggurat.h: tensors.
#include "store/c_api.hpp"

namespace zg::c_api {
namespace {

constexpr std::size_t kSpecBytes = 48;
static_assert(sizeof(zg_tensor_spec) == kSpecBytes,
              "a struct of ours changed without a new field at its end");

DType dtype_of(std::int32_t dtype) {
  switch (dtype) {
    case ZG_F64:
      return DType::kF64;
    case ZG_F32:
      return DType::kF32;
    case ZG_F16:
      return DType::kF16;
    case ZG_BF16:
      return DType::kBF16;
    case ZG_I64:
      return DType::kI64;
    case ZG_I32:
      return DType::kI32;
    case ZG_U16:
      return DType::kU16;
    case ZG_U8:
      return DType::kU8;
    default:
      refuse("dtype", fmt::format("is {}", dtype), "one of zg_dtype");
  }
}

Role role_of(std::int32_t role) {
  switch (role) {
    case ZG_OTHER:
      return Role::kOther;
    case ZG_WEIGHT:
      return Role::kWeight;
    case ZG_GRADIENT:
      return Role::kGradient;
    case ZG_OPTIMIZER_STATE:
      return Role::kOptimizerState;
    case ZG_ACTIVATION:
      return Role::kActivation;
    default:
      refuse("role", fmt::format("is {}", role), "one of zg_role");
  }
}

TensorSpec spec_of(const zg_tensor_spec& s) {
  TensorSpec spec;
  spec.name = &required(s.name, "name");
  spec.dtype = dtype_of(s.dtype);
  spec.role = role_of(s.role);
  spec.count = s.count;
  if (s.lowest != 0) spec.lowest = tier_of(s.lowest);
  // The store keeps at most 255 different priorities.
  if (s.priority < -100 || s.priority > 100)
    refuse("priority", fmt::format("is {}", s.priority), "-100 to 100");
  spec.priority = s.priority;
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  if (s.segment_bytes < 0 || s.segment_bytes % element != 0)
    refuse("segment_bytes", fmt::format("is {}", s.segment_bytes),
           fmt::format("a multiple of the element's {} bytes, or 0 for one segment", element));
  spec.segment_elements = s.segment_bytes / element;
  return spec;
}

}  // namespace

Tier tier_of(int tier) {
  switch (tier) {
    case ZG_DEVICE_MEMORY:
      return Tier::kDevice;
    case ZG_HOST:
      return Tier::kHost;
    case ZG_NVME:
      return Tier::kNvme;
    default:
      refuse("tier", fmt::format("is {}", tier), "one of zg_tier");
  }
}

const Tensor& tensor_of(const TensorStore& store, std::int32_t tensor) {
  const TensorTable& table = store.table();
  if (tensor < 0 || tensor >= table.tensor_count())
    refuse("tensor", fmt::format("is {}, of {}", tensor, table.tensor_count()),
           "a number that zg_tensor_add() gave");
  const Tensor& found = table.tensor(tensor);
  if (found.removed) refuse(fmt::format("tensor \"{}\"", found.spec.name), "was removed");
  return found;
}

SegmentId segment_of(const TensorStore& store, std::int32_t tensor, std::int32_t segment) {
  const Tensor& found = tensor_of(store, tensor);
  if (segment < 0 || segment >= found.segments)
    refuse(fmt::format("tensor \"{}\"", found.spec.name),
           fmt::format("has no segment {}, but {} of them", segment, found.segments), "count from 0");
  return found.first_segment + segment;
}

}  // namespace zg::c_api

using namespace zg::c_api;

int zg_tensor_add(zg_store* store, const zg_tensor_spec* spec, int32_t* tensor) {
  return guarded([&] {
    cleared(tensor, "tensor");
    const Alone alone(store, "zg_tensor_add");
    *tensor = alone.store().add(spec_of(read_struct(spec, "spec", kSpecBytes)));
  });
}

int zg_tensor_remove(zg_store* store, int32_t tensor) {
  return guarded([&] {
    const Alone alone(store, "zg_tensor_remove");
    const std::string& name = tensor_of(alone.store(), tensor).spec.name;
    for (const zg::SegmentReport& r : alone.store().report(tensor)) {
      const bool held = r.readers[0] + r.readers[1] + r.writers[0] + r.writers[1] > 0;
      if (held || r.pinned[0] || r.pinned[1])
        refuse(fmt::format("tensor \"{}\"", name),
               fmt::format("{} is {}", r.name, held ? "leased" : "pinned"),
               "release it first (zg_release, zg_unpin)");
    }
    alone.store().remove(tensor);
  });
}

int zg_tensor_find(zg_store* store, const char* name, int32_t* tensor) {
  return guarded([&] {
    cleared(tensor, "tensor") = -1;
    const Inside inside(store);
    *tensor = inside.store().table().find(&required(name, "name"));
  });
}

int zg_segment_count(zg_store* store, int32_t tensor, int32_t* count) {
  return guarded([&] {
    cleared(count, "count");
    const Inside inside(store);
    *count = tensor_of(inside.store(), tensor).segments;
  });
}

int zg_segment_bytes(zg_store* store, int32_t tensor, int32_t segment, int64_t* bytes) {
  return guarded([&] {
    cleared(bytes, "bytes");
    const Inside inside(store);
    *bytes = inside.store().table().segment(segment_of(inside.store(), tensor, segment)).bytes;
  });
}

int zg_has_content(zg_store* store, int32_t tensor, int32_t segment, int32_t* yes) {
  return guarded([&] {
    cleared(yes, "yes");
    const Inside inside(store);
    *yes = inside.store().has_content(segment_of(inside.store(), tensor, segment)) ? 1 : 0;
  });
}

int zg_discard(zg_store* store, int32_t tensor, int32_t segment) {
  return guarded([&] {
    const Inside inside(store);
    inside.store().discard(segment_of(inside.store(), tensor, segment));
  });
}
