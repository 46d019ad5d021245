// A device that gives its memory in granules, as GPUs do, or less of it: around any other, whose allocations
// it rounds up (and whose alignment of addresses it keeps).
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::test {

class GranuleArena final : public Arena {
 public:
  GranuleArena(Arena& inner, std::int64_t granule, std::int64_t budget)
      : inner_(inner), granule_(granule), budget_(std::min(budget, inner.budget())) {
    ZG_ASSERT_EQ(granule % inner.granule(), 0);
  }
  std::int64_t granule() const override { return granule_; }
  void* allocate(std::int64_t bytes) override {
    std::lock_guard lock(mutex_);
    return inner_.in_use() + charge(bytes) > budget_ ? nullptr : inner_.allocate(charge(bytes));
  }
  void release(void* data, std::int64_t bytes) override {
    std::lock_guard lock(mutex_);
    inner_.release(data, charge(bytes));
  }
  std::int64_t budget() const override { return budget_; }
  std::int64_t in_use() const override { return inner_.in_use(); }
  std::int64_t peak() const override { return inner_.peak(); }
  void set_hooks(Hooks hooks) override { inner_.set_hooks(std::move(hooks)); }

 private:
  Arena& inner_;
  const std::int64_t granule_, budget_;
  std::mutex mutex_;  // a budget is checked and taken at once
};

class GranuleDevice final : public Device {
 public:
  GranuleDevice(std::unique_ptr<Device> inner, std::int64_t granule, std::int64_t budget)
      : inner_(std::move(inner)), arena_(inner_->arena(), granule, budget) {}
  std::string describe() const override { return inner_->describe(); }
  bool is_host() const override { return inner_->is_host(); }
  int numa_node() const override { return inner_->numa_node(); }
  void bind_threads(const std::vector<int>& cpus) override { inner_->bind_threads(cpus); }
  Arena& arena() override { return arena_; }
  Ops& ops() override { return inner_->ops(); }
  std::unique_ptr<Stream> make_stream(const std::string& name) override { return inner_->make_stream(name); }
  void repeat(Stream& stream, std::span<const std::uint64_t> key,
              const std::function<void()>& work) override {
    inner_->repeat(stream, key, work);
  }
  Arena::Hooks host_hooks() override { return inner_->host_hooks(); }
  std::shared_ptr<io::DirectStorage> direct_storage(bool wanted, std::string* why) override {
    return inner_->direct_storage(wanted, why);
  }
  void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    copied_ += bytes;
    inner_->copy_to_device(stream, device, host, bytes);
  }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    copied_ += bytes;
    inner_->copy_to_host(stream, host, device, bytes);
  }
  // Bytes that were copied in either direction.
  std::int64_t copied() const { return copied_; }

 private:
  std::unique_ptr<Device> inner_;
  GranuleArena arena_;
  std::atomic<std::int64_t> copied_{0};
};

// Returns `inner` itself where it has that granule already.
inline std::unique_ptr<Device> in_granules(std::unique_ptr<Device> inner, std::int64_t granule) {
  if (inner->arena().granule() == granule) return inner;
  const std::int64_t budget = inner->arena().budget();
  return std::make_unique<GranuleDevice>(std::move(inner), granule, budget);
}
// The same, and with a budget of at most this.
inline std::unique_ptr<Device> within(std::unique_ptr<Device> inner, std::int64_t granule,
                                      std::int64_t budget) {
  return std::make_unique<GranuleDevice>(std::move(inner), granule, budget);
}

}  // namespace zg::test
