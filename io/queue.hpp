// The seam between the engine and what moves blocks: one Queue per lane, of which a drive has one or several.
//
// Threads: a queue is made and used by its lane's I/O thread, and ended after that thread; only wake()
// may be called from elsewhere, and features() once it is made. (io_uring's fastest mode allows one
// submitting task, so registrations come that way too.) Ownership: the engine owns the queue; a block's
// memory stays valid until the block is done. Invariant: every block begun comes out of reap() exactly once;
// at most `depth` blocks, with distinct ids below `depth`, are in the queue at a time. Blocks are aligned in
// all respects.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io {

// For tables with one entry for reads and one for writes.
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

  // May keep the block back until the next reap().
  virtual void begin(const Block& block) = 0;
  // Appends what is done. Waits for at least one block, a wake() (also one that came before), or the
  // deadline; may return early with nothing.
  virtual void reap(std::vector<BlockDone>& done, Clock::time_point deadline) = 0;
  virtual void wake() = 0;

  // Why the memory could not be registered; empty when it was, or when this queue has no use for it.
  virtual std::string register_memory(void* /*data*/, std::int64_t /*bytes*/) { return {}; }
  virtual void unregister_memory(void* /*data*/) {}
  // The I/O thread's last call, with nothing in flight: lets go of the file and of registered memory at once,
  // where destruction alone would leave that to the kernel's leisure. wake() may still come.
  virtual void end() {}
  // Fixed after construction: "registered file", "4 threads".
  virtual std::string features() const = 0;
};

// Each throws Error(kIo) when the system does not give what it needs.
struct UringOptions {
  bool registered = true, sqpoll = false, iopoll = false;  // as in EngineOptions
  bool require = false;                                    // sqpoll and iopoll: fail instead of doing without
  bool spin = false;  // for tests: waits as iopoll must, on a ring that is none
};
std::unique_ptr<Queue> make_uring_queue(int fd, int depth, const UringOptions& options);
std::unique_ptr<Queue> make_aio_queue(int fd, int depth);
std::unique_ptr<Queue> make_thread_queue(int fd, int depth, int threads, const std::string& thread_name);
// The file outlives it, and so does the storage, which this thread enters, too. One thread for each block of the
// depth.
std::unique_ptr<Queue> make_direct_queue(DirectStorage& storage, DirectStorage::File& file, int depth,
                                         const std::string& thread_name);
std::unique_ptr<Queue> make_ram_queue(std::int64_t bytes, int depth, const RamModel& model);
// Faults on top of any queue of this drive; `queue` keeps the random numbers of several apart.
std::unique_ptr<Queue> make_fault_queue(std::unique_ptr<Queue> inner, int depth, const FaultModel& model,
                                        int drive, int queue);
bool injects_anything(const FaultModel& model);

}  // namespace zg::io
