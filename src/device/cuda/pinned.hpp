// Pinned host memory: what an arena takes from the system is registered with CUDA, in pieces, by the
// arena's hooks, so that the device can copy from and to it by DMA.
//
// CUDA refuses a copy whose host memory is registered only in part. A buffer of an arena can be so: CUDA
// may have refused to register a piece, and hooks do not see regathered pages. Copies are therefore split,
// as part() says:
//
//   auto hold = pinned.hold();
//   for (std::int64_t done = 0; done < bytes;) {
//     const auto part = pinned.part(hold, host + done, bytes - done);
//     runtime.copy(stream, device + done, host + done, part.bytes, Direction::kToDevice);
//     if (part.pinned) pinned.used(hold, host + done, stream);
//     done += part.bytes;
//   }
//
// A piece is unregistered when the arena gives pages of its chunk back to the system, or is destroyed. The
// device would go on using the old pages, so part() lets no new copy of the piece begin, and unregistering
// waits for the streams that had copies of it. Hence a thread that makes an arena regather, or destroys it,
// must not be one that those streams wait for. (CUDA's documentation does not say whether unregistering
// waits for the whole device.)
#pragma once
#include <condition_variable>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "device/cuda/runtime.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::cuda {

struct PinnedOptions {
  int device = 0;         // made current for CUDA's calls; memory is registered for all devices
  bool required = false;  // a failed registration throws; if not, the first one is logged as a warning
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
  void unmapped(void* at, std::int64_t bytes);

  // Keeps pieces registered until the copy is enqueued. Copies of parts that are not pinned need none.
  using Hold = std::shared_lock<std::shared_mutex>;
  Hold hold() const { return Hold(mutex_); }
  // The longest prefix of these bytes that CUDA copies in one call. It may release the hold while it waits
  // for a piece that is being unregistered: copies of earlier parts must have been enqueued before.
  struct Part {
    std::int64_t bytes = 0;
    bool pinned = false;
  };
  Part part(Hold& hold, const void* at, std::int64_t bytes) const;
  // Notes that a copy of the part at `at` was enqueued on the stream.
  void used(const Hold& hold, const void* at, StreamHandle stream);
  // The stream's work is done, and it will be destroyed.
  void forget(StreamHandle stream);
  // While the lock is held, other threads that unregister pieces are blocked before they wait for a stream.
  std::unique_lock<std::mutex> block_unregistering() { return std::unique_lock(waits_mutex_); }

  PinnedReport report() const;

 private:
  using Address = std::int64_t;
  struct Piece {
    std::int64_t bytes = 0;
    bool going = false;  // is being unregistered
    // Streams that had copies of it. Under a hold users_mutex_ guards them.
    std::vector<StreamHandle> users = {};
  };
  void unregister(Address begin, std::int64_t bytes);
  void refuse(const std::exception& error, std::int64_t bytes);

  Runtime& runtime_;
  const PinnedOptions options_;
  mutable std::shared_mutex mutex_;
  std::mutex users_mutex_;  // locked last of the three
  // Held while pieces are unregistered, so that the streams waited for are not destroyed then. Locked first.
  std::mutex waits_mutex_;
  mutable std::condition_variable_any gone_;
  std::map<Address, Piece> pieces_;
  std::int64_t bytes_ = 0, refused_ = 0;
  double seconds_ = 0;
  bool warned_ = false;
};

}  // namespace zg::cuda
