// The interface of our logic to the CUDA libraries: exactly the CUDA calls that the device needs.
// runtime_cuda.cpp implements it with the CUDA runtime and driver; the tests implement it with a recording
// fake that runs everything asynchronously on the host and detects misuse.
//
// Calls may come from any thread and act on the thread's current device (use_device()). If CUDA refuses a
// call it throws Error(kDevice) with CUDA's message; an allocation that does not fit throws Error(kMemory).
// Functions that only free something (destroy_*, release_*, free_addresses, unregister_host) do not throw:
// they log what CUDA refuses, and may be called after the device has failed.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;

namespace zg::cuda {

using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using GraphHandle = CUgraphExec_st*;
using PhysicalHandle = unsigned long long;  // physical device memory, which has no address by itself

struct DeviceInfo {
  std::string name = {};     // "NVIDIA H100 80GB HBM3"
  std::string pci = {};      // "0000:1b:00.0"
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int numa_node = -1;        // -1: unknown
  std::int64_t memory = 0;   // bytes
  std::int64_t granule = 0;  // sizes and addresses of physical memory are multiples of this
  int copy_engines = 0;
  bool wait_values = false;  // streams may wait for a word of host memory
  std::string why_no_wait_values = {};
};

struct MemoryInfo {
  std::int64_t free = 0, total = 0;
};

enum class Direction { kToDevice, kToHost, kOnDevice };

class Runtime {
 public:
  virtual ~Runtime() = default;

  // CUDA versions; 13000 is 13.0. driver_version: the newest that the driver supports; 0 without a driver.
  virtual int driver_version() = 0;
  virtual int runtime_version() = 0;
  virtual int device_count() = 0;
  virtual DeviceInfo device_info(int device) = 0;
  virtual void use_device(int device) = 0;  // makes it the calling thread's current device
  virtual MemoryInfo memory_info() = 0;

  // urgent: the highest priority; else the lowest.
  virtual StreamHandle create_stream(bool urgent) = 0;
  virtual void destroy_stream(StreamHandle stream) = 0;  // all its work must be done
  virtual EventHandle create_event() = 0;                // without timing
  virtual void destroy_event(EventHandle event) = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // Whether all work before the record is done. Throws the error of that work, if it failed.
  virtual bool query(EventHandle event) = 0;
  // Returns when all work enqueued on the device, or on one stream, is done; throws its error, if it failed.
  virtual void synchronize() = 0;
  virtual void synchronize(StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  // The stream waits until the word, in memory of allocate_host(), has this value.
  virtual void wait_value(StreamHandle stream, const std::uint32_t* word, std::uint32_t value) = 0;

  // In order on the stream. If the host memory is not registered, the call returns after the copy. Host
  // memory that is registered only in part is refused.
  virtual void copy(StreamHandle stream, void* to, const void* from, std::int64_t bytes,
                    Direction direction) = 0;
  virtual void copy_peer(StreamHandle stream, void* to, int to_device, const void* from, int from_device,
                         std::int64_t bytes) = 0;
  virtual void fill(StreamHandle stream, void* at, int byte, std::int64_t bytes) = 0;
  // Fills a matrix: rows of `width` bytes that start `pitch` bytes apart.
  virtual void fill_rows(StreamHandle stream, void* at, std::int64_t pitch, int byte, std::int64_t width,
                         std::int64_t rows) = 0;

  // Device memory in granules: physical memory, addresses, and mappings between them. Sizes are multiples
  // of the granule.
  virtual PhysicalHandle create_physical(std::int64_t bytes) = 0;
  virtual void release_physical(PhysicalHandle physical) = 0;
  virtual void* reserve_addresses(std::int64_t bytes) = 0;
  virtual void free_addresses(void* at, std::int64_t bytes) = 0;
  // The device may read and write there from then on.
  virtual void map(void* at, std::int64_t bytes, PhysicalHandle physical) = 0;
  // Maps handles of `each` bytes one after the other: all or, if it throws, none. Faster than one by one.
  virtual void map_each(void* at, std::int64_t each, std::span<const PhysicalHandle> physical) = 0;
  // Undoes one mapping, as a whole. No work on the device may use it any more.
  virtual void unmap(void* at, std::int64_t bytes) = 0;

  // Pinned host memory: memory of ours that is registered with CUDA (whole pages), or CUDA's own. Devices
  // that share memory each register it, in the same ranges; it is unregistered with the last of them.
  virtual void register_host(void* at, std::int64_t bytes) = 0;
  virtual void unregister_host(void* at) = 0;
  virtual void* allocate_host(std::int64_t bytes) = 0;
  virtual void release_host(void* at) = 0;

  // Work enqueued on the stream until end_capture() is not run but recorded, as one graph.
  virtual void begin_capture(StreamHandle stream) = 0;
  virtual GraphHandle end_capture(StreamHandle stream) = 0;
  virtual void launch(GraphHandle graph, StreamHandle stream) = 0;
  virtual void destroy_graph(GraphHandle graph) = 0;

  // Named ranges of the calling thread, for profilers (NVTX).
  virtual void push_range(const char* name) = 0;
  virtual void pop_range() = 0;
};

// NVIDIA's libraries. Throws Error(kDevice) if there is no driver, or if it is too old for this build's
// toolkit; the message names the driver found and the driver needed.
std::unique_ptr<Runtime> make_cuda_runtime();

// Sets environment variables that CUDA reads when it is initialised: it then loads all kernels at once, and
// gives each stream a work queue of its own. Variables that are already set stay as they are. Call before
// other threads start.
void set_cuda_environment();
// Why a stream of this process must not wait for a word that the host sets; empty: it may. A kernel that is
// loaded at its first use makes CUDA wait for all work of the device, while other threads' calls wait for
// that: if a stream waits for the host then, the host can never set its word. Also, a waiting stream blocks
// other streams that share its work queue. connections: CUDA_DEVICE_MAX_CONNECTIONS, or null.
std::string why_no_wait_values(bool lazy_kernels, const char* connections);

// The same check, given the results of driver_version() and runtime_version().
void check_versions(int driver, int runtime);
// Throws Error(kDevice) if the device is too old for our kernels.
void check_device(const DeviceInfo& info);

}  // namespace zg::cuda
