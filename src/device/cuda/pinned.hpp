// Pinned host memory: the arena's hooks register memory that it takes from the system with CUDA, in pieces,
// so that the device can copy from and to it by DMA.
//
// CUDA refuses a copy whose host memory is registered only in part. That can be the case for an arena's
// buffer: CUDA may have refused to register a piece, and hooks do not see regathered pages. So copies are
// split by part():
//
//   auto hold = pinned.hold();
//   for (std::int64_t done = 0; done < bytes;) {
//     const auto part = pinned.part(hold, host + done, bytes - done);
//     runtime.copy(stream, device + done, host + done, part.bytes, Direction::kToDevice);
//     done += part.bytes;
//   }
//
// A piece is unregistered only when the arena gives all of its memory back: to unregister, CUDA waits for all
// work of the device (seen with driver 580), so it would hang while a stream waits for the host.
#pragma once
#include <map>
#include <mutex>
#include <shared_mutex>

#include "device/cuda/runtime.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::cuda {

struct PinnedOptions {
  int device = 0;  // made current for CUDA's calls; memory is registered for all devices
  // Bytes registered by one call. A large piece takes longer; small pieces split copies into more parts.
  std::int64_t piece = std::int64_t{256} << 20;
};

struct PinnedReport {
  std::int64_t pieces = 0, bytes = 0;  // registered now
  std::int64_t refused = 0;            // bytes that CUDA refused to register, so far
  double seconds = 0;                  // spent on registering and unregistering, so far
};

// Any thread.
class PinnedRegions {
 public:
  PinnedRegions(Runtime& runtime, PinnedOptions options);  // the runtime must outlive it
  ~PinnedRegions();
  PinnedRegions(const PinnedRegions&) = delete;
  PinnedRegions& operator=(const PinnedRegions&) = delete;

  Arena::Hooks hooks();  // *this must outlive the arena, or the arena must get other hooks before
  void mapped(void* at, std::int64_t bytes);
  void unmapped(void* at, std::int64_t bytes);  // no copy of it is under way

  // The pieces of now.
  using Hold = std::shared_lock<std::shared_mutex>;
  Hold hold() const { return Hold(mutex_); }
  // The longest prefix of these bytes that CUDA copies in one call.
  struct Part {
    std::int64_t bytes = 0;
    bool pinned = false;
  };
  Part part(const Hold& hold, const void* at, std::int64_t bytes) const;

  PinnedReport report() const;

 private:
  using Address = std::int64_t;
  void unregister(Address begin, std::int64_t bytes);
  void refuse(const std::exception& error, std::int64_t bytes);

  Runtime& runtime_;
  const PinnedOptions options_;
  mutable std::shared_mutex mutex_;
  std::map<Address, std::int64_t> pieces_;  // bytes
  std::int64_t bytes_ = 0, refused_ = 0;
  double seconds_ = 0;
  bool warned_ = false;
};

}  // namespace zg::cuda
