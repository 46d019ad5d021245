#include <algorithm>
#include <limits>

#include "device/chunks.hpp"
#include "device/extents.hpp"
#include "device/pages.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/memory.hpp"

namespace zg {

std::int64_t arena_charge(std::int64_t bytes, std::int64_t granule) {
  return round_up(std::max<std::int64_t>(bytes, 1), granule);
}

namespace {

using pages::kPage;
using pages::kUnit;
using Range = Extents::Range;
using Kind = Extents::Kind;

// Pages are taken in chunks of a 32nd of the budget: hooks are called for each chunk, and drivers keep a
// table of what is registered with them, so there must not be many.
constexpr std::int64_t kChunksPerBudget = 32, kMaxChunk = kGiB;
// How many addresses a region reserves, as multiples of the budget; the next smaller if the system refuses.
// Another region is added when the addresses of all are too fragmented.
constexpr std::int64_t kAddressFactors[] = {4, 2, 1};

std::int64_t unit_below(std::int64_t at) {
  return at / kUnit * kUnit;
}

// Huge pages are allowed in a unit of kUnit bytes only while all its pages are taken: else the kernel could
// back a part of the unit by a huge page, and exceed the budget.
class PagedMemory final : public HostMemory {
 public:
  explicit PagedMemory(const HostMemoryOptions& options)
      : name_(options.name),
        budget_(options.budget),
        pinned_(options.pinned),
        huge_(options.huge_pages),
        chunk_(std::min(
            round_up(std::max<std::int64_t>(budget_, 1), kChunksPerBudget * kUnit) / kChunksPerBudget,
            kMaxChunk)),
        shares_(options.shares) {
    if (shares_.empty()) shares_.push_back({-1, budget_});
  }

  ~PagedMemory() override {
    std::lock_guard lock(mutex_);
    ZG_ASSERT_EQ(in_use_, 0);
    give_all_back();
  }

  void* allocate(std::int64_t wanted) override {
    const std::int64_t bytes = arena_charge(wanted);
    std::lock_guard lock(mutex_);
    if (bytes > budget_ - in_use_) return nullptr;
    auto begin = extents_.take(bytes);
    if (!begin) begin = grow(bytes);
    if (!begin) begin = regather(bytes);
    in_use_ += bytes;
    peak_ = std::max(peak_, in_use_);
    return reinterpret_cast<void*>(*begin);
  }

  void release(void* data, std::int64_t wanted) override {
    const std::int64_t bytes = arena_charge(wanted);
    std::lock_guard lock(mutex_);
    ZG_ASSERT_LE(bytes, in_use_);
    extents_.release({reinterpret_cast<std::int64_t>(data), bytes});
    in_use_ -= bytes;
  }

  std::int64_t budget() const override { return budget_; }
  std::int64_t granule() const override { return kPage; }
  std::int64_t in_use() const override {
    std::lock_guard lock(mutex_);
    return in_use_;
  }
  std::int64_t peak() const override {
    std::lock_guard lock(mutex_);
    return peak_;
  }
  void set_hooks(Hooks hooks) override {
    std::lock_guard lock(mutex_);
    ZG_ASSERT_EQ(in_use_, 0);
    give_all_back();
    chunks_.set_hooks(std::move(hooks));
  }
  HostMemoryReport report() const override {
    std::lock_guard lock(mutex_);
    pages::Counts counts;
    for (const Region& region : regions_) counts += pages::count(region.range.begin, region.range.bytes);
    return {taken_,      counts.resident,   counts.huge,    counts.locked,
            regathered_, regathered_bytes_, chunks_.count()};
  }

 private:
  struct Region {
    Range range;
    std::size_t share;
  };

  std::int64_t room() const { return budget_ / kPage * kPage - taken_; }

  void count_taken(Range range, std::int64_t sign) {
    taken_of_share_[region_of(regions_, range.begin).share] += sign * range.bytes;
    taken_ += sign * range.bytes;
  }

  void add_region(std::size_t share) {
    std::int64_t begin = 0, bytes = 0;
    for (const std::int64_t factor : kAddressFactors) {
      bytes = round_up(factor * budget_, kUnit);
      begin = pages::reserve(bytes);
      if (begin != 0) break;
    }
    if (begin == 0) {
      throw Error(
          Errc::kMemory, name_,
          fmt::format("the system refused {} of addresses: {}", format_bytes(bytes), errno_text(errno)),
          "raise the address space limit (ulimit -v)");
    }
    if (const int node = shares_[share].node; node >= 0) {
      if (const int error = pages::prefer_node(begin, bytes, node); error != 0)
        log::warning("{}: memory of node {} cannot be preferred: {}", name_, node, errno_text(error));
    }
    regions_.push_back({{begin, bytes}, share});
    extents_.add_region({begin, bytes});
  }

  // A buffer in new pages, as long as the budget has room: takes a whole chunk, more than the buffer needs.
  std::optional<std::int64_t> grow(std::int64_t bytes) {
    taken_of_share_.resize(shares_.size());
    for (std::size_t share = 0; share < shares_.size(); ++share) {
      const std::int64_t left =
          std::min(room(), shares_[share].bytes / kPage * kPage - taken_of_share_[share]);
      if (left <= 0) continue;
      const auto has_region = [&](const Region& region) { return region.share == share; };
      if (std::none_of(regions_.begin(), regions_.end(), has_region)) add_region(share);
      for (const Region& region : regions_) {
        if (region.share != share) continue;
        const auto window = extents_.window(bytes, region.range);
        if (!window || window->missing > left) continue;
        const std::int64_t end = window->range.end();
        const std::int64_t more = std::max<std::int64_t>(0, chunk_ - window->missing);
        const std::int64_t spare = std::min(
            {left - window->missing, extents_.empty_bytes_at(end), round_up(end + more, kUnit) - end});
        const std::vector<Range> parts = extents_.empty_parts({window->range.begin, bytes + spare});
        extents_.set(window->range, Kind::kUsed);
        if (spare > 0) extents_.set({end, spare}, Kind::kHole);
        take_pages(window->range, parts);
        for (const Range& part : parts) chunks_.add(part);
        return window->range.begin;
      }
    }
    return std::nullopt;
  }

