#include "store/nvme_copies.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ziggurat/base/buffer.hpp"

namespace zg {

NvmeCopies::NvmeCopies(const TensorTable& table, const TensorStore::Options& options)
    : table_(table),
      own_(options.volume != nullptr
               ? nullptr
               : io::make_volume(*options.io, store_volume(options.drive_shares, options.verify))),
      volume_(options.volume != nullptr ? *options.volume : *own_),
      adopted_(options.adopted) {
  ZG_ASSERT_EQ(options.io->drive_count(), table_.drives());
}

NvmeCopies::~NvmeCopies() {
  if (own_ != nullptr) return;
  for (SegmentId id = 0; id < segments_; ++id) {
    if (const io::ExtentId e = copies_[id].extent) volume_.destroy(e);
  }
}

int NvmeCopies::slots(SegmentId segment) const {
  return table_.tensor(table_.segment(segment).tensor).spec.versions;
}

void NvmeCopies::create(SegmentId segment) {
  io::ExtentSpec spec{
      .name = table_.segment_name(segment), .bytes = table_.segment(segment).charge, .slots = slots(segment)};
  Copies& c = copies_[segment];
  if (adopted_ != nullptr) {
    if (const auto it = adopted_->find(spec.name); it != adopted_->end()) spec.adopted = it->second;
  }
  for (std::size_t slot = 0; slot < spec.adopted.size(); ++slot) {
    c.writes = std::max(c.writes, spec.adopted[slot].version);
    c.written |= std::uint64_t{1} << slot;
  }
  c.extent = volume_.create(spec);
}

void NvmeCopies::destroy(const Tensor& tensor) {
  for (SegmentId id = tensor.first_segment; id < tensor.first_segment + tensor.segments; ++id) {
    if (io::ExtentId& e = copies_[id].extent) volume_.destroy(std::exchange(e, io::ExtentId{}));
  }
}

io::ExtentTransfer NvmeCopies::to_read(SegmentId segment) const {
  io::ExtentTransfer transfer;
  transfer.extent = extent(segment);
  transfer.slot = std::max(0, volume_.newest_slot(transfer.extent));
  return transfer;
}

void NvmeCopies::written(SegmentId segment, int slot) {
  Copies& c = copies_[segment];
  const std::uint64_t bit = std::uint64_t{1} << slot;
  if ((c.written & bit) == 0) first_written_ += table_.segment(segment).charge;
  c.written |= bit;
}

io::ExtentTransfer NvmeCopies::to_write(SegmentId segment) {
  Copies& c = copies_[segment];
  io::ExtentTransfer transfer;
  transfer.extent = c.extent;
  transfer.slot = volume_.slot_to_write(c.extent);
  ZG_ASSERT(transfer.slot >= 0, "all {} versions of {} are pinned", slots(segment),
            table_.segment_name(segment));
  transfer.version = ++c.writes;
  return transfer;
}

bool NvmeCopies::has_expected(SegmentId segment) const {
  const int slot = volume_.newest_slot(extent(segment));
  return slot >= 0 && volume_.version(extent(segment), slot) == copies_[segment].expected;
}

int NvmeCopies::pin(SegmentId segment) {
  const int slot = volume_.newest_slot(extent(segment));
  ZG_ASSERT(slot >= 0, "{} has no copy on NVMe", table_.segment_name(segment));
  volume_.pin(extent(segment), slot);
  return slot;
}

io::StoredSlot NvmeCopies::stored(SegmentId segment, int slot) const {
  return {volume_.version(extent(segment), slot), volume_.stored_pieces(extent(segment), slot)};
}

std::vector<std::int64_t> NvmeCopies::versions(SegmentId segment) const {
  std::vector<std::int64_t> found;
  for (int slot = 0; extent(segment) && slot < slots(segment); ++slot) {
    const std::int64_t version = volume_.version(extent(segment), slot);
    if (version >= 0) found.push_back(version);
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

Error NvmeCopies::no_version(const TensorTable& table, SegmentId segment, std::int64_t version) {
  return Error(Errc::kUsage, table.segment_name(segment), fmt::format("has no version {} on NVMe", version),
               "ask versions() for those that it has");
}

void NvmeCopies::read(SegmentId segment, std::int64_t version, void* data) const {
  const io::ExtentId from = extent(segment);
  int slot = slots(segment) - 1;
  while (slot >= 0 && (!from || volume_.version(from, slot) != version)) --slot;
  if (slot < 0) throw no_version(table_, segment, version);
  const Buffer pages(table_.segment(segment).charge);
  const io::ExtentResult result = volume_.read_and_wait({.extent = from, .slot = slot, .data = pages.data()});
  if (!result.ok())
    throw Error(Errc::kIo, "nvme tier", volume_.explain(from, io::Op::kRead, result),
                "another version may be whole");
  std::memcpy(data, pages.data(), static_cast<std::size_t>(table_.segment(segment).bytes));
}

}  // namespace zg
