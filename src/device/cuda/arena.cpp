#include "device/cuda/arena.hpp"

#include <algorithm>
#include <limits>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cuda {
namespace {

// As in the host's arena: a region's addresses, as multiples of the budget.
constexpr std::int64_t kAddressFactors[] = {4, 2, 1};

void* pointer(std::int64_t at) {
  return reinterpret_cast<void*>(at);
}

}  // namespace

CudaArena::CudaArena(Runtime& runtime, ArenaOptions options)
    : runtime_(runtime),
      options_(std::move(options)),
      granule_(runtime.device_info(options_.device).granule) {
  runtime_.use_device(options_.device);
  const MemoryInfo info = runtime_.memory_info();
  if (options_.budget <= info.free) return;
  throw Error(Errc::kMemory, options_.name,
              fmt::format("a budget of {}, but device {} has {} free of {}", format_bytes(options_.budget),
                          options_.device, format_bytes(info.free), format_bytes(info.total)),
              "lower tiers.device, or end the processes that hold the device's memory (nvidia-smi)");
}

CudaArena::~CudaArena() {
  std::lock_guard lock(mutex_);
  ZG_ASSERT_EQ(in_use_, 0);
  try {
    runtime_.use_device(options_.device);
  } catch (const Error& error) {
    log::warning("{}: {}", options_.name, error.what());
  }
  give_all_back();
}

void* CudaArena::allocate_at_hand(std::int64_t wanted) {
  const std::int64_t bytes = charge(wanted);
  std::lock_guard lock(mutex_);
  if (bytes > options_.budget - in_use_) return nullptr;
  const auto hole = extents_.take(bytes);
  if (!hole) return nullptr;
  in_use_ += bytes;
  peak_ = std::max(peak_, in_use_);
  return pointer(*hole);
}

void* CudaArena::allocate(std::int64_t wanted) {
  const std::int64_t bytes = charge(wanted);
  const auto try_it = [&]() -> void* {
    std::lock_guard lock(mutex_);
    if (bytes > options_.budget - in_use_) return nullptr;
    const auto hole = extents_.take(bytes);
    const std::int64_t begin = hole ? *hole : place(bytes);
    in_use_ += bytes;
    peak_ = std::max(peak_, in_use_);
    return pointer(begin);
  };
  try {
    return try_it();
  } catch (const Error& error) {
    if (error.code() != Errc::kMemory) throw;
    explain(error, bytes);
  }
}

void CudaArena::release(void* data, std::int64_t wanted) {
  const std::int64_t bytes = charge(wanted);
  std::lock_guard lock(mutex_);
  ZG_ASSERT_LE(bytes, in_use_);
  extents_.release({reinterpret_cast<std::int64_t>(data), bytes});
  in_use_ -= bytes;
}

std::int64_t CudaArena::in_use() const {
  std::lock_guard lock(mutex_);
  return in_use_;
}

std::int64_t CudaArena::peak() const {
  std::lock_guard lock(mutex_);
  return peak_;
}

void CudaArena::set_hooks(Hooks hooks) {
  std::lock_guard lock(mutex_);
  ZG_ASSERT_EQ(in_use_, 0);
  runtime_.use_device(options_.device);
  give_all_back();
  chunks_.set_hooks(std::move(hooks));
}

ArenaReport CudaArena::report() const {
  std::lock_guard lock(mutex_);
  std::int64_t addresses = 0;
  for (const Region& region : regions_) addresses += region.range.bytes;
  return {taken_, in_use_, peak_, regathered_, regathered_bytes_, addresses};
}

// Throws a message that helps to decide what to change: it states the budget, and the memory that the arena
// and others hold. The store adds a description of the buffers.
void CudaArena::explain(const Error& refusal, std::int64_t bytes) {
  const ArenaReport now = report();
  const MemoryInfo info = runtime_.memory_info();
  const std::int64_t others = std::max<std::int64_t>(0, info.total - info.free - now.taken);
  throw Error(
      Errc::kMemory, options_.name,
      fmt::format("device {} refused {} within the budget: of the budget's {}, {} are in use and {} are "
                  "held but free; other processes, and CUDA itself, hold {} of the device's {}; {} are free "
                  "({})",
                  options_.device, format_bytes(bytes), format_bytes(options_.budget),
                  format_bytes(now.in_use), format_bytes(now.taken - now.in_use), format_bytes(others),
                  format_bytes(info.total), format_bytes(info.free), refusal.message()),
      fmt::format("lower tiers.device to {} or less, or end the other processes (nvidia-smi)",
                  format_bytes(now.taken + info.free)));
}

