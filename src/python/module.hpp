// Declarations shared by the module's files: stores and their locks, calls that wait, and names of types.
//
// The GIL: every call that can wait for a lock, a lease, a move, a drive or another thread releases it
// (gil.hpp). Threads hold a store's lock while they wait, and ask for the GIL meanwhile, to see whether
// Ctrl-C was pressed; so taking that lock requires a WithoutGil. No thread asks for the GIL while it holds
// another lock of the library.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "python/errors.hpp"
#include "python/gil.hpp"
#include "ziggurat/store/interrupt.hpp"
#include "ziggurat/store/open.hpp"

namespace zg::python {

// Runs call(WithoutGil) without the GIL. Its waits end at Ctrl-C, and when the interpreter ends.
template <class Call>
auto waiting(Call&& call) {
  WithoutGil released;
  InterruptibleWaits interruptible(signal_raised);
  return call(std::as_const(released));
}

// A store's lock. Every call holds it shared; calls that need the store alone hold it exclusively, and never
// wait for it. Inside and Alone take it.
class StoreLock {
  friend class Inside;
  friend class Alone;
  std::shared_mutex mutex_;
};

// A store, with the leases and pins that Python holds. Leases and pins share it, so it outlives them.
struct StoreHandle {
  Owned owned;
  std::unique_ptr<OpenStore> opened;  // null: closed
  std::atomic<bool> closed{false};
  StoreLock lock;
  std::atomic<int> leases{0}, pins{0};
  std::mutex mutex;  // guards the members below
  std::map<std::pair<SegmentId, Tier>, int> pinned;
  bool in_step = false;
  std::map<void*, int> readers;  // read leases by address; their bytes are write-protected
  bool protect_reads = false;    // set once, before others see the store

  // Drops all content and removes the drives' files. Call only while no other call is inside the store.
  void close() {
    closed = true;
    opened.reset();
  }
  ~StoreHandle() {
    if (!owned.here()) (void)opened.release();  // its threads are the parent's, and so are its files
  }
};

// Holds the store's lock shared during a call.
class Inside {
 public:
  Inside(const WithoutGil&, const std::shared_ptr<StoreHandle>& handle);
  TensorStore& store() const { return handle_.opened->store(); }
  StoreHandle& handle() const { return handle_; }
  // Segment `index` of the tensor.
  SegmentId segment(TensorId tensor, std::int32_t index) const;
  const Tensor& tensor(TensorId tensor) const;

 private:
  StoreHandle& handle_;
  std::shared_lock<std::shared_mutex> lock_;
};

// Holds the store's lock exclusively. Refuses if another thread is inside, so that nobody waits for it.
class Alone {
 public:
  Alone(const WithoutGil&, const std::shared_ptr<StoreHandle>& handle, const char* call);
  // Accepts a closed store, too. owns() tells whether the lock was taken, that is, nobody else is inside.
  Alone(const WithoutGil&, StoreHandle& handle);
  bool owns() const { return lock_.owns_lock(); }
  TensorStore& store() const { return handle_.opened->store(); }

 private:
  StoreHandle& handle_;
  std::unique_lock<std::shared_mutex> lock_;
};

// Look up a type or tier by its name in Python; throw Error(kUsage), which lists the names, for another name.
DType dtype_named(const std::string& name);
Tier memory_tier_named(const std::string& name);

void bind_store(nb::module_& m);
void bind_lease(nb::module_& m);
void bind_optimizer(nb::module_& m);
void bind_measure(nb::module_& m);

// The content of the Python object Store, for nanobind. Destroys the store without the GIL.
struct Store {
  std::shared_ptr<StoreHandle> handle;

  explicit Store(std::shared_ptr<StoreHandle> opened) : handle(std::move(opened)) {}
  Store(Store&&) = default;
  ~Store() { drop(handle); }
};

// Makes a Python object for the lease of one segment.
nb::object new_lease(std::shared_ptr<StoreHandle> handle, Lease lease, DType dtype, Access access);

}  // namespace zg::python