  // A buffer that the budget allows but no hole has: moves pages to it from holes that are too small.
  std::int64_t regather(std::int64_t bytes) {
    auto best = extents_.best_window(bytes, regions_);
    if (!best) {
      add_region(0);
      best = extents_.best_window(bytes, regions_);
    }
    Range range = best->range;
    if (best->missing == bytes) {  // entirely new addresses: aligned to units, if those are free
      const std::int64_t aligned = round_up(range.begin, kUnit);
      if (extents_.empty_bytes_at(range.begin) >= aligned - range.begin + bytes) range.begin = aligned;
    }
    const std::vector<Range> parts = extents_.empty_parts(range);
    extents_.set(range, Kind::kUsed);
    give_back_from_holes(best->missing - room());
    take_pages(range, parts);
    ++regathered_;
    regathered_bytes_ += best->missing;
    return range.begin;
  }

  // Whole units as far as possible, so that no huge page is split.
  void give_back_from_holes(std::int64_t bytes) {
    for (const Range& hole : bytes >= kUnit ? extents_.holes() : std::vector<Range>()) {
      const std::int64_t begin = round_up(hole.begin, kUnit), end = unit_below(hole.end());
      const std::int64_t n = std::min(end - begin, unit_below(bytes));
      if (n <= 0) continue;
      give_back({end - n, n});
      bytes -= n;
    }
    while (bytes > 0) {
      const Range end = extents_.strippable(bytes);
      give_back(end);
      bytes -= end.bytes;
    }
  }

  // range: a part of a hole, which becomes empty.
  void give_back(Range range) {
    chunks_.remove(range);  // first: whoever has registered a chunk would keep its pages
    if (huge_) {
      const std::int64_t begin = unit_below(range.begin);
      pages::allow_huge(begin, round_up(range.end(), kUnit) - begin, false);
    }
    pages::give_back(range.begin, range.bytes, pinned_);
    extents_.set(range, Kind::kEmpty);
    count_taken(range, -1);
  }

  // Takes pages for `parts` of the buffer and of the spare addresses behind it, which the map has as backed
  // already.
  void take_pages(Range buffer, const std::vector<Range>& parts) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Range& part = parts[i];
      const std::int64_t begin = round_up(part.begin, kUnit), end = unit_below(part.end());
      if (huge_ && begin < end) pages::allow_huge(begin, end - begin, true);
      int error = pages::take(part.begin, part.bytes);
      const char* what = "";
      if (error == 0 && pinned_) {
        error = pages::lock(part.begin, part.bytes);
        what = " to be locked";
      }
      count_taken(part, 1);
      if (error != 0) {
        extents_.release(buffer);
        for (std::size_t j = 0; j <= i; ++j) give_back(parts[j]);
        for (std::size_t j = i + 1; j < parts.size(); ++j) extents_.set(parts[j], Kind::kEmpty);
        throw Error(
            Errc::kMemory, name_,
            fmt::format("the system refused {}{}: {}", format_bytes(part.bytes), what, errno_text(error)),
            pinned_ ? "raise the memlock limit (ulimit -l), lower this tier's budget, or free memory"
                    : "lower this tier's budget, or free memory");
      }
      if (!huge_) continue;
      // A unit at either end may now be complete, together with pages around the part: the kernel may join
      // those into a huge page later.
      for (const std::int64_t unit : {unit_below(part.begin), unit_below(part.end())}) {
        const bool inside = part.begin <= unit && unit + kUnit <= part.end();
        if (!inside && unit < region_of(regions_, part.begin).range.end() && extents_.backed({unit, kUnit}))
          pages::allow_huge(unit, kUnit, true);
      }
    }
  }

  void give_all_back() {
    chunks_.remove({0, std::numeric_limits<std::int64_t>::max()});
    for (const Region& region : regions_) pages::unreserve(region.range.begin, region.range.bytes);
    regions_.clear();
    extents_.clear();
    taken_ = 0;
    taken_of_share_.clear();
  }

  const std::string name_;
  const std::int64_t budget_;
  const bool pinned_, huge_;
  const std::int64_t chunk_;
  std::vector<NodeShare> shares_;
  mutable std::mutex mutex_;
  std::int64_t in_use_ = 0, peak_ = 0, taken_ = 0;
  std::vector<std::int64_t> taken_of_share_;
  std::vector<Region> regions_;
  Extents extents_;
  Chunks chunks_;
  std::int64_t regathered_ = 0, regathered_bytes_ = 0;
};

}  // namespace

std::unique_ptr<HostMemory> make_host_memory(const HostMemoryOptions& options) {
  MemoryDemand demand{.name = options.name, .bytes = options.budget, .pinned = options.pinned};
  for (const NodeShare& share : options.shares) {
    if (share.node >= 0) demand.nodes.push_back({share.node, share.bytes});
  }
  check_memory(options.limits != nullptr ? *options.limits : read_memory_limits(), demand);
  return std::make_unique<PagedMemory>(options);
}

std::unique_ptr<Arena> make_host_arena(std::string name, std::int64_t budget) {
  return make_host_memory({.name = std::move(name), .budget = budget});
}

}  // namespace zg
