// The interface of a CUDA device, beyond Device, that communication between GPUs needs: streams for a
// library's work, and the device's state. A CUDA device is also a CudaAccess (dynamic_cast).
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>

#include "ziggurat/base/dtype.hpp"

struct CUstream_st;

namespace zg {

// A CUDA stream for work that is enqueued by a library, or by one of the functions below. Used by one thread
// at a time, after CudaAccess::use(). Throws Error(kDevice) if CUDA refuses a call.
class CudaQueue {
 public:
  virtual ~CudaQueue() = default;  // waits until its work is done
  virtual CUstream_st* handle() const = 0;
  virtual void copy(void* to, const void* from, std::int64_t bytes) = 0;  // both on this device
  virtual void copy_from(int device, void* to, const void* from, std::int64_t bytes) = 0;
  // out [count] = the sum or the maximum of the operands in their order, as in kernels/cuda/reduce.hpp.
  virtual void reduce(std::span<const void* const> operands, void* out, std::int64_t count, DType dtype,
                      bool maximum) = 0;
  virtual void mark() = 0;     // marks the end of the work so far
  virtual bool reached() = 0;  // whether the work before the last mark() is done
};

class CudaAccess {
 public:
  virtual ~CudaAccess() = default;
  virtual int index() const = 0;  // CUDA's index of the device
  virtual void use() = 0;         // makes it the calling thread's current device
  virtual std::unique_ptr<CudaQueue> make_queue() = 0;
  // Marks the device as failed: its streams' synchronize() throws `cause`, and work that is enqueued later is
  // dropped. Work in progress must end by itself.
  virtual void fail(std::exception_ptr cause) = 0;
  virtual void check() const = 0;  // rethrows the device's failure, if it has failed
  // Returns a lock; while it is held, no stream of the device waits for the host, so that a library may load
  // kernels and take memory. First waits for every event that a stream is waiting for.
  virtual std::unique_lock<std::shared_mutex> quiet() = 0;
};

}  // namespace zg
