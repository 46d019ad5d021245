// The interface between the engine and a back end: one Queue per lane.
//
// Threads: the lane's I/O thread makes and uses the queue, registrations included, since io_uring's fastest
// mode allows only one submitting thread. Other threads may call only wake(), and features() once the queue
// is made; it is destroyed after the I/O thread has ended.
// Ownership: the engine owns the queue; a block's memory stays valid until the block is done.
// Invariant: reap() returns every block that was begun exactly once. At most `depth` blocks are in the queue
// at a time, with distinct ids below `depth`. Offsets, sizes and addresses are multiples of
// Engine::alignment().
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io {

// Index in tables with one entry for reads and one for writes.
inline int index_of(Op op) {
  return op == Op::kRead ? 0 : 1;
}

struct Block {
  Op op = Op::kRead;
  std::uint32_t id = 0;
  std::int64_t offset = 0;
  char* data = nullptr;
  std::int64_t bytes = 0;
};

struct BlockDone {
  std::uint32_t id = 0;
  std::int64_t result = 0;  // bytes moved, or a negative errno
};

class Queue {
 public:
  virtual ~Queue() = default;

  static constexpr Clock::time_point kNoWait = Clock::time_point::min();
  static constexpr Clock::time_point kForever = Clock::time_point::max();

  // Begins a block, at the latest in the next reap().
  virtual void begin(const Block& block) = 0;
  // Appends the blocks that are done. Waits until there is at least one, for a wake() (also one that came
  // before), or until the deadline; may return earlier with nothing.
  virtual void reap(std::vector<BlockDone>& done, Clock::time_point deadline) = 0;
  virtual void wake() = 0;

  // Why the memory could not be registered; empty when it was, or when this queue has no use for it.
  virtual std::string register_memory(void* /*data*/, std::int64_t /*bytes*/) { return {}; }
  virtual void unregister_memory(void* /*data*/) {}
  // The I/O thread's last call, with no block in flight. Releases the file and registered memory at once;
  // without it the kernel might do that some time after the destructor. wake() may still be called.
  virtual void end() {}
  // For describe(): "registered file", "4 threads". Constant once the queue is made.
  virtual std::string features() const = 0;
};

// These throw Error(kIo) when the system refuses what they need.
struct UringOptions {
  bool registered = true, sqpoll = false, iopoll = false;  // as in EngineOptions
  bool require = false;                                    // throw where sqpoll or iopoll does not work
  bool spin = false;  // for tests: wait by spinning, as with iopoll, on a ring that is not polled
};
std::unique_ptr<Queue> make_uring_queue(int fd, int depth, const UringOptions& options);
std::unique_ptr<Queue> make_aio_queue(int fd, int depth);
std::unique_ptr<Queue> make_thread_queue(int fd, int depth, int threads, const std::string& thread_name);
// With one thread for each block of the depth. The calling thread enters `storage` as well. Storage and file
// must outlive the queue.
std::unique_ptr<Queue> make_direct_queue(DirectStorage& storage, DirectStorage::File& file, int depth,
                                         const std::string& thread_name);
std::unique_ptr<Queue> make_ram_queue(std::int64_t bytes, int depth, const RamModel& model);
// Injects faults into `inner`. Each drive and queue number has random numbers of its own.
std::unique_ptr<Queue> make_fault_queue(std::unique_ptr<Queue> inner, int depth, const FaultModel& model,
                                        int drive, int queue);
bool injects_anything(const FaultModel& model);

}  // namespace zg::io
