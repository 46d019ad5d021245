#include "store/core.hpp"

#include "store/mover.hpp"

namespace zg {

StoreCore::StoreCore(const TensorStore::Options& o, StoreParts& parts, MoveDriver& driver, MoveEvents& events)
    : table(o.table != nullptr
                ? *o.table
                : TensorTable(o.io != nullptr ? o.io->drive_count() : 0, o.device->arena().granule())),
      options(o),
      residency(table, o.budgets, o.policy),
      leases(parts, segments, residency, moves),
      moves(table, Mover::rules(o), driver, events) {
  ZG_ASSERT_LE(o.budgets.device, o.device->arena().budget());
  ZG_ASSERT_LE(o.budgets.host, o.host->budget());
  ZG_ASSERT(!o.budgets.direct || o.device->is_host() || (o.io != nullptr && o.io->direct() != nullptr),
            "the drives do not reach the device");
  // If an arena charged more than Residency counts, it would refuse memory that was decided, and the
  // allocation would wait for ever.
  ZG_ASSERT_EQ(table.device_granule() % o.device->arena().granule(), 0);
  ZG_ASSERT_EQ(io::Engine::alignment() % o.host->granule(), 0);
}

void StoreCore::grow() {
  segments.grow(table.segment_count());
  leases.grow(table);
  residency.grow();
  moves.grow(table.segment_count());
}

void StoreCore::fail(const Error& error) {
  if (failure) return;
  failure.emplace(error);
  leases.admit(false);
  moves.stop();
  changed.notify_all();
}

void StoreCore::throw_failure() const {
  if (failure) throw Error(*failure);
}

void StoreCore::refuse(SegmentId segment) const {
  if (segment < 0 || segment >= leases.segments())
    throw Error(Errc::kUsage, "acquire",
                fmt::format("there is no segment {}, but {} of them", segment, table.segment_count()),
                "take the numbers from the table of the store");
  throw Error(Errc::kUsage, "acquire", "nobody can see bytes on NVMe", "acquire at the device or the host");
}

}  // namespace zg