PhysicalHandle& CudaArena::mapped_at(std::int64_t at) {
  Region& region = region_of(regions_, at);
  return region.mapped[static_cast<std::size_t>((at - region.range.begin) / granule_)];
}

void CudaArena::add_region() {
  for (const std::int64_t factor : kAddressFactors) {
    const std::int64_t bytes = round_up(factor * options_.budget, granule_);
    Region region{{0, bytes}, std::vector<PhysicalHandle>(static_cast<std::size_t>(bytes / granule_))};
    regions_.reserve(regions_.size() + 1);
    try {
      region.range.begin = reinterpret_cast<std::int64_t>(runtime_.reserve_addresses(bytes));
    } catch (const Error&) {
      if (factor == 1) throw;
      continue;
    }
    extents_.add_region(region.range);
    regions_.push_back(std::move(region));
    return;
  }
}

std::int64_t CudaArena::place(std::int64_t bytes) {
  runtime_.use_device(options_.device);
  auto best = extents_.best_window(bytes, regions_);
  if (!best) {
    add_region();
    best = extents_.best_window(bytes, regions_);
  }
  const Range range = best->range;
  const std::vector<Range> parts = extents_.empty_parts(range);
  const auto spare = [&] { return static_cast<std::int64_t>(spare_.size()) * granule_; };
  create(std::min(room(), std::max<std::int64_t>(0, best->missing - spare())));
  extents_.set(range, Kind::kUsed);
  std::size_t done = 0;
  try {
    if (const std::int64_t missing = best->missing - spare(); missing > 0) {
      while (spare() < best->missing) strip(extents_.strippable(best->missing - spare()));
      ++regathered_;
      regathered_bytes_ += missing;
    }
    for (; done < parts.size(); ++done) map(parts[done]);
  } catch (...) {
    extents_.release(range);
    for (; done < parts.size(); ++done) extents_.set(parts[done], Kind::kEmpty);
    throw;
  }
  for (const Range& part : parts) chunks_.add(part);
  return range.begin;
}

void CudaArena::create(std::int64_t bytes) {
  const std::size_t before = spare_.size();
  spare_.reserve(before + static_cast<std::size_t>(bytes / granule_));
  try {
    for (; bytes > 0; bytes -= granule_) {
      spare_.push_back(runtime_.create_physical(granule_));
      taken_ += granule_;
    }
  } catch (...) {
    // Gives back the handles created so far: other buffers may still fit.
    for (; spare_.size() > before; spare_.pop_back(), taken_ -= granule_)
      runtime_.release_physical(spare_.back());
    throw;
  }
}

void CudaArena::strip(Range hole) {
  chunks_.remove(hole);
  spare_.reserve(spare_.size() + static_cast<std::size_t>(hole.bytes / granule_));
  for (std::int64_t at = hole.begin; at < hole.end(); at += granule_) {
    runtime_.unmap(pointer(at), granule_);
    spare_.push_back(std::exchange(mapped_at(at), 0));
    extents_.set({at, granule_}, Kind::kEmpty);
  }
}

void CudaArena::map(Range part) {
  const auto n = static_cast<std::size_t>(part.bytes / granule_);
  ZG_ASSERT_LE(n, spare_.size());
  const std::span<const PhysicalHandle> physical = std::span(spare_).last(n);
  runtime_.map_each(pointer(part.begin), granule_, physical);
  std::copy(physical.begin(), physical.end(), &mapped_at(part.begin));
  spare_.resize(spare_.size() - n);
}

// Unmaps and frees all memory. A failed device refuses to unmap; then its addresses stay reserved until the
// process ends.
void CudaArena::give_all_back() {
  chunks_.remove({0, std::numeric_limits<std::int64_t>::max()});
  bool refused = false;
  for (Region& region : regions_) {
    for (std::size_t i = 0; i < region.mapped.size(); ++i) {
      if (region.mapped[i] == 0) continue;
      try {
        runtime_.unmap(pointer(region.range.begin + static_cast<std::int64_t>(i) * granule_), granule_);
      } catch (const Error& error) {
        if (!refused) log::warning("{}: {}", options_.name, error.what());
        refused = true;
      }
      runtime_.release_physical(region.mapped[i]);
    }
    if (!refused) runtime_.free_addresses(pointer(region.range.begin), region.range.bytes);
  }
  for (const PhysicalHandle physical : spare_) runtime_.release_physical(physical);
  regions_.clear();
  spare_.clear();
  extents_.clear();
  taken_ = 0;
}

}  // namespace zg::cuda
