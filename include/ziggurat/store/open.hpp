// A store with all that it stands on, from one description: for programs that embed it.
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
// Threads: those of TensorStore. What goes by name looks the name up in the store's table, so it too is only
// called while no other thread adds or removes tensors.
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
  std::int64_t host_bytes = 0;    // budget of host memory, of which a device needs some too
  // A directory on each drive, and the size of the file that is preallocated there (only an existing file's
  // may be 0). Several share what is written by their bandwidth, so each should have more than its equal
  // part. None: no NVMe tier.
  std::vector<io::DriveOptions> drives = {};
  io::EngineOptions aio = io::EngineOptions();  // how the drives are used; without a trace: that of below
  std::string policy = "next-use";              // see policy_by_name()
  PolicyFactory own_policy = {};                // instead of one by name
  std::int64_t read_ahead = 0;                  // as in TensorStore::Options, here and below
  bool verify = true;
  std::vector<double> drive_shares = {};
  double warn_after_seconds = 5;
  bool write_ahead = true;
  bool record = false;
  Trace* trace = nullptr;  // of everything here; outlives the store
};

// Owns the parts, and ends them in the right order. The store's rules hold for its destructor: leases and
// pins must be gone. What the tensors hold is gone with it.
class OpenStore {
 public:
  OpenStore(const OpenStore&) = delete;
  OpenStore& operator=(const OpenStore&) = delete;

  TensorStore& store() { return *store_; }
  const TensorStore& store() const { return *store_; }
  Device& device() { return *device_; }
  Arena& host() { return *host_; }
  io::Engine* io() { return io_.get(); }  // null: no NVMe tier

  // Segment `index` of the tensor of this name. Throws Error(kUsage) where there is none.
  SegmentId segment(const std::string& name, std::int32_t index) const;
  std::int32_t segment_count(const std::string& name) const;
  // TensorStore::acquire() of that segment, with its waits and errors.
  Lease acquire(const std::string& name, std::int32_t index, Tier tier, Access access,
                Stream* consumer = nullptr);

 private:
  friend std::unique_ptr<OpenStore> open_store(const StoreConfig& config);
  OpenStore() = default;
  TensorId tensor(const std::string& name) const;

  // The last goes first: nothing is gone that another still uses.
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<TensorStore> store_;
};

// Throws Error(kUsage) that names the field for a description that makes no sense, and what make_engine()
// throws for drives that cannot be used. Nothing is left behind then.
std::unique_ptr<OpenStore> open_store(const StoreConfig& config);

}  // namespace zg
