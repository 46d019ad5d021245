// State shared by GPU ranks: NcclWorld by all ranks of a process, NcclGroup by the members of a group, and
// ExchangeReserve by the communicators of one rank. Threads of all ranks use it; a mutex in each struct
// guards the members that change.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/domain.hpp"
#include "comm/host_ranks.hpp"
#include "comm/nccl.hpp"
#include "comm/nccl_ranks.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda_access.hpp"

namespace zg::comm {

inline constexpr std::int64_t kAlignment = 256;                // of chunks in staging memory, in bytes
inline constexpr std::chrono::microseconds kPollInterval{20};  // between two checks whether a call is done

inline CudaAccess& access_of(Device& device) {
  auto* const access = dynamic_cast<CudaAccess*>(&device);
  ZG_ASSERT(access != nullptr, "{} is no CUDA device", device.describe());
  return *access;
}

// The state that the members of one group share.
struct NcclGroup {
  NcclGroup(std::vector<int> members, const std::string& name, const std::shared_ptr<Failure>& f,
            std::function<void()> l, std::shared_ptr<Nccl> n, std::vector<CudaAccess*> a, double timeout)
      : failure(f),
        listen(std::move(l)),
        meeting(std::move(members), name, *failure, timeout),
        nccl(std::move(n)),
        gpus(std::move(a)),
        comms(gpus.size()) {}
  // Runs when the last member is gone, so no member has work any more.
  ~NcclGroup() {
    try {
      failure->rethrow();
      each([this](NcclComm comm, std::size_t) { nccl->finalize(comm); }, true);
      each([this](NcclComm comm, std::size_t) {
        for (; !nccl->settled(comm); std::this_thread::sleep_for(kPollInterval)) listen(), failure->rethrow();
      });
      each([this](NcclComm comm, std::size_t) { nccl->destroy(comm); });
    } catch (const Error& error) {
      failure->set(0, error);
      abort();
    }
  }
  NcclId identity() {
    std::lock_guard lock(mutex);
    if (!id) id = nccl->make_id();
    return *id;
  }
  void abort(std::size_t member) {
    if (const NcclComm comm = std::exchange(comms[member], nullptr); comm != nullptr) nccl->abort(comm);
  }

  const std::shared_ptr<Failure> failure;
  const std::function<void()> listen;  // checks for failures of other processes
  Meeting meeting;
  const std::shared_ptr<Nccl> nccl;
  const std::vector<CudaAccess*> gpus;  // by member; null: the member is in another process
  std::vector<NcclComm> comms;          // by member, each used by that member's lane; null: not made

 private:
  void abort() {
    for (std::size_t m = 0; m < comms.size(); ++m) abort(m);
  }
  template <class Action>
  void each(const Action& action, bool together = false) {
    if (std::none_of(comms.begin(), comms.end(), [](NcclComm comm) { return comm != nullptr; })) return;
    if (together) nccl->begin_group();
    for (std::size_t m = 0; m < comms.size(); ++m) {
      if (comms[m] == nullptr) continue;
      gpus[m]->use();
      action(comms[m], m);
    }
    if (together) nccl->end_group();
  }

  std::mutex mutex;
  std::optional<NcclId> id;  // guarded by mutex
};

// Memory of a rank's arena that is reserved for its communicators. It is taken before the store fills the
// rest of the arena.
class ExchangeReserve {
 public:
  ExchangeReserve(Device& device, int ranks, std::int64_t staging_bytes)
      : connecting_(device.arena(), ranks > 1 ? 2 * ranks * kAlignment : 0),
        staging_(device.arena(), ranks > 1 ? staging_bytes : 0) {}

  // Buffers for the communicator that is connecting; only one at a time connects on a GPU.
  char* connecting() const { return static_cast<char*>(connecting_.data); }
  // Staging memory for the first communicator that reduces, which later releases it to the arena; null for
  // all other communicators.
  void* take_staging() {
    std::lock_guard lock(mutex_);
    return std::exchange(staging_.data, nullptr);
  }

 private:
  struct Memory {
    Memory(Arena& a, std::int64_t n) : arena(a), bytes(n) {
      if (bytes > 0) data = arena.allocate(bytes);
      if (bytes == 0 || data != nullptr) return;
      throw Error(Errc::kMemory, "device tier",
                  fmt::format("no room for the {} in which ranks exchange", format_bytes(bytes)),
                  "raise tiers.device");
    }
    ~Memory() {
      if (data != nullptr) arena.release(data, bytes);
    }
    Memory(const Memory&) = delete;
    Arena& arena;
    const std::int64_t bytes;
    void* data = nullptr;
  };

  Memory connecting_, staging_;
  std::mutex mutex_;
};

// The state that the ranks of this process share: devices, NCCL, the wire to other processes, and all groups.
struct NcclWorld {
  const GpuCommOptions options;
  const std::shared_ptr<Nccl> nccl;
  const std::shared_ptr<Failure> failure;
  const std::vector<Device*> devices;                    // by rank of this process
  const std::vector<std::unique_ptr<CommRank>> on_host;  // the same ranks' host ends, for host streams
  const std::vector<std::unique_ptr<ExchangeReserve>> reserves;  // by rank of this process
  Wire* const wire;                                              // the wire of on_host; null: one process

  // The rank's index in the vectors of this process's ranks; out of range for a rank of another process.
  std::size_t local(int rank) const { return static_cast<std::size_t>(rank - on_host.front()->rank()); }
  bool is_here(int rank) const { return local(rank) < devices.size(); }
  // Reports the failure of a rank of this process. Only the first failure of any rank counts.
  void fail(int rank, const Error& error) { on_host[local(rank)]->fail(error); }
  // Checks for failures of other processes.
  void listen() {
    if (wire == nullptr) return;
    if (const auto heard = wire->heard_failure()) failure->set(heard->first, heard->second);
  }

  // The rank's n-th group with these members. Each member counts its own calls, so the n-th calls of all
  // members return the same group.
  std::shared_ptr<NcclGroup> group(const std::vector<int>& members, const std::string& name, int rank) {
    std::lock_guard lock(mutex);
    std::vector<std::weak_ptr<NcclGroup>>& made = groups[members];
    const std::size_t n = joined[{members, rank}]++;
    if (n == made.size()) made.emplace_back();
    std::shared_ptr<NcclGroup> group = made[n].lock();
    if (group != nullptr) return group;
    std::vector<CudaAccess*> gpus;
    for (const int m : members) gpus.push_back(is_here(m) ? &access_of(*devices[local(m)]) : nullptr);
    made[n] = group = std::make_shared<NcclGroup>(
        members, name, failure, [this] { listen(); }, nccl, std::move(gpus), options.timeout_seconds);
    return group;
  }

  std::mutex mutex;  // guards what follows
  std::map<std::vector<int>, std::vector<std::weak_ptr<NcclGroup>>> groups;
  std::map<std::pair<std::vector<int>, int>, std::size_t> joined;
};

}  // namespace zg::comm
