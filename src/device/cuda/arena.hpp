// The arena of a CUDA device's memory (contract: zg::Arena).
//
// Physical memory is created lazily, granule by granule (2 MiB on today's GPUs), mapped to addresses, and
// kept. If no hole of free memory is large enough for a buffer, the buffer gets fresh addresses, and
// granules of holes are remapped there ("regathered"): so fragmentation never makes an allocation fail.
// While buffers fit into holes (recurring sizes), allocate() and release() make no CUDA call and allocate
// nothing.
//
// Each granule has a physical handle of its own, because CUDA maps a handle only as a whole: a larger handle
// could not be remapped while a part of it is in use, so whether a buffer fits into the budget would depend
// on the order of buffers. CUDA takes some 70 us to create and map a handle (measured singly in vAttention,
// arXiv:2405.04437): the first use of 80 GB takes some seconds, spread over the first step.
//
// A buffer may be released when no work on the device uses it any more. Thread-safe; calls that need CUDA set
// this arena's device as the calling thread's current device.
#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "device/chunks.hpp"
#include "device/cuda/runtime.hpp"
#include "device/extents.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::cuda {

struct ArenaOptions {
  std::string name = "tiers.device";  // name of the tier, for messages
  int device = 0;
  std::int64_t budget = 0;
};

// All members are in bytes, except `regathered`.
struct ArenaReport {
  std::int64_t taken = 0;  // physical memory that the arena holds
  std::int64_t in_use = 0, peak = 0;
  std::int64_t regathered = 0;        // number of buffers that fitted into no hole
  std::int64_t regathered_bytes = 0;  // memory that was remapped for them
  std::int64_t addresses = 0;         // reserved address space
};

class CudaArena final : public Arena {
 public:
  // Takes no memory yet. Throws Error(kMemory) if less memory than the budget is free.
  CudaArena(Runtime& runtime, ArenaOptions options);  // the runtime must outlive it
  ~CudaArena() override;

  void* allocate(std::int64_t bytes) override;
  void* allocate_at_hand(std::int64_t bytes) override;
  void release(void* data, std::int64_t bytes) override;
  std::int64_t budget() const override { return options_.budget; }
  std::int64_t in_use() const override;
  std::int64_t peak() const override;
  std::int64_t granule() const override { return granule_; }
  // Hooks see all mapped memory, including regathered memory. A chunk is reported as unmapped when its first
  // granule is about to be unmapped.
  void set_hooks(Hooks hooks) override;
  ArenaReport report() const;

 private:
  using Range = Extents::Range;
  using Kind = Extents::Kind;
  struct Region {
    Range range;
    std::vector<PhysicalHandle> mapped;  // for each granule of the range; 0: none
  };

  std::int64_t room() const { return options_.budget / granule_ * granule_ - taken_; }
  PhysicalHandle& mapped_at(std::int64_t at);
  void add_region();
  std::int64_t place(std::int64_t bytes);  // places a buffer for which no hole is large enough
  void create(std::int64_t bytes);  // adds physical memory to spare_: all bytes, or it throws and adds none
  void strip(Range hole);           // moves the hole's physical memory to spare_
  void map(Range part);             // maps physical memory from spare_ to these addresses
  void give_all_back();
  [[noreturn]] void explain(const Error& refusal, std::int64_t bytes);

  Runtime& runtime_;
  const ArenaOptions options_;
  const std::int64_t granule_;
  mutable std::mutex mutex_;
  std::int64_t in_use_ = 0, peak_ = 0;
  std::int64_t taken_ = 0;             // mapped or spare
  std::vector<PhysicalHandle> spare_;  // created, but mapped nowhere
  std::vector<Region> regions_;
  Extents extents_;
  Chunks chunks_;
  std::int64_t regathered_ = 0, regathered_bytes_ = 0;
};

}  // namespace zg::cuda
