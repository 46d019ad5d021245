// A device: memory with a hard budget, streams that run work in order, events, copies, and the op set.
//
// The host device is an implementation on the processor, for machines without a GPU and for tests. Its
// streams are worker threads.
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

// The device's native event that backs an Event (CUDA: a recorded CUDA event). With it, streams of one device
// wait for each other without the host. Owned by the Event that it is attached to.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual void give_back() = 0;  // returns it to its pool; called by any thread, after the Event's last copy
};

// A point in a stream: done when all work enqueued before it is done. Copies refer to the same point. All
// functions may be called from any thread.
class Event {
 public:
  Event() = default;  // is done
  Event(const Event& other) noexcept;
  Event(Event&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  Event& operator=(Event other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Event();
  bool done() const;
  void wait() const;  // blocks the calling thread
  // Runs `action`, which must be short: in the calling thread if the event is done already, else later on the
  // stream's thread.
  void on_done(Task action) const;

  // For implementations of Stream.
  static Event pending();
  void set() const;                       // makes it done
  void attach(DeviceEvent* event) const;  // at most once, before any other thread has this Event
  // Null: none, so only the host learns when the event is done. Valid while this Event is held.
  DeviceEvent* device_event() const;

 private:
  friend class EventPool;
  struct State;
  explicit Event(State* state) : state_(state) {}
  State* state_ = nullptr;  // reference-counted; null: done
};

// Makes pending events. It reuses the memory of events that nobody holds any more, so that the steady state
// allocates nothing, not even in on_done(). Any thread. The pool may be destroyed before its events.
class EventPool {
 public:
  static constexpr std::size_t kMaxKept = 1024;  // unused events; more are freed
  EventPool();
  Event pending();

 private:
  friend class Event;
  struct Free;
  std::shared_ptr<Free> free_;
};

// A queue of work that runs in the order of its submission. Used by one thread at a time.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual const std::string& name() const = 0;
  virtual Event record() = 0;                 // done when all work so far is done
  virtual void wait(const Event& event) = 0;  // work submitted later starts after the event
  // Calls `action` on the stream's thread when all work so far is done. It must be short.
  virtual void callback(Task action) = 0;
  // Returns when all work is done; rethrows the first exception that an operation has thrown.
  virtual void synchronize() = 0;
  // Seconds in which the stream had work, up to now.
  virtual double busy_seconds() const = 0;
  // The part of busy_seconds() in which its work waited for events of other streams.
  virtual double waited_seconds() const { return 0; }
};

// A stream of the host device. Mode kThread: a worker thread runs the work. Mode kInline: the submitting
// thread runs it at once. Callbacks, events, waits, and work whose captures fit into a Task allocate memory
// only when the queue grows longer than ever before.
class HostStream : public Stream {
 public:
  enum class Mode { kThread, kInline };
  HostStream(std::string name, Mode mode, Trace* trace = nullptr);
  ~HostStream() override;

  // `label` is the span's name in the trace. It must outlive the stream: a literal.
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
  std::unique_ptr<Worker> worker_;  // null: mode kInline
};

// The bytes that a buffer is charged against the budget of an arena with this granule: whole granules, at
// least one. Host arenas have a granule of 4096.
std::int64_t arena_charge(std::int64_t bytes, std::int64_t granule = 4096);

// Memory of one tier with a hard budget, in bytes. The memory taken from the system never exceeds the budget.
// An allocation succeeds whenever its charge plus the charges of the buffers in use fit into the budget:
// fragmentation never makes it fail. Released memory is kept for later buffers. Addresses are aligned to the
// granule. Thread-safe.
class Arena {
 public:
  virtual ~Arena() = default;
  // Allocates a buffer of any size; charge() of its size counts against the budget. Null if the budget does
  // not allow it; throws Error(kMemory) if the system refuses memory within the budget.
  virtual void* allocate(std::int64_t bytes) = 0;
  // Like allocate(), but only from memory that the arena already holds. It makes no system call and calls no
  // hook, so it may be called under a lock that a hook waits for. Null if the arena holds no suitable memory,
  // or if the budget does not allow it.
  virtual void* allocate_at_hand(std::int64_t /*bytes*/) { return nullptr; }
  virtual void release(void* data, std::int64_t bytes) = 0;  // bytes: as given to allocate()
  virtual std::int64_t budget() const = 0;
  virtual std::int64_t in_use() const = 0;   // sum of charges
  virtual std::int64_t peak() const = 0;     // the largest in_use() so far
  virtual std::int64_t granule() const = 0;  // the unit of memory
  std::int64_t charge(std::int64_t bytes) const { return arena_charge(bytes, granule()); }
  // mapped(address, bytes): a chunk of memory was just taken from the system. unmapped(address, bytes), with
  // the same values: at least some of that chunk is about to go back to the system, while buffers in it may
  // be in use. `keeps`: whoever registers memory in these hooks cannot unregister it in the middle of a run
  // (CUDA cannot), so unmapped() is called only when no buffer is in use.
  struct Hooks {
    std::function<void(void*, std::int64_t)> mapped, unmapped;
    bool keeps = false;
  };
  // Call only while no buffer is in use. Memory that the arena still keeps is first returned to the system,
  // which the old hooks are told.
  virtual void set_hooks(Hooks hooks) = 0;
};
// A host arena with the default options of make_host_memory() (memory.hpp); throws like it.
std::unique_ptr<Arena> make_host_arena(std::string name, std::int64_t budget);

class Ops;

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string describe() const = 0;
  virtual bool is_host() const = 0;
  virtual int numa_node() const { return -1; }  // the node it is attached to; -1: unknown, or no single node
  // From now on the device's own threads run on these CPUs. An empty list changes nothing.
  virtual void bind_threads(const std::vector<int>& /*cpus*/) {}
  virtual Arena& arena() = 0;
  virtual Ops& ops() = 0;
  virtual std::unique_ptr<Stream> make_stream(const std::string& name) = 0;
  // Enqueues the ops that `work` enqueues. The device may record them under `key` and replay the recording
  // for an equal key, without calling `work` again. So `work` must use only ops of this device on this
  // stream, and for equal keys the same ops with the same operands. One thread at a time.
  virtual void repeat(Stream& /*stream*/, std::span<const std::uint64_t> /*key*/,
                      const std::function<void()>& work) {
    work();
  }
  // Hooks for host arenas whose memory is copied to or from this device (Arena::set_hooks). They pin it.
  virtual Arena::Hooks host_hooks() { return {}; }
  // Direct transfers between drives and this device's memory, for an I/O engine that is destroyed before the
  // device. Null, with the reason in `why`, if they are not available, or if they would go through host
  // memory internally and `wanted` is false. Once a result is not null, later calls return the same one.
  virtual std::shared_ptr<io::DirectStorage> direct_storage(bool /*wanted*/, std::string* why) {
    *why = "drives reach the memory of " + describe() + " as any other";
    return nullptr;
  }
  // Enqueue a copy between host memory and this device's memory. They do not throw; the stream's
  // synchronize() throws their failures.
  virtual void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) = 0;
  virtual void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) = 0;
};

// budget: bytes of host memory that serve as device memory. Throws like make_host_memory().
std::unique_ptr<Device> make_host_device(std::int64_t budget, Trace* trace);

}  // namespace zg
