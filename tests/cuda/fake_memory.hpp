// The memory of a faked CUDA: device memory without addresses, addresses, what is mapped where, and which
// host memory is pinned. Device memory is pages of a file in memory, so that mapping, unmapping and mapping
// elsewhere are real: what is not mapped cannot be touched, and bytes move with their granule. It holds
// 0xff.. (NaN) when it is created.
//
// What CUDA would refuse, or would let pass and go wrong by, is thrown as Misuse. Any thread.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/runtime.hpp"

namespace zg::test {

class FakeMemory {
 public:
  struct Misuse {
    std::string what;
  };
  enum class Kind { kDevice, kPinned, kPageable };
  struct Place {
    Kind kind = Kind::kPageable;
    int device = -1;
  };

  FakeMemory(int devices, std::int64_t bytes, std::int64_t granule);
  ~FakeMemory();

  cuda::PhysicalHandle create(int device, std::int64_t bytes);  // Error(kMemory) when there is no more
  void release(cuda::PhysicalHandle physical);                  // its bytes live on while they are mapped
  void* reserve(std::int64_t bytes);
  void free_addresses(void* at, std::int64_t bytes);
  void map(void* at, std::int64_t bytes, cuda::PhysicalHandle physical);
  void unmap(void* at, std::int64_t bytes);

  void register_host(void* at, std::int64_t bytes);
  void unregister_host(void* at);
  void* allocate_host(std::int64_t bytes);  // what follows it cannot be touched
  void release_host(void* at);

  // Where all of these bytes are; device memory must be mapped, host memory must exist and be pinned, at
  // once, as a whole or not at all.
  Place place(const void* at, std::int64_t bytes) const;
  // Bytes that work on a stream is going to touch: until end_use(), nobody may unmap or unregister them.
  void begin_use(const void* at, std::int64_t bytes);
  void end_use(const void* at, std::int64_t bytes);

  cuda::MemoryInfo info(int device) const;
  void set_other_use(int device, std::int64_t bytes);  // by other processes
  std::int64_t pinned() const;                         // bytes registered or allocated
  enum class Of { kHost, kAll };
  std::vector<std::string> leaks(Of memory) const;

 private:
  using Address = std::int64_t;
  struct Physical {
    int device = 0;
    std::int64_t offset = 0, bytes = 0;  // in the file
    bool held = true;                    // by its handle
    bool mapped = false;
  };
  struct Mapping {
    std::int64_t bytes = 0;
    cuda::PhysicalHandle physical = 0;
  };
  struct Host {
    std::int64_t bytes = 0;
    bool ours = false;  // by allocate_host()
    int times = 1;      // that it was registered
  };
  template <class Map>
  static auto overlap(Map& ranges, Address at, std::int64_t bytes) -> decltype(ranges.begin());
  Place place_locked(Address at, std::int64_t bytes) const;
  void drop_if_unused(std::map<cuda::PhysicalHandle, Physical>::iterator it);
  void check_idle(Address at, std::int64_t bytes, const char* what) const;
  void check_granules(std::int64_t value, const char* what) const;

  int devices() const { return static_cast<int>(used_.size()); }

  const std::int64_t bytes_, granule_;
  mutable std::mutex mutex_;
  int file_ = -1;
  std::int64_t file_bytes_ = 0;
  std::vector<std::int64_t> used_, other_use_;  // of each device
  cuda::PhysicalHandle next_ = 1;
  std::map<cuda::PhysicalHandle, Physical> physical_;
  std::map<Address, Host> reserved_;  // addresses of devices
  std::map<Address, Mapping> mapped_;
  std::map<Address, Host> pinned_;
  std::multimap<Address, std::int64_t> uses_;
};

}  // namespace zg::test
