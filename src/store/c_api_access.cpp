// ziggurat.h: leases, pins and steps.
#include <algorithm>

#include "store/c_api.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::c_api {
namespace {

constexpr int kMostPins = 200;  // of one segment at one tier

// A tier at which bytes can be accessed.
Tier memory_tier_of(int tier) {
  if (tier == ZG_NVME) refuse("tier", "is NVMe, where nobody can see bytes", "ZG_HOST or ZG_DEVICE_MEMORY");
  return tier_of(tier);
}

AccessStep step_of(const TensorStore& store, const zg_access& a) {
  AccessStep step;
  step.segment = segment_of(store, a.tensor, a.segment);
  step.tier = memory_tier_of(a.tier);
  switch (a.mode) {
    case ZG_READ:
      step.access = Access::kRead;
      break;
    case ZG_WRITE:
      step.access = Access::kWrite;
      break;
    case ZG_OVERWRITE:
      step.access = Access::kOverwrite;
      break;
    default:
      refuse("mode", fmt::format("is {}", a.mode), "one of zg_mode");
  }
  return step;
}

void hand_out(zg_store& store, Lease lease, zg_lease& out) {
  void* const data = lease.data();
  const std::int64_t bytes = lease.bytes();
  out = {store.leases.put(std::move(lease)), data, bytes};
}

void acquire_all(zg_store& store, const std::vector<AccessStep>& steps, zg_lease* out) {
  std::vector<Lease> leases;
  store.opened->store().acquire(steps, leases);
  try {
    for (std::size_t i = 0; i < leases.size(); ++i) hand_out(store, std::move(leases[i]), out[i]);
  } catch (...) {
    for (std::size_t i = 0; i < leases.size(); ++i) {
      (void)store.leases.take(out[i].id);
      out[i] = {};
    }
    throw;
  }
}

void check_named_once(const TensorStore& store, const std::vector<AccessStep>& steps) {
  std::vector<SegmentId> ids;
  for (const AccessStep& s : steps) ids.push_back(s.segment);
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice != ids.end())
    refuse("accesses", fmt::format("{} is named twice", store.table().segment_name(*twice)),
           "name each segment once");
}

// Refuses leases that exceed a budget together, even where nothing else is in memory.
void check_room(zg_store& store, const std::vector<AccessStep>& steps) {
  const TensorTable& table = store.opened->store().table();
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const std::int64_t budget =
        (tier == Tier::kDevice ? store.opened->device().arena() : store.opened->host()).budget();
    std::int64_t needed = 0;
    for (const AccessStep& s : steps) needed += s.tier == tier ? table.segment(s.segment).charge_at(tier) : 0;
    if (needed > budget)
      throw Error(Errc::kMemory, "accesses",
                  fmt::format("need {} at the {}, whose budget is {}", format_bytes(needed), name_of(tier),
                              format_bytes(budget)),
                  "acquire fewer at once, or raise this tier's budget");
  }
}

}  // namespace
}  // namespace zg::c_api

using namespace zg::c_api;

int zg_acquire(zg_store* store, zg_access access, zg_lease* lease) {
  return guarded([&] {
    cleared(lease, "lease");
    const Inside inside(store);
    const zg::AccessStep step = step_of(inside.store(), access);
    hand_out(inside.handle(), inside.store().acquire(step.segment, step.tier, step.access), *lease);
  });
}

int zg_acquire_all(zg_store* store, const zg_access* accesses, size_t count, zg_lease* leases) {
  return guarded([&] {
    if (count == 0) return;
    std::fill_n(&required(leases, "leases"), count, zg_lease{});
    required(accesses, "accesses");
    const Inside inside(store);
    std::vector<zg::AccessStep> steps;
    for (std::size_t i = 0; i < count; ++i) steps.push_back(step_of(inside.store(), accesses[i]));
    check_named_once(inside.store(), steps);
    check_room(inside.handle(), steps);
    acquire_all(inside.handle(), steps, leases);
  });
}

int zg_release(zg_store* store, zg_lease* lease) {
  return guarded([&] {
    const Inside inside(store);
    if (required(lease, "lease").id == 0) return;
    if (!inside.handle().leases.take(lease->id))
      refuse("lease", "is none of this store's", "release each lease once, to the store that gave it");
    *lease = {};
  });
}

int zg_prefetch(zg_store* store, int32_t tensor, int32_t segment, int32_t tier) {
  return guarded([&] {
    const Inside inside(store);
    inside.store().prefetch(segment_of(inside.store(), tensor, segment), memory_tier_of(tier));
  });
}

int zg_pin_segment(zg_store* store, int32_t tensor, int32_t segment, int32_t tier, zg_pin* pin) {
  return guarded([&] {
    cleared(pin, "pin");
    const Inside inside(store);
    const std::pair place(segment_of(inside.store(), tensor, segment), memory_tier_of(tier));
    zg_store& handle = inside.handle();
    std::lock_guard lock(handle.pins_mutex);
    int& count = handle.pin_counts[place];
    if (count == kMostPins)
      refuse(inside.store().table().segment_name(place.first), fmt::format("has {} pins at this tier", count),
             "pin it once, and count yourself");
    pin->id = handle.pins.put({inside.store().pin(place.first, place.second), place});
    ++count;
  });
}

int zg_unpin(zg_store* store, zg_pin* pin) {
  return guarded([&] {
    const Inside inside(store);
    if (required(pin, "pin").id == 0) return;
    zg_store& handle = inside.handle();
    std::lock_guard lock(handle.pins_mutex);
    const auto held = handle.pins.take(pin->id);
    if (!held) refuse("pin", "is none of this store's", "end each pin once, at the store that gave it");
    *pin = {};
    const auto count = handle.pin_counts.find(held->place);
    if (--count->second == 0) handle.pin_counts.erase(count);
  });
}

int zg_step_begin(zg_store* store, const char* name) {
  return guarded([&] {
    const Inside inside(store);
    std::lock_guard lock(inside.handle().step_mutex);
    if (inside.handle().in_step)
      refuse("zg_step_begin", "the step before has not ended", "call zg_step_end() first");
    inside.store().step_begin(name != nullptr ? name : "step");
    inside.handle().in_step = true;
  });
}

int zg_step_end(zg_store* store) {
  return guarded([&] {
    const Inside inside(store);
    std::lock_guard lock(inside.handle().step_mutex);
    if (!inside.handle().in_step) refuse("zg_step_end", "no step has begun", "call zg_step_begin() first");
    inside.store().step_end();
    inside.handle().in_step = false;
  });
}

int zg_sink(zg_store* store) {
  return guarded([&] {
    const Alone alone(store, "zg_sink");
    alone.no_leases_or_pins("zg_sink");
    alone.store().demote_all();
  });
}

int zg_drain(zg_store* store) {
  return guarded([&] { Inside(store).store().drain(); });
}
