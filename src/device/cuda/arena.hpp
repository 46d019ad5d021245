// Memory of a CUDA device, by the promises of zg::Arena.
//
// Physical memory is taken from CUDA lazily, granule by granule (2 MiB on today's GPUs), and kept. A buffer's
// addresses are its own; granules are mapped to them. Where no hole is large enough for a buffer, it gets
// fresh addresses, and granules of holes are mapped there: so bytes alone decide what fits, never
// fragmentation. The steady state is free: where buffers fit holes (sizes that recur), allocate() and
// release() make no call of CUDA and allocate nothing.
//
// There is one physical handle for each granule, since CUDA maps handles as a whole: a larger one, of which a
// part is in use, could not move, and what the budget allows would depend on the order of buffers. CUDA needs
// some 70 us to make and map one (vAttention, arXiv:2405.04437, measures them one by one): the first use of
// 80 GB takes some seconds, spread over the first step.
//
// A buffer may be released when no work on the device uses it any more. Thread-safe; calls that ask CUDA for
// something choose this arena's device for the calling thread.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/runtime.hpp"
#include "device/extents.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::cuda {

struct ArenaOptions {
  std::string name = "tiers.device";  // of the tier, for messages
  int device = 0;
  std::int64_t budget = 0;
};

struct ArenaReport {
  std::int64_t taken = 0;  // physical memory that is held
  std::int64_t in_use = 0, peak = 0;
  std::int64_t regathered = 0, regathered_bytes = 0;  // buffers that fitted no hole; memory moved for them
  std::int64_t addresses = 0;                         // bytes of them that are reserved
};

class CudaArena final : public Arena {
 public:
  // Takes nothing yet. Throws Error(kMemory) when less than the budget is free.
  CudaArena(Runtime& runtime, ArenaOptions options);  // the runtime must outlive it
  ~CudaArena() override;

  void* allocate(std::int64_t bytes) override;
  void* allocate_at_hand(std::int64_t bytes) override;
  void release(void* data, std::int64_t bytes) override;
  std::int64_t budget() const override { return options_.budget; }
  std::int64_t in_use() const override;
  std::int64_t peak() const override;
  std::int64_t granule() const override { return granule_; }
  // Hooks see all that is mapped, regathered memory included; a chunk goes when its first granule goes.
  void set_hooks(Hooks hooks) override;
  ArenaReport report() const;

 private:
  using Range = Extents::Range;
  using Kind = Extents::Kind;
  struct Region {
    Range range;
    std::vector<PhysicalHandle> mapped;  // by granule; 0: none
  };

  std::int64_t room() const { return options_.budget / granule_ * granule_ - taken_; }
  Region& region_of(std::int64_t at);
  PhysicalHandle& mapped_at(std::int64_t at);
  void add_region();
  std::int64_t place(std::int64_t bytes);  // where no hole is large enough
  void create(std::int64_t bytes);         // into spare_: all of it, or nothing and it throws
  void strip_holes(std::int64_t bytes);    // into spare_
  void strip(Range hole);
  void map(Range part);  // from spare_
  void forget_chunks(Range range);
  void give_all_back();
  [[noreturn]] void explain(const Error& refusal, std::int64_t bytes);

  Runtime& runtime_;
  const ArenaOptions options_;
  const std::int64_t granule_;
  mutable std::mutex mutex_;
  std::int64_t in_use_ = 0, peak_ = 0;
  std::int64_t taken_ = 0;  // mapped or spare
  std::vector<PhysicalHandle> spare_;
  std::vector<Region> regions_;
  Extents extents_;
  std::map<std::int64_t, std::int64_t> chunks_;  // that the hooks have seen: address, bytes
  std::int64_t regathered_ = 0, regathered_bytes_ = 0;
  Hooks hooks_;
};

}  // namespace zg::cuda
