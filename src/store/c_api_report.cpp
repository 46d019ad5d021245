// ziggurat.h: statistics and texts.
#include "store/c_api.hpp"

namespace zg::c_api {
namespace {

constexpr std::size_t kStatisticsBytes = 400, kTensorStatisticsBytes = 88;  // of the first version
static_assert(sizeof(zg_statistics) == kStatisticsBytes + kWaitCauses * sizeof(double) &&
                  sizeof(zg_tensor_statistics) == kTensorStatisticsBytes,
              "a struct of ours changed without a new field at its end");

zg_tier_statistics tier_statistics(const StoreStatistics& s, Tier tier) {
  const TierStatistics& t = s.tiers[static_cast<std::size_t>(tier)];
  return {t.budget, t.used, t.peak, t.segments, t.bytes, t.hits, t.misses, t.evictions};
}

zg_link_statistics link_statistics(const LinkStatistics& l) {
  return {l.bytes, l.transfers, l.busy_seconds, l.moving, l.waiting};
}

}  // namespace
}  // namespace zg::c_api

using namespace zg::c_api;

int zg_get_statistics(zg_store* store, zg_statistics* statistics) {
  return guarded([&] {
    const Inside inside(store);
    const zg::StoreStatistics s = inside.store().statistics();
    zg_statistics out = {};
    out.device = tier_statistics(s, zg::Tier::kDevice);
    out.host = tier_statistics(s, zg::Tier::kHost);
    out.nvme = tier_statistics(s, zg::Tier::kNvme);
    out.to_device = link_statistics(s.links[zg::kToDevice]);
    out.to_host = link_statistics(s.links[zg::kToHost]);
    out.nvme_read = link_statistics(s.links[zg::kNvmeRead]);
    out.nvme_write = link_statistics(s.links[zg::kNvmeWrite]);
    out.waits = s.waits;
    out.waited_seconds = s.waited_seconds;
    out.prefetches = s.prefetches;
    out.prefetched_in_vain = s.prefetched_in_vain;
    out.left_record = s.left_record;
    const auto waited_for = [&](zg::WaitCause cause) {
      return s.waited_for[static_cast<std::size_t>(cause)];
    };
    out.waited_for_reads = waited_for(zg::WaitCause::kReads);
    out.waited_for_write_backs = waited_for(zg::WaitCause::kWriteBacks);
    out.waited_for_memory = waited_for(zg::WaitCause::kMemory);
    out.waited_for_copies = waited_for(zg::WaitCause::kCopies);
    out.waited_for_leases = waited_for(zg::WaitCause::kLeases);
    out.waited_for_other = waited_for(zg::WaitCause::kOther);
    write_struct(statistics, out, "statistics", kStatisticsBytes);
  });
}

int zg_get_tensor_statistics(zg_store* store, int32_t tensor, zg_tensor_statistics* statistics) {
  return guarded([&] {
    const Inside inside(store);
    tensor_of(inside.store(), tensor);
    const zg::TensorStatistics s = inside.store().statistics(tensor);
    zg_tensor_statistics out = {};
    out.hits = s.hits;
    out.misses = s.misses;
    out.waits = s.waits;
    out.waited_seconds = s.waited_seconds;
    out.to_device_bytes = s.bytes[zg::kToDevice];
    out.to_host_bytes = s.bytes[zg::kToHost];
    out.nvme_read_bytes = s.bytes[zg::kNvmeRead];
    out.nvme_write_bytes = s.bytes[zg::kNvmeWrite];
    out.evictions = s.evictions;
    out.prefetches = s.prefetches;
    write_struct(statistics, out, "statistics", kTensorStatisticsBytes);
  });
}

int zg_explain(zg_store* store, int32_t tensor, char* buffer, size_t capacity, size_t* length) {
  return guarded([&] {
    if (length != nullptr) *length = 0;
    const Inside inside(store);
    tensor_of(inside.store(), tensor);
    write_text(inside.store().explain(tensor), buffer, capacity, length);
  });
}

int zg_state(zg_store* store, char* buffer, size_t capacity, size_t* length) {
  return guarded([&] {
    if (length != nullptr) *length = 0;
    write_text(Inside(store).store().state(), buffer, capacity, length);
  });
}

int zg_trace_save(zg_store* store, const char* path) {
  return guarded([&] {
    const Inside inside(store);
    if (path == nullptr) refuse("zg_trace_save", "path is NULL", "give the name of a file");
    zg::AccessTrace trace = inside.store().access_trace();
    if (trace.programs.empty())
      refuse("zg_trace_save", "nothing was recorded", "open the store with ZG_RECORD, and let a step end");
    zg::save_trace(trace, path);
  });
}

int zg_trace_expect(zg_store* store, const char* path) {
  return guarded([&] {
    const Inside inside(store);
    if (path == nullptr) refuse("zg_trace_expect", "path is NULL", "give the name of a file");
    inside.store().expect(zg::load_trace(path));
  });
}
