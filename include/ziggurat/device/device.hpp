// A device: memory with a hard budget, streams that run in order, events, copies, and the op set.
//
// The host device is one of them: what people without a GPU, and CI, train on. Its streams are
// worker threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/base/task.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg::io {
class DirectStorage;
}

namespace zg {

// How the streams of one device wait for a point in one of them without the host. It belongs to the event
// that it is attached to, and is given back when nobody holds that any more.
class DeviceMark {
 public:
  virtual ~DeviceMark() = default;
  virtual void give_back() = 0;  // any thread
};

// A point in a stream. Copies share it. Any thread.
class Event {
 public:
  Event() = default;  // already done
  Event(const Event& other) noexcept;
  Event(Event&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  Event& operator=(Event other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Event();
  bool done() const;
  void wait() const;
  // Runs `action` when done: at once if it is, else on the stream's thread. Must be short.
  void on_done(Task action) const;

  // For implementations of Stream.
  static Event pending();
  void set() const;
  void attach(DeviceMark* mark) const;  // once, before anybody else has the event
  DeviceMark* mark() const;             // null: only the host knows when it is done. Valid while this is held

 private:
  friend class EventPool;
  struct State;
  explicit Event(State* state) : state_(state) {}
  State* state_ = nullptr;  // counted
};

// Makes pending events out of those that nobody holds any more: in the steady state nothing is allocated,
// on_done() included. Any thread. It may go before its events.
class EventPool {
 public:
  static constexpr std::size_t kMostKept = 1024;  // not in use; more go back to the heap
  EventPool();
  Event pending();

 private:
  friend class Event;
  struct Free;
  std::shared_ptr<Free> free_;
};

// Work that runs in the order of its submission. Submitted from one thread at a time.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual const std::string& name() const = 0;
  virtual Event record() = 0;
  virtual void wait(const Event& event) = 0;  // later work starts after it
  // Calls `action` when all work so far is done, on the stream's thread. Must be short.
  virtual void callback(Task action) = 0;
  // Returns when all work is done; throws what an operation threw.
  virtual void synchronize() = 0;
  // Time this stream spent working, so far, with what it works on now.
  virtual double busy_seconds() const = 0;
};

// A stream of the host device: a worker thread; or none, and then work runs when it is submitted. Once as
// much as now has been under way before, it allocates nothing for work whose captures fit into a Task, nor
// for callbacks, events and waits.
class HostStream : public Stream {
 public:
  enum class Mode { kThread, kInline };
  HostStream(std::string name, Mode mode, Trace* trace = nullptr);
  ~HostStream() override;

  // `label` must outlive the stream (a literal): it is the span's name in the trace.
  void enqueue(const char* label, Task work);

  const std::string& name() const override { return name_; }
  Event record() override;
  void wait(const Event& event) override;
  void callback(Task action) override;
  void synchronize() override;
  double busy_seconds() const override;

 private:
  struct Worker;
  std::string name_;
  std::unique_ptr<Worker> worker_;  // null: inline
};

// Memory of one tier with a hard budget: what is taken from the system never passes it, and whatever sum of
// charges it allows can be had. What is released is kept and used again. Addresses are aligned to the
// granule. Thread-safe. allocate returns null when the budget does not allow it, and throws Error(kMemory)
// when the system refuses memory within the budget.
class Arena {
 public:
  virtual ~Arena() = default;
  virtual void* allocate(std::int64_t bytes) = 0;  // bytes: any; charged as charge() says
  // The same from memory that the arena holds already: without a system call and without hooks, so that it
  // may be called under locks that hooks want. Null: there is none at hand, or no budget.
  virtual void* allocate_at_hand(std::int64_t /*bytes*/) { return nullptr; }
  virtual void release(void* data, std::int64_t bytes) = 0;
  virtual std::int64_t budget() const = 0;
  virtual std::int64_t in_use() const = 0;
  virtual std::int64_t peak() const = 0;  // of bytes in use
  // What memory comes in, and what an allocation counts against the budget: so many whole granules, at least
  // one.
  virtual std::int64_t granule() const = 0;
  std::int64_t charge(std::int64_t bytes) const {
    return bytes <= granule() ? granule() : (bytes + granule() - 1) / granule() * granule();
  }
  // Called with memory that was just taken from, or of which a part at least is about to go back to, the
  // system. Buffers in it may be in use.
  struct Hooks {
    std::function<void(void*, std::int64_t)> mapped, unmapped;
  };
  // Called only while nothing is in use; what was kept goes back to the system first, through the old hooks.
  virtual void set_hooks(Hooks hooks) = 0;
};
// make_host_memory() of memory.hpp with nothing but these; throws as it does.
std::unique_ptr<Arena> make_host_arena(std::string name, std::int64_t budget);
// charge() of an arena with this granule; every host arena has pages of 4096.
std::int64_t arena_charge(std::int64_t bytes, std::int64_t granule = 4096);

class Ops;

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string describe() const = 0;
  virtual bool is_host() const = 0;
  virtual int numa_node() const { return -1; }  // that it is attached to; -1: unknown, or all
  // Its own threads run there from now on; empty: anywhere.
  virtual void bind_threads(const std::vector<int>& /*cpus*/) {}
  virtual Arena& arena() = 0;
  virtual Ops& ops() = 0;
  virtual std::unique_ptr<Stream> make_stream(const std::string& name) = 0;
  // Enqueues on `stream` what `work` does: ops of this device on that stream alone, and whenever the key is
  // the same, the same ones with the same operands. So a device may keep them, and enqueue them as a whole
  // from then on without calling `work`. One thread at a time.
  virtual void repeat(Stream& /*stream*/, std::span<const std::uint64_t> /*key*/,
                      const std::function<void()>& work) {
    work();
  }
  // What host memory that is copied from and to should be told of (HostMemory::set_hooks): it is pinned.
  virtual Arena::Hooks host_hooks() { return {}; }
  // What moves bytes between drives and this device's memory without the host's, for an I/O engine that is
  // gone before the device. Null, and `why` says why not: there is none, or one that passes through the
  // host's memory itself, unless it is `wanted` all the same. The first answer that is not null stays.
  virtual std::shared_ptr<io::DirectStorage> direct_storage(bool /*wanted*/, std::string* why) {
    *why = "drives reach the memory of " + describe() + " as any other";
    return nullptr;
  }
  // Copies between host memory and this device's, in order on `stream`. They do not throw: synchronize()
  // does.
  virtual void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) = 0;
  virtual void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) = 0;
};

std::unique_ptr<Device> make_host_device(std::int64_t budget, Trace* trace);

}  // namespace zg
