// Implements Runtime with CUDA's runtime library, and with driver functions for virtual memory and for
// waiting on words. The driver functions are looked up by name: nothing links to libcuda, so that without a
// driver the program still starts and can report what is missing.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <vector>

#include "device/cuda/runtime.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cuda {
namespace {

std::string text_of(cudaError_t status) {
  return fmt::format("{} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();  // clears the error; else a later launch would report it
  throw Error(Errc::kDevice, fmt::format("CUDA: {}", what), fmt::format("refused: {}", text_of(status)));
}

void warn(cudaError_t status, const char* what) {
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
  log::warning("CUDA: {}: refused: {}", what, text_of(status));
}

// A function of the driver, looked up by name.
struct DriverFunction {
  void* address = nullptr;

  DriverFunction(const char* name, unsigned version) {
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &result), name);
    if (result != cudaDriverEntryPointSuccess || address == nullptr)
      throw Error(Errc::kDevice, "CUDA", fmt::format("the driver has no function {}", name),
                  "install a newer NVIDIA driver");
  }
  template <class Function>
  operator Function() const {
    return reinterpret_cast<Function>(address);
  }
};

// Each function in the version that its type's name ends with.
struct Driver {
  PFN_cuGetErrorString_v6000 error_string = DriverFunction("cuGetErrorString", 6000);
  PFN_cuDeviceGet_v2000 device = DriverFunction("cuDeviceGet", 2000);
  PFN_cuDeviceGetAttribute_v2000 attribute = DriverFunction("cuDeviceGetAttribute", 2000);
  PFN_cuMemGetAllocationGranularity_v10020 granularity =
      DriverFunction("cuMemGetAllocationGranularity", 10020);
  PFN_cuMemCreate_v10020 create = DriverFunction("cuMemCreate", 10020);
  PFN_cuMemRelease_v10020 release = DriverFunction("cuMemRelease", 10020);
  PFN_cuMemAddressReserve_v10020 reserve = DriverFunction("cuMemAddressReserve", 10020);
  PFN_cuMemAddressFree_v10020 free_addresses = DriverFunction("cuMemAddressFree", 10020);
  PFN_cuMemMap_v10020 map = DriverFunction("cuMemMap", 10020);
  PFN_cuMemUnmap_v10020 unmap = DriverFunction("cuMemUnmap", 10020);
  PFN_cuMemSetAccess_v10020 set_access = DriverFunction("cuMemSetAccess", 10020);
  PFN_cuModuleGetLoadingMode_v11070 loading_mode = DriverFunction("cuModuleGetLoadingMode", 11070);
  PFN_cuStreamWaitValue32_v11070 wait_value = DriverFunction("cuStreamWaitValue32", 11070);

  std::string text_of(CUresult status) const {
    const char* text = nullptr;
    if (error_string(status, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
    return fmt::format("{} (CUresult {})", text, static_cast<int>(status));
  }
  void check_driver(CUresult status, const char* what) const {
    if (status == CUDA_SUCCESS) [[likely]]
      return;
    throw Error(Errc::kDevice, fmt::format("CUDA: {}", what), fmt::format("refused: {}", text_of(status)));
  }
  void warn_driver(CUresult status, const char* what) const {
    if (status == CUDA_SUCCESS || status == CUDA_ERROR_DEINITIALIZED) return;
    log::warning("CUDA: {}: refused: {}", what, text_of(status));
  }
};

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  return device;
}

CUdeviceptr at_address(const void* at) {
  return reinterpret_cast<CUdeviceptr>(at);
}
std::size_t size(std::int64_t bytes) {
  return static_cast<std::size_t>(bytes);
}

// The GPU's NUMA node as reported by CUDA, or by Linux if CUDA does not report it.
int numa_node_of(int device, const std::string& pci) {
  int node = -1;
  if (cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, device) != cudaSuccess) (void)cudaGetLastError();
  if (node >= 0) return node;
  std::ifstream in("/sys/bus/pci/devices/" + pci + "/numa_node");
  return in >> node ? node : -1;
}

