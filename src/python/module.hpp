// What the parts of the module share: errors, processes that were forked, and calls that wait.
//
// The GIL: every call that can wait for a lock, a lease, a move, a drive or another thread lets go of it
// (gil.hpp). Threads hold the lock of a store for as long as they wait, and ask for the GIL meanwhile, to see
// whether Ctrl-C was pressed: so that lock needs a WithoutGil. No thread asks for the GIL while it holds
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

// Runs call(WithoutGil) without the GIL, with waits that end by Ctrl-C, and when the interpreter ends.
template <class Call>
auto waiting(Call&& call) {
  WithoutGil released;
  InterruptibleWaits interruptible(signal_raised);
  return call(std::as_const(released));
}

// A store's lock: held shared by every call, and exclusively by those that need the store alone, which never
// wait for it. Inside and Alone take it.
class StoreLock {
  friend class Inside;
  friend class Alone;
  std::shared_mutex mutex_;
};

// A store and what Python holds of it. Leases and pins share it, so it outlives them.
struct StoreHandle {
  Owned owned;
  std::unique_ptr<OpenStore> opened;  // null: closed
  std::atomic<bool> closed{false};
  StoreLock lock;
  std::atomic<int> leases{0}, pins{0};
  std::mutex mutex;  // of what follows
  std::map<std::pair<SegmentId, Tier>, int> pinned;
  bool in_step = false;
  std::map<void*, int> readers;  // leases of bytes that cannot be written now
  bool protect_reads = false;    // set once, before others see the store

  // Drops all content and removes the drives' files. With the store alone.
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

// Holds it exclusively; refuses where another thread is inside, so that nobody waits for it.
class Alone {
 public:
  Alone(const WithoutGil&, const std::shared_ptr<StoreHandle>& handle, const char* call);
  // Takes a closed store, too: owns() says whether nobody else is inside.
  Alone(const WithoutGil&, StoreHandle& handle);
  bool owns() const { return lock_.owns_lock(); }
  TensorStore& store() const { return handle_.opened->store(); }

 private:
  StoreHandle& handle_;
  std::unique_lock<std::shared_mutex> lock_;
};

// The types as Python spells them; throws Error(kUsage) that lists them.
DType dtype_named(const std::string& name);
Tier memory_tier_named(const std::string& name);

void bind_store(nb::module_& m);
void bind_lease(nb::module_& m);
void bind_optimizer(nb::module_& m);
void bind_measure(nb::module_& m);

// What nanobind keeps in an object of Python: the store, destroyed without the GIL.
struct Store {
  std::shared_ptr<StoreHandle> handle;

  explicit Store(std::shared_ptr<StoreHandle> opened) : handle(std::move(opened)) {}
  Store(Store&&) = default;
  ~Store() { drop(handle); }
};

// The lease of one segment, as a new object of Python.
nb::object new_lease(std::shared_ptr<StoreHandle> handle, Lease lease, DType dtype, Access access);

}  // namespace zg::python
