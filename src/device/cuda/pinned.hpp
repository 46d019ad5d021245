// Host memory that the device can copy from and to by itself: what an arena takes from the system is
// registered with CUDA, in pieces, by the arena's hooks.
//
// CUDA takes a copy's host memory as a whole: all of it registered, or none; a copy of both is refused. An
// arena's buffer can be both (pieces that CUDA would not register; pages that were regathered, which no hook
// sees), so copies are made part by part, as part() says:
//
//   auto hold = pinned.hold();
//   for (std::int64_t done = 0; done < bytes;) {
//     const auto part = pinned.part(hold, host + done, bytes - done);
//     runtime.copy(stream, device + done, host + done, part.bytes, Direction::kToDevice);
//     if (part.pinned) pinned.used(hold, host + done, stream);
//     done += part.bytes;
//   }
//
// While a piece goes (the arena gives pages of its chunk back to the system, or ends), no new copy of it may
// begin, which part() sees to, and those under way must end: the device would go on with the old pages. So
// the streams that had copies of it are waited for. A thread that makes an arena regather, or ends it, must be
// none that these streams wait for; for others it may be. (Whether CUDA itself waits for the whole device when
// memory is unregistered, its documentation does not say.)
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
  int device = 0;         // whose thread state is used; memory is registered for all devices
  bool required = false;  // a registration that fails throws, instead of a warning, once
  // Registered at once. Large ones take longer, small ones make more parts of a copy.
  std::int64_t piece = std::int64_t{256} << 20;
};

struct PinnedReport {
  std::int64_t pieces = 0, bytes = 0;  // registered now
  std::int64_t refused = 0;            // bytes that CUDA would not register, so far
  double seconds = 0;                  // of registering and unregistering, so far
};

// Any thread.
class PinnedRegions {
 public:
  PinnedRegions(Runtime& runtime, PinnedOptions options);  // the runtime must outlive it
  ~PinnedRegions();
  PinnedRegions(const PinnedRegions&) = delete;
  PinnedRegions& operator=(const PinnedRegions&) = delete;

  Arena::Hooks hooks();  // this must outlive the arena, or its hooks must be set anew
  void mapped(void* at, std::int64_t bytes);
  void unmapped(void* at, std::int64_t bytes);

  // What keeps pieces from going until the copy is enqueued. A copy of a part that is not pinned needs none.
  using Hold = std::shared_lock<std::shared_mutex>;
  Hold hold() const { return Hold(mutex_); }
  // The longest beginning of these bytes that CUDA takes as a whole. It may let go of the hold to wait: what
  // was asked for before must have been enqueued.
  struct Part {
    std::int64_t bytes = 0;
    bool pinned = false;
  };
  Part part(Hold& hold, const void* at, std::int64_t bytes) const;
  // A copy of the part that begins at `at` was enqueued there.
  void used(const Hold& hold, const void* at, StreamHandle stream);
  // The stream's work is done, and it goes.
  void forget(StreamHandle stream);
  // While it is held, no stream is waited for, and nothing is unregistered: pieces that go are held up.
  using Quiet = std::unique_lock<std::mutex>;
  Quiet quiet() { return Quiet(waits_mutex_); }

  PinnedReport report() const;

 private:
  using Address = std::int64_t;
  struct Piece {
    std::int64_t bytes = 0;
    bool going = false;
    std::vector<StreamHandle> users = {};  // had copies of it; guarded by users_mutex_, too, under a hold
  };
  void unregister(Address begin, std::int64_t bytes);
  void refuse(const std::exception& error, std::int64_t bytes);

  Runtime& runtime_;
  const PinnedOptions options_;
  mutable std::shared_mutex mutex_;
  std::mutex users_mutex_;  // the last to be taken
  // Held while pieces go: streams that are waited for must not end then. The first to be taken.
  std::mutex waits_mutex_;
  mutable std::condition_variable_any gone_;
  std::map<Address, Piece> pieces_;
  std::int64_t bytes_ = 0, refused_ = 0;
  double seconds_ = 0;
  bool warned_ = false;
};

}  // namespace zg::cuda
