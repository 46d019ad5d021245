// A store with its device, host arena and drives, made from one description: for programs that embed it.
//
//   auto opened = zg::open_store({.device_bytes = 64 << 20,
//                                 .host_bytes = 1 << 30,
//                                 .drives = {{.path = "/mnt/nvme0", .bytes = 64ll << 30}}});
//   zg::TensorStore& store = opened->store();
//   store.add({.name = "w", .count = 1 << 20});
//   zg::Lease lease = opened->acquire("w", 0, zg::Tier::kHost, zg::Access::kOverwrite);
//
// tools/examples/store_stream.cpp is a whole program; ziggurat.h offers the same to C.
//
// Threads: the rules of TensorStore hold. The functions that take a name look it up in the store's table, so
// they too may only be called while no other thread adds or removes tensors.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/io/engine.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

// Sizes are bytes.
struct StoreConfig {
  std::int64_t device_bytes = 0;  // budget of device memory; 0: none, tensors are acquired at the host alone
  // Budget of host memory. Device tensors need some of it too: their bytes pass through the host.
  std::int64_t host_bytes = 0;
  // A directory on each drive, and the size of the file that is preallocated there (0 is allowed for an
  // existing file). Writes are spread over several drives by bandwidth, so a drive may get more than its
  // equal share, and its file should have room for that. Empty: no NVMe tier.
  std::vector<io::DriveOptions> drives = {};
  io::EngineOptions aio = io::EngineOptions();  // how the drives are used; its trace, if null, is `trace`
  std::string policy = "next-use";              // see policy_by_name()
  PolicyFactory own_policy = {};                // used instead of `policy`, unless empty
  std::int64_t read_ahead = 0;                  // this and the next ones as in TensorStore::Options
  bool verify = true;
  std::vector<double> drive_shares = {};
  double warn_after_seconds = 5;
  bool write_ahead = true;
  bool record = false;
  Trace* trace = nullptr;  // for store, device and drives; outlives them
};

// Owns the store and its parts, and destroys them in the right order. As for TensorStore, leases and pins
// must be gone before. The tensors' content is lost.
class OpenStore {
 public:
  OpenStore(const OpenStore&) = delete;
  OpenStore& operator=(const OpenStore&) = delete;

  TensorStore& store() { return *store_; }
  const TensorStore& store() const { return *store_; }
  Device& device() { return *device_; }
  Arena& host() { return *host_; }
  io::Engine* io() { return io_.get(); }  // null: no NVMe tier

  // Segment `index` of the tensor `name`. Throws Error(kUsage) where there is none.
  SegmentId segment(const std::string& name, std::int32_t index) const;
  std::int32_t segment_count(const std::string& name) const;
  // TensorStore::acquire() of this segment, with its waits and errors.
  Lease acquire(const std::string& name, std::int32_t index, Tier tier, Access access,
                Stream* consumer = nullptr);

 private:
  friend std::unique_ptr<OpenStore> open_store(const StoreConfig& config);
  OpenStore() = default;
  TensorId tensor(const std::string& name) const;

  // Destroyed from the last to the first, since each may use those above it.
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<TensorStore> store_;
};

// Throws Error(kUsage) that names the field for a description that makes no sense, and the errors of
// io::make_engine() for drives that cannot be used. After an error nothing is left behind.
std::unique_ptr<OpenStore> open_store(const StoreConfig& config);

}  // namespace zg
