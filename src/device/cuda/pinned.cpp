#include "device/cuda/pinned.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cuda {
namespace {

std::int64_t address(const void* at) {
  return reinterpret_cast<std::int64_t>(at);
}
void* pointer(std::int64_t at) {
  return reinterpret_cast<void*>(at);
}

// Adds its lifetime to `seconds`.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

PinnedRegions::PinnedRegions(Runtime& runtime, PinnedOptions options)
    : runtime_(runtime), options_(std::move(options)) {
  ZG_ASSERT(options_.piece > 0 && options_.piece % 4096 == 0, "pieces of {}", options_.piece);
}

PinnedRegions::~PinnedRegions() {
  unregister(0, std::numeric_limits<std::int64_t>::max());
}

Arena::Hooks PinnedRegions::hooks() {
  return {[this](void* at, std::int64_t bytes) { mapped(at, bytes); },
          [this](void* at, std::int64_t bytes) { unmapped(at, bytes); }, true};
}

void PinnedRegions::mapped(void* at, std::int64_t bytes) {
  const Address begin = address(at);
  double seconds = 0;
  std::int64_t done = 0;
  try {
    const Stopwatch stopwatch(seconds);
    runtime_.use_device(options_.device);
    while (done < bytes) {
      const std::int64_t n = std::min(options_.piece, bytes - done);
      runtime_.register_host(pointer(begin + done), n);
      std::lock_guard lock(mutex_);
      pieces_[begin + done] = n;
      bytes_ += n;
      done += n;
    }
  } catch (const Error& error) {
    refuse(error, bytes - done);
  }
  std::lock_guard lock(mutex_);
  seconds_ += seconds;
}

void PinnedRegions::refuse(const std::exception& error, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  refused_ += bytes;
  if (std::exchange(warned_, true)) return;
  log::warning("{} of host memory could not be pinned; copies of it are slower, and make the host wait: {}",
               format_bytes(bytes), error.what());
}

void PinnedRegions::unmapped(void* at, std::int64_t bytes) {
  unregister(address(at), bytes);
}

void PinnedRegions::unregister(Address begin, std::int64_t bytes) {
  // Releases the lock before it calls CUDA. CUDA waits for all work of the device here, and this work may
  // wait for a copy of other memory, which needs the lock.
  std::map<Address, std::int64_t> gone;
  {
    std::lock_guard lock(mutex_);
    for (auto it = pieces_.lower_bound(begin); it != pieces_.end() && it->first - begin < bytes;) {
      bytes_ -= it->second;
      gone.insert(pieces_.extract(it++));
    }
  }
  if (gone.empty()) return;
  double seconds = 0;
  {
    const Stopwatch stopwatch(seconds);
    try {
      runtime_.use_device(options_.device);
    } catch (const Error& error) {  // the device has failed
      log::debug("unregistering host memory: {}", error.what());
    }
    for (const auto& [at, size] : gone) runtime_.unregister_host(pointer(at));
  }
  std::lock_guard lock(mutex_);
  seconds_ += seconds;
}

PinnedRegions::Part PinnedRegions::part(const Hold& hold, const void* at, std::int64_t bytes) const {
  ZG_ASSERT(hold.owns_lock() && hold.mutex() == &mutex_, "without its hold");
  const Address begin = address(at);
  const auto next = pieces_.upper_bound(begin);
  if (next != pieces_.begin()) {
    const auto& [piece, size] = *std::prev(next);
    if (begin < piece + size) return {std::min(bytes, piece + size - begin), true};
  }
  return {next == pieces_.end() ? bytes : std::min(bytes, next->first - begin), false};
}

PinnedReport PinnedRegions::report() const {
  std::lock_guard lock(mutex_);
  return {static_cast<std::int64_t>(pieces_.size()), bytes_, refused_, seconds_};
}

}  // namespace zg::cuda
