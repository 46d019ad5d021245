// What the CUDA device asks of CUDA, and nothing else: the seam between our logic and NVIDIA's libraries.
// runtime_cuda.cpp answers with the CUDA runtime and driver; the tests answer with a recorded fake that runs
// everything on the host, asynchronously, and finds misuse.
//
// Calls may come from any thread; each acts on the device that the thread chose by use_device(). A call that
// CUDA refuses throws Error(kDevice) with CUDA's words; an allocation that does not fit throws
// Error(kMemory). What only gives back (destroy_*, release_*, free_addresses, unregister_host) does not
// throw: it logs what CUDA refuses, and may be called when the device has failed.
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
using PhysicalHandle = unsigned long long;  // of device memory without an address

struct DeviceInfo {
  std::string name = {};     // "NVIDIA H100 80GB HBM3"
  std::string pci = {};      // "0000:1b:00.0"
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int numa_node = -1;        // that it is attached to; -1: unknown
  std::int64_t memory = 0;   // bytes of HBM
  std::int64_t granule = 0;  // of physical memory: sizes and addresses are multiples of it
  int copy_engines = 0;
  bool wait_values = false;  // streams can wait for a word of host memory
};

struct MemoryInfo {
  std::int64_t free = 0, total = 0;
};

enum class Direction { kToDevice, kToHost, kOnDevice };

class Runtime {
 public:
  virtual ~Runtime() = default;

  // 13000 is 13.0. driver_version: the newest that the driver serves; 0 without a driver.
  virtual int driver_version() = 0;
  virtual int runtime_version() = 0;
  virtual int device_count() = 0;
  virtual DeviceInfo device_info(int device) = 0;
  virtual void use_device(int device) = 0;  // by this thread, from now on
  virtual MemoryInfo memory_info() = 0;

  // urgent: its kernels go first where the device has a choice.
  virtual StreamHandle create_stream(bool urgent) = 0;
  virtual void destroy_stream(StreamHandle stream) = 0;  // its work is done
  virtual EventHandle create_event() = 0;                // without timing
  virtual void destroy_event(EventHandle event) = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // Whether all work before the record is done. Throws what that work failed by.
  virtual bool query(EventHandle event) = 0;
  // Returns when all that was enqueued on the device is done; throws what it failed by.
  virtual void synchronize() = 0;
  virtual void synchronize(StreamHandle stream) = 0;  // the same, of one stream
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  // The stream goes on when the word, in memory of allocate_host(), is `value`.
  virtual void wait_value(StreamHandle stream, const std::uint32_t* word, std::uint32_t value) = 0;

  // In order on the stream. Host memory that is not registered makes the call wait for the copy; memory of
  // which a part alone is registered is refused.
  virtual void copy(StreamHandle stream, void* to, const void* from, std::int64_t bytes,
                    Direction direction) = 0;
  virtual void copy_peer(StreamHandle stream, void* to, int to_device, const void* from, int from_device,
                         std::int64_t bytes) = 0;
  virtual void fill(StreamHandle stream, void* at, int byte, std::int64_t bytes) = 0;
  // Of a matrix: rows of `width` bytes, `pitch` apart.
  virtual void fill_rows(StreamHandle stream, void* at, std::int64_t pitch, int byte, std::int64_t width,
                         std::int64_t rows) = 0;

  // Device memory in granules: physical memory, addresses, and the one mapped to the other. bytes: multiples
  // of the granule.
  virtual PhysicalHandle create_physical(std::int64_t bytes) = 0;
  virtual void release_physical(PhysicalHandle physical) = 0;
  virtual void* reserve_addresses(std::int64_t bytes) = 0;
  virtual void free_addresses(void* at, std::int64_t bytes) = 0;
  // Readable and writable from then on by the device.
  virtual void map(void* at, std::int64_t bytes, PhysicalHandle physical) = 0;
  // Many of `each` bytes, one after the other: all or, when it throws, none. Faster than one by one.
  virtual void map_each(void* at, std::int64_t each, std::span<const PhysicalHandle> physical) = 0;
  // One whole mapping; nothing on the device uses it.
  virtual void unmap(void* at, std::int64_t bytes) = 0;

  // Host memory: pinned by us, or made pinned. Whole pages.
  virtual void register_host(void* at, std::int64_t bytes) = 0;
  virtual void unregister_host(void* at) = 0;
  virtual void* allocate_host(std::int64_t bytes) = 0;
  virtual void release_host(void* at) = 0;

  // What is enqueued on the stream until end_capture() is not run but kept, as one launch.
  virtual void begin_capture(StreamHandle stream) = 0;
  virtual GraphHandle end_capture(StreamHandle stream) = 0;
  virtual void launch(GraphHandle graph, StreamHandle stream) = 0;
  virtual void destroy_graph(GraphHandle graph) = 0;

  // Named ranges of this thread, for profilers (NVTX).
  virtual void push_range(const char* name) = 0;
  virtual void pop_range() = 0;
};

// CUDA's own. Throws Error(kDevice) when there is no driver, or one that is too old for this build's toolkit:
// it says which is there, which is needed, and what to do.
std::unique_ptr<Runtime> make_cuda_runtime();

// What it throws, by the numbers of driver_version() and runtime_version().
void check_versions(int driver, int runtime);
// Throws Error(kDevice) when our kernels need a newer device.
void check_device(const DeviceInfo& info);

}  // namespace zg::cuda
