#include <algorithm>
#include <mutex>

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

// Sizes of the chunks in which pages are taken while the budget has room. Chunks are large, since hooks are
// called for each, and drivers keep each in a table.
constexpr std::int64_t kChunksPerBudget = 32, kMaxChunk = kGiB;
// How many addresses to reserve at once, in multiples of the budget: the first amount that the system grants.
// More are reserved when they are too fragmented.
constexpr std::int64_t kAddressFactors[] = {4, 2, 1};

std::int64_t unit_below(std::int64_t at) {
  return at / kUnit * kUnit;
}

// A unit of kUnit bytes may become a huge page only while all its pages are taken. Otherwise the kernel could
// back a partly taken unit with a huge page, and so exceed the budget.
//
// Two mutexes: mutex_ guards all members but chunks_, and is held only briefly. A thread that takes pages
// from the system or gives them back also holds system_mutex_, and releases mutex_ during system calls and
// hooks; meanwhile the addresses in question count as used.
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
    std::lock_guard system(system_mutex_);
    give_all_back();
  }

  void* allocate(std::int64_t wanted) override {
    if (void* const data = allocate_at_hand(wanted)) return data;
    const std::int64_t bytes = arena_charge(wanted);
    std::lock_guard system(system_mutex_);
    Lock lock(mutex_);
    if (bytes > budget_ - in_use_) return nullptr;
    in_use_ += bytes;  // before pages are found, so that other threads leave enough holes
    try {
      auto begin = extents_.take(bytes);  // a hole that another thread made while this one waited
      if (!begin) begin = grow(lock, bytes);
      if (!begin) begin = regather(lock, bytes);
      peak_ = std::max(peak_, in_use_);
      return reinterpret_cast<void*>(*begin);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      in_use_ -= bytes;
      throw;
    }
  }

  void* allocate_at_hand(std::int64_t wanted) override {
    const std::int64_t bytes = arena_charge(wanted);
    std::lock_guard lock(mutex_);
    if (bytes > budget_ - in_use_) return nullptr;
    const auto begin = extents_.take(bytes);
    if (!begin) return nullptr;
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
    std::lock_guard system(system_mutex_);
    give_all_back();
    chunks_.set_hooks(std::move(hooks));
  }
  HostMemoryReport report() const override {
    std::lock_guard system(system_mutex_);
    std::lock_guard lock(mutex_);
    pages::Counts counts;
    for (const Region& region : regions_) counts += pages::count(region.range.begin, region.range.bytes);
    return {taken_,      counts.resident,   counts.huge,    counts.locked,
            regathered_, regathered_bytes_, chunks_.count()};
  }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Region {
    Range range;
    std::size_t share;
  };

  std::int64_t room() const { return budget_ / kPage * kPage - taken_; }

  Region& region_of(std::int64_t at) {
    for (Region& region : regions_) {
      if (region.range.begin <= at && at < region.range.end()) return region;
    }
    ZG_ASSERT(false, "address {} is in no region", at);
    return regions_.front();
  }
  void count_taken(Range range, std::int64_t sign) {
    taken_of_share_[region_of(range.begin).share] += sign * range.bytes;
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

  // Finds a place for the buffer and takes new pages for it, if the budget has enough left. Takes more pages
  // than needed now, in whole units. None: the budget or the addresses do not suffice.
  std::optional<std::int64_t> grow(Lock& lock, std::int64_t bytes) {
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
        const Range both{window->range.begin, bytes + spare};
        const std::vector<Range> parts = extents_.empty_parts(both);
        extents_.set(both, Kind::kUsed);
        take_pages(lock, both, parts);
        lock.unlock();
        for (const Range& part : parts) chunks_.add(part);
        lock.lock();
        extents_.release(both);
        extents_.set(window->range, Kind::kUsed);  // the rest is a hole
        return window->range.begin;
      }
    }
    return std::nullopt;
  }

  // Makes a buffer that the budget allows from the pages of holes that are too small or too far apart.
  std::int64_t regather(Lock& lock, std::int64_t bytes) {
    auto best = extents_.best_window(bytes, regions_);
    if (!best) {
      add_region(0);
      best = extents_.best_window(bytes, regions_);
    }
    Range range = best->range;
    if (best->missing == bytes) {  // no page is there yet: align to whole units, if they are free
      const std::int64_t aligned = round_up(range.begin, kUnit);
      if (extents_.empty_bytes_at(range.begin) >= aligned - range.begin + bytes) range.begin = aligned;
    }
    std::vector<Range> parts = extents_.empty_parts(range);
    extents_.set(range, Kind::kUsed);
    if (const std::int64_t more = best->missing - room(); chunks_.are_kept())
      move_from_holes(lock, range, parts, more);
    else
      give_back_from_holes(lock, more);
    take_pages(lock, range, parts);
    if (huge_ && chunks_.are_kept()) allow_huge_units(range);
    ++regathered_;
    regathered_bytes_ += best->missing;
    return range.begin;
  }

  // Chooses a range of holes, of at most `bytes` bytes, to take pages from, and marks it as used. Chooses
  // whole units as long as possible, so that huge pages stay whole.
  Range strip_holes(std::int64_t bytes) {
    const auto whole_units = [&](const Range& hole) {
      const std::int64_t begin = round_up(hole.begin, kUnit), end = unit_below(hole.end());
      const std::int64_t n = std::min(end - begin, unit_below(bytes));
      return Range{end - n, n};
    };
    const std::vector<Range> holes = extents_.holes();
    const auto found = std::find_if(holes.begin(), holes.end(),
                                    [&](const Range& hole) { return whole_units(hole).bytes > 0; });
    const Range part = found != holes.end() ? whole_units(*found) : extents_.strippable(bytes);
    extents_.set(part, Kind::kUsed);
    return part;
  }

  void give_back_from_holes(Lock& lock, std::int64_t bytes) {
    while (bytes > 0) {
      const Range part = strip_holes(bytes);
      give_back(lock, part);
      bytes -= part.bytes;
    }
  }

  // Moves `bytes` bytes of pages from holes to the first of these parts of `buffer`, and removes the filled
  // parts from the list. A driver that has registered the pages still knows them at their old addresses, so
  // addresses in chunks that pages leave are never used again.
  void move_from_holes(Lock& lock, Range buffer, std::vector<Range>& parts, std::int64_t bytes) {
    while (bytes > 0) {
      const Range from = strip_holes(bytes);
      std::int64_t left = 0;
      int error = 0;
      while (left < from.bytes && error == 0) {
        Range& part = parts.front();
        const std::int64_t n = std::min(part.bytes, from.bytes - left);
        error = move_pages(lock, {from.begin + left, n}, part.begin);
        left += n;
        if (error != 0) break;
        part = {part.begin + n, part.bytes - n};
        if (part.bytes == 0) parts.erase(parts.begin());
      }
      extents_.release(from);
      extents_.set({from.begin, left}, Kind::kEmpty);
      chunks_.each_part({from.begin, left}, [&](Range part) { extents_.set(part, Kind::kLeft); });
      bytes -= left;
      if (error == 0) continue;
      extents_.release(buffer);
      for (const Range& part : parts) extents_.set(part, Kind::kEmpty);
      throw Error(Errc::kMemory, name_,
                  fmt::format("the system refused to move pages of host memory: {}", errno_text(error)),
                  "raise vm.max_map_count (sysctl), or lower this tier's budget; Linux 5.7 is needed");
    }
  }

  int move_pages(Lock& lock, Range from, std::int64_t to) {
    lock.unlock();
    if (huge_) {
      const std::int64_t begin = unit_below(from.begin);
      pages::allow_huge(begin, round_up(from.end(), kUnit) - begin, false);
    }
    const int error = pages::move(from.begin, to, from.bytes, pinned_);
    lock.lock();
    count_taken(from, -1);
    if (error == 0) count_taken({to, from.bytes}, 1);
    return error;
  }

  void allow_huge_units(Range range) {
    for (std::int64_t unit = unit_below(range.begin); unit < range.end(); unit += kUnit)
      allow_huge_if_whole(unit);
  }
  void allow_huge_if_whole(std::int64_t unit) {
    if (extents_.backed({unit, kUnit})) pages::allow_huge(unit, kUnit, true);
  }

  // Gives the pages of a range that counts as used back to the system; the range is then empty.
  void give_back(Lock& lock, Range range) {
    lock.unlock();
    chunks_.remove(range);  // first, since a driver that has a chunk registered would keep its pages
    if (huge_) {
      const std::int64_t begin = unit_below(range.begin);
      pages::allow_huge(begin, round_up(range.end(), kUnit) - begin, false);
    }
    pages::give_back(range.begin, range.bytes, pinned_);
    lock.lock();
    extents_.release(range);
    extents_.set(range, Kind::kEmpty);
    count_taken(range, -1);
  }

  // Takes pages from the system for the empty parts of `buffer`, which counts as used already.
  void take_pages(Lock& lock, Range buffer, const std::vector<Range>& parts) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Range& part = parts[i];
      const char* what = "";
      lock.unlock();
      const std::int64_t begin = round_up(part.begin, kUnit), end = unit_below(part.end());
      if (huge_ && begin < end) pages::allow_huge(begin, end - begin, true);
      int error = pages::take(part.begin, part.bytes);
      if (error == 0 && pinned_) {
        error = pages::lock(part.begin, part.bytes);
        what = " to be locked";
      }
      lock.lock();
      count_taken(part, 1);
      if (error != 0) {
        extents_.release(buffer);
        for (std::size_t j = 0; j < parts.size(); ++j)
          extents_.set(parts[j], j <= i ? Kind::kUsed : Kind::kEmpty);
        for (std::size_t j = 0; j <= i; ++j) give_back(lock, parts[j]);
        throw Error(
            Errc::kMemory, name_,
            fmt::format("the system refused {}{}: {}", format_bytes(part.bytes), what, errno_text(error)),
            pinned_ ? "raise the memlock limit (ulimit -l) or allow mlock in the sandbox, lower this tier's "
                      "budget, or free memory"
                    : "lower this tier's budget, or free memory");
      }
      if (!huge_) continue;
      // Units at the part's ends that are whole only with the pages next to it: the kernel may join them
      // later.
      for (const std::int64_t unit : {unit_below(part.begin), unit_below(part.end())}) {
        const bool inside = part.begin <= unit && unit + kUnit <= part.end();
        if (!inside && unit < region_of(part.begin).range.end()) allow_huge_if_whole(unit);
      }
    }
  }

  // Called with system_mutex_ held, but not mutex_.
  void give_all_back() {
    ZG_ASSERT_EQ(in_use(), 0);
    for (const Region& region : regions_) chunks_.remove(region.range);
    std::lock_guard lock(mutex_);
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
  mutable std::mutex system_mutex_;  // locked before mutex_
  mutable std::mutex mutex_;
  std::int64_t in_use_ = 0, peak_ = 0, taken_ = 0;
  std::vector<std::int64_t> taken_of_share_;
  std::vector<Region> regions_;
  Extents extents_;
  Chunks chunks_;  // guarded by system_mutex_, not by mutex_
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