// How many devices have registered the host memory that begins at an address.
struct Registered {
  static Registered& of_process() {
    static Registered registered;
    return registered;
  }
  std::mutex mutex;
  std::condition_variable gone;
  std::map<void*, int> devices;  // 0: CUDA is about to unregister it
};

class CudaRuntime final : public Runtime {
 public:
  CudaRuntime() : rdma_(size(device_count())) {
    // Ask for memory that drives and network cards can reach (RDMA) on devices that support it.
    for (std::size_t i = 0; i < rdma_.size(); ++i) {
      CUdevice device = 0;
      int supported = 0;
      driver_.check_driver(driver_.device(&device, static_cast<int>(i)), "a device");
      driver_.check_driver(
          driver_.attribute(&supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device),
          "device attribute");
      rdma_[i] = supported != 0;
    }
  }

  int driver_version() override {
    int version = 0;
    check(cudaDriverGetVersion(&version), "driver version");
    return version;
  }
  int runtime_version() override {
    int version = 0;
    check(cudaRuntimeGetVersion(&version), "runtime version");
    return version;
  }
  int device_count() override {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorNoDevice) {
      (void)cudaGetLastError();
      return 0;
    }
    if (status == cudaErrorSystemNotReady) {
      throw Error(Errc::kDevice, "CUDA", text_of(status),
                  "GPUs that NVSwitch connects need its service: systemctl start nvidia-fabricmanager");
    }
    check(status, "device count");
    return count;
  }

  DeviceInfo device_info(int device) override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "device properties");
    char pci[32] = "";
    check(cudaDeviceGetPCIBusId(pci, sizeof(pci), device), "PCI address");
    std::string address = pci;  // as in /sys: lower case
    for (char& c : address) c = static_cast<char>(std::tolower(c));
    std::size_t granule = 0;
    const CUmemAllocationProp wanted = properties_of(device);
    driver_.check_driver(driver_.granularity(&granule, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                         "granularity of memory");
    CUmoduleLoadingMode loading = CU_MODULE_EAGER_LOADING;
    driver_.check_driver(driver_.loading_mode(&loading), "loading of kernels");
    // Every device supports waits; whether they can be used depends on the process.
    const std::string why = cuda::why_no_wait_values(loading == CU_MODULE_LAZY_LOADING,
                                                     std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
    return {.name = properties.name,
            .pci = address,
            .major = properties.major,
            .minor = properties.minor,
            .multiprocessors = properties.multiProcessorCount,
            .numa_node = numa_node_of(device, address),
            .memory = static_cast<std::int64_t>(properties.totalGlobalMem),
            .granule = static_cast<std::int64_t>(granule),
            .copy_engines = properties.asyncEngineCount,
            .wait_values = why.empty(),
            .why_no_wait_values = why};
  }

  void use_device(int device) override { check(cudaSetDevice(device), "use of a device"); }

  MemoryInfo memory_info() override {
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "free memory");
    return {static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
  }

  StreamHandle create_stream(bool urgent) override {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities of streams");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, urgent ? greatest : least),
          "creating a stream");
    return stream;
  }
  void destroy_stream(StreamHandle stream) override {
    warn(cudaStreamDestroy(stream), "destroying a stream");
  }
  EventHandle create_event() override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    return event;
  }
  void destroy_event(EventHandle event) override { warn(cudaEventDestroy(event), "destroying an event"); }
  void record(EventHandle event, StreamHandle stream) override {
    check(cudaEventRecord(event, stream), "recording an event");
  }
  bool query(EventHandle event) override {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(status, "work on the device");
    return true;
  }
  void synchronize() override { check(cudaDeviceSynchronize(), "work on the device"); }
  void synchronize(StreamHandle stream) override { check(cudaStreamSynchronize(stream), "work of a stream"); }
  void wait(StreamHandle stream, EventHandle event) override {
    check(cudaStreamWaitEvent(stream, event, cudaEventWaitDefault), "a stream's wait");
  }
  void wait_value(StreamHandle stream, const std::uint32_t* word, std::uint32_t value) override {
    driver_.check_driver(driver_.wait_value(stream, at_address(word), value, CU_STREAM_WAIT_VALUE_EQ),
                         "a stream's wait for a word");
  }

  void copy(StreamHandle stream, void* to, const void* from, std::int64_t bytes,
            Direction direction) override {
    if (bytes == 0) return;
    const cudaMemcpyKind kind = direction == Direction::kToDevice ? cudaMemcpyHostToDevice
                                : direction == Direction::kToHost ? cudaMemcpyDeviceToHost
                                                                  : cudaMemcpyDeviceToDevice;
    check(cudaMemcpyAsync(to, from, size(bytes), kind, stream), "a copy");
    if (direction == Direction::kOnDevice) return;
    // If the device can access pageable memory by itself (Grace, HMM), CUDA may still be using memory that
    // is not registered.
    cudaPointerAttributes host{};
    check(cudaPointerGetAttributes(&host, direction == Direction::kToDevice ? from : to),
          "a copy's host memory");
    if (host.type == cudaMemoryTypeUnregistered) check(cudaStreamSynchronize(stream), "a copy");
  }
  void copy_peer(StreamHandle stream, void* to, int to_device, const void* from, int from_device,
                 std::int64_t bytes) override {
    check(cudaMemcpyPeerAsync(to, to_device, from, from_device, size(bytes), stream),
          "a copy between devices");
  }
  void fill(StreamHandle stream, void* at, int byte, std::int64_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemsetAsync(at, byte, size(bytes), stream), "filling memory");
  }
  void fill_rows(StreamHandle stream, void* at, std::int64_t pitch, int byte, std::int64_t width,
                 std::int64_t rows) override {
    if (width == 0 || rows == 0) return;
    check(cudaMemset2DAsync(at, size(pitch), byte, size(width), size(rows), stream), "filling rows");
  }

  PhysicalHandle create_physical(std::int64_t bytes) override {
    CUmemGenericAllocationHandle handle = 0;
    const CUmemAllocationProp wanted = properties_of(current_device());
    const CUresult status = driver_.create(&handle, size(bytes), &wanted, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
      const MemoryInfo info = memory_info();
      throw Error(Errc::kMemory, fmt::format("device {}", wanted.location.id),
                  fmt::format("CUDA refused {}: out of memory; {} of {} are free", format_bytes(bytes),
                              format_bytes(info.free), format_bytes(info.total)),
                  "lower tiers.device, or end other processes that use the device (nvidia-smi)");
    }
    driver_.check_driver(status, "physical memory");
    return handle;
  }
  void release_physical(PhysicalHandle physical) override {
    driver_.warn_driver(driver_.release(physical), "releasing memory");
  }
  void* reserve_addresses(std::int64_t bytes) override {
    CUdeviceptr at = 0;
    driver_.check_driver(driver_.reserve(&at, size(bytes), 0, 0, 0), "reserving addresses");
    return reinterpret_cast<void*>(at);
  }
  void free_addresses(void* at, std::int64_t bytes) override {
    driver_.warn_driver(driver_.free_addresses(at_address(at), size(bytes)), "freeing addresses");
  }
  void map(void* at, std::int64_t bytes, PhysicalHandle physical) override {
    map_each(at, bytes, std::span(&physical, 1));
  }
  // Access is granted once for all handles, because that is the expensive part.
  void map_each(void* at, std::int64_t each, std::span<const PhysicalHandle> physical) override {
    std::size_t mapped = 0;
    CUresult status = CUDA_SUCCESS;
    for (; mapped < physical.size() && status == CUDA_SUCCESS; ++mapped)
      status = driver_.map(at_address(at) + mapped * size(each), size(each), 0, physical[mapped], 0);
    if (status == CUDA_SUCCESS) {
      const CUmemAccessDesc access{.location = properties_of(current_device()).location,
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      status = driver_.set_access(at_address(at), mapped * size(each), &access, 1);
    } else {
      --mapped;
    }
    if (status == CUDA_SUCCESS) return;
    while (mapped > 0)
      driver_.warn_driver(driver_.unmap(at_address(at) + --mapped * size(each), size(each)),
                          "unmapping memory");
    driver_.check_driver(status, "mapping memory");
  }
  void unmap(void* at, std::int64_t bytes) override {
    driver_.check_driver(driver_.unmap(at_address(at), size(bytes)), "unmapping memory");
  }

  // CUDA registers memory for all devices at once, and refuses to do so twice.
  void register_host(void* at, std::int64_t bytes) override {
    Registered& registered = Registered::of_process();
    std::unique_lock lock(registered.mutex);
    for (auto it = registered.devices.find(at); it != registered.devices.end();
         it = registered.devices.find(at)) {
      if (it->second > 0) {
        ++it->second;
        return;
      }
      registered.gone.wait(lock);
    }
    check(cudaHostRegister(at, size(bytes), cudaHostRegisterPortable), "registering host memory");
    registered.devices[at] = 1;
  }
  // CUDA waits for all work of the device here. The lock is released meanwhile, since the work may wait for a
  // thread that registers other memory.
  void unregister_host(void* at) override {
    Registered& registered = Registered::of_process();
    std::unique_lock lock(registered.mutex);
    const auto it = registered.devices.find(at);
    if (it != registered.devices.end() && --it->second > 0) return;
    lock.unlock();
    warn(cudaHostUnregister(at), "unregistering host memory");
    if (it == registered.devices.end()) return;
    lock.lock();
    registered.devices.erase(it);
    registered.gone.notify_all();
  }
  void* allocate_host(std::int64_t bytes) override {
    void* at = nullptr;
    const cudaError_t status = cudaHostAlloc(&at, size(bytes), cudaHostAllocPortable);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      throw Error(Errc::kMemory, "host memory",
                  fmt::format("CUDA could not pin {}: {}", format_bytes(bytes), text_of(status)),
                  "lower the host tier's budget, or free memory");
    }
    check(status, "pinned host memory");
    return at;
  }
  void release_host(void* at) override { warn(cudaFreeHost(at), "releasing host memory"); }

  void begin_capture(StreamHandle stream) override {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  }
  GraphHandle end_capture(StreamHandle stream) override {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "ending a capture");
    cudaGraphExec_t made = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&made, graph, 0);
    warn(cudaGraphDestroy(graph), "destroying a graph");
    check(status, "making a graph");
    return made;
  }
  void launch(GraphHandle graph, StreamHandle stream) override {
    check(cudaGraphLaunch(graph, stream), "launching a graph");
  }
  void destroy_graph(GraphHandle graph) override { warn(cudaGraphExecDestroy(graph), "destroying a graph"); }

  void push_range(const char* name) override { nvtxRangePushA(name); }
  void pop_range() override { nvtxRangePop(); }

 private:
  CUmemAllocationProp properties_of(int device) const {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    wanted.allocFlags.gpuDirectRDMACapable = rdma_[size(device)] ? 1 : 0;
    return wanted;
  }

  const Driver driver_;
  std::vector<bool> rdma_;  // for each device: whether its memory can be RDMA-capable
};

}  // namespace

std::unique_ptr<Runtime> make_cuda_runtime() {
  set_cuda_environment();
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "driver version");
  check(cudaRuntimeGetVersion(&runtime), "runtime version");
  check_versions(driver, runtime);
  return std::make_unique<CudaRuntime>();
}

}  // namespace zg::cuda
