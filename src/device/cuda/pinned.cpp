#include "device/cuda/pinned.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>

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
          [this](void* at, std::int64_t bytes) { unmapped(at, bytes); }};
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
      pieces_[begin + done] = {.bytes = n};
      bytes_ += n;
      done += n;
    }
  } catch (const Error& error) {
    if (options_.required) {
      unregister(begin, done);
      throw Error(
          error.code(), error.where(),
          fmt::format("{} of host memory could not be pinned: {}", format_bytes(bytes), error.message()),
          "lower the host tier's budget, free memory, or do without pinned memory");
    }
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
  std::vector<std::pair<Address, std::int64_t>> going;
  double seconds = 0;
  {
    std::lock_guard waits(waits_mutex_);
    std::set<StreamHandle> users;
    {
      std::lock_guard lock(mutex_);
      for (auto it = pieces_.lower_bound(begin); it != pieces_.end() && it->first - begin < bytes; ++it) {
        if (std::exchange(it->second.going, true)) continue;
        going.emplace_back(it->first, it->second.bytes);
        users.insert(it->second.users.begin(), it->second.users.end());
      }
    }
    if (going.empty()) return;
    try {
      runtime_.use_device(options_.device);
      for (const StreamHandle stream : users) runtime_.synchronize(stream);
    } catch (const Error& error) {  // the device has failed, and copies nothing any more
      log::debug("unregistering host memory: {}", error.what());
    }
    const Stopwatch stopwatch(seconds);
    for (const auto& [at, n] : going) runtime_.unregister_host(pointer(at));
  }
  {
    std::lock_guard lock(mutex_);
    for (const auto& [at, n] : going) {
      pieces_.erase(at);
      bytes_ -= n;
    }
    seconds_ += seconds;
  }
  gone_.notify_all();
}

PinnedRegions::Part PinnedRegions::part(Hold& hold, const void* at, std::int64_t bytes) const {
  ZG_ASSERT(hold.owns_lock() && hold.mutex() == &mutex_, "without its hold");
  const Address begin = address(at);
  while (true) {
    auto it = pieces_.upper_bound(begin);
    if (it == pieces_.begin() || std::prev(it)->first + std::prev(it)->second.bytes <= begin) {
      const std::int64_t before = it == pieces_.end() ? bytes : std::min(bytes, it->first - begin);
      return {before, false};
    }
    --it;
    if (!it->second.going) return {std::min(bytes, it->first + it->second.bytes - begin), true};
    gone_.wait(hold);
  }
}

void PinnedRegions::used(const Hold& hold, const void* at, StreamHandle stream) {
  ZG_ASSERT(hold.owns_lock() && hold.mutex() == &mutex_, "without its hold");
  auto it = pieces_.upper_bound(address(at));
  ZG_ASSERT(it != pieces_.begin(), "memory that is not pinned");
  std::vector<StreamHandle>& users = std::prev(it)->second.users;
  std::lock_guard lock(users_mutex_);
  if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

void PinnedRegions::forget(StreamHandle stream) {
  std::lock_guard waits(waits_mutex_);
  std::lock_guard lock(mutex_);
  for (auto& [at, piece] : pieces_)
    piece.users.erase(std::remove(piece.users.begin(), piece.users.end(), stream), piece.users.end());
}

PinnedReport PinnedRegions::report() const {
  std::lock_guard lock(mutex_);
  return {static_cast<std::int64_t>(pieces_.size()), bytes_, refused_, seconds_};
}

}  // namespace zg::cuda
