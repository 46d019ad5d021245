#include <sys/mman.h>

#include <algorithm>
#include <map>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

std::int64_t arena_charge(std::int64_t bytes) {
  return round_up(std::max<std::int64_t>(bytes, 1), 4096);
}

namespace {

// Buffers come from mmap one by one, so that there is no fragmentation: what counts is bytes. Freed
// buffers are kept by size; those of other sizes go back to the system when the budget asks for it.
class HostArena : public Arena {
 public:
  HostArena(std::string name, std::int64_t budget) : name_(std::move(name)), budget_(budget) {}

  ~HostArena() override {
    std::lock_guard lock(mutex_);
    ZG_ASSERT_EQ(in_use_, 0);
    unmap_kept();
  }

  void* allocate(std::int64_t wanted) override {
    const std::int64_t bytes = arena_charge(wanted);
    std::lock_guard lock(mutex_);
    if (in_use_ + bytes > budget_) return nullptr;
    void* data = nullptr;
    if (auto it = kept_.find(bytes); it != kept_.end()) {
      data = it->second.back();
      it->second.pop_back();
      if (it->second.empty()) kept_.erase(it);
      kept_bytes_ -= bytes;
    } else {
      // Largest first: fewest calls.
      while (in_use_ + kept_bytes_ + bytes > budget_) {
        auto last = std::prev(kept_.end());
        unmap(last->second.back(), last->first);
        kept_bytes_ -= last->first;
        last->second.pop_back();
        if (last->second.empty()) kept_.erase(last);
      }
      data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (data == MAP_FAILED) {
        throw Error(Errc::kMemory, name_,
                    "the system refused " + format_bytes(bytes) + ": " + errno_text(errno),
                    "lower this tier's budget, or free memory");
      }
      if (bytes >= 4 * kMiB) madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
      if (hooks_.mapped) hooks_.mapped(data, bytes);
    }
    in_use_ += bytes;
    peak_ = std::max(peak_, in_use_ + kept_bytes_);
    return data;
  }

  void release(void* data, std::int64_t wanted) override {
    const std::int64_t bytes = arena_charge(wanted);
    std::lock_guard lock(mutex_);
    ZG_ASSERT_LE(bytes, in_use_);
    in_use_ -= bytes;
    kept_bytes_ += bytes;
    kept_[bytes].push_back(data);
  }

  std::int64_t budget() const override { return budget_; }
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
    unmap_kept();
    hooks_ = std::move(hooks);
  }

 private:
  void unmap_kept() {
    for (auto& [size, list] : kept_) {
      for (void* data : list) unmap(data, size);
    }
    kept_.clear();
    kept_bytes_ = 0;
  }

  void unmap(void* data, std::int64_t bytes) {
    if (hooks_.unmapped) hooks_.unmapped(data, bytes);
    munmap(data, static_cast<std::size_t>(bytes));
  }

  const std::string name_;
  const std::int64_t budget_;
  mutable std::mutex mutex_;
  std::int64_t in_use_ = 0, kept_bytes_ = 0, peak_ = 0;
  std::map<std::int64_t, std::vector<void*>> kept_;
  Hooks hooks_;
};

}  // namespace

std::unique_ptr<Arena> make_host_arena(std::string name, std::int64_t budget) {
  return std::make_unique<HostArena>(std::move(name), budget);
}

}  // namespace zg
