#include "device/cuda/gds.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdlib>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::cuda {
namespace {

// cuFile's types, from its documentation (cuFile API reference, 4.1), because few toolkits contain its
// header.
struct Status {
  int error;  // 0, or a number above kFirstError
  int cuda;   // if `error` is kCudaError: a CUresult
};
constexpr int kFirstError = 5000, kCudaError = 5011;
struct Descriptor {
  int type;
  union {
    int fd;
    void* handle;
  };
  const void* operations;
};
constexpr int kTypeFd = 1;
struct Properties {
  struct {
    unsigned major, minor;
    std::size_t poll_threshold, max_direct_io;
    unsigned status, control;
  } driver;
  unsigned features, max_device_cache, buffer_cache, max_pinned, max_batch, batch_timeout_ms;
  unsigned spare[32];  // for fields of later versions
};
constexpr unsigned kFeatureP2p = 1u << 4;
constexpr int kAllowCompatMode = 1;  // a parameter of cuFile 1.14 and later

// The meanings of cuFile's errors.
constexpr struct {
  int error;
  const char* text;
} kErrorTexts[] = {
    {5001, "the driver nvidia-fs is not loaded, and compatibility mode is off"},
    {5004, "the driver nvidia-fs has another version"},
    {5005, "the version of nvidia-fs cannot be read"},
    {5007, "this platform is not supported"},
    {5008, "this file system is not supported"},
    {5009, "this GPU is not supported"},
    {5010, "nvidia-fs failed"},
    {5012, "this is no device memory"},
    {5013, "this is no device memory"},
    {5014, "it passes the end of the memory"},
    {5016, "it was registered with another size"},
    {5017, "it passes the end of what was registered"},
    {5018, "this kind of file is not supported"},
    {5019, "the file was not opened with O_DIRECT"},
    {5020, "the file was not opened with O_DIRECT"},
    {5022, "an invalid argument"},
    {5023, "the memory is registered already"},
    {5024, "the memory is not registered"},
    {5025, "permission denied"},
    {5027, "the file is not registered"},
    {5028, "the file is registered already"},
    {5034, "its configuration (cufile.json) forbids this file"},
    {5036, "device memory could not be pinned"},
};

const char* text_of(int error) {
  for (const auto& known : kErrorTexts) {
    if (known.error == error) return known.text;
  }
  return "it failed";
}

std::string text_of(const Status& status) {
  if (status.error == kCudaError) return fmt::format("CUDA refused it (CUresult {})", status.cuda);
  return fmt::format("{} (cuFile error {})", text_of(status.error), status.error);
}

}  // namespace

struct Gds::Library {
  void* handle = nullptr;
  Status (*driver_open)() = nullptr;
  Status (*driver_close)() = nullptr;
  Status (*properties)(Properties*) = nullptr;
  Status (*set_bool)(int, bool) = nullptr;  // null: the library is older than 1.14
  Status (*open_file)(void**, Descriptor*) = nullptr;
  void (*close_file)(void*) = nullptr;
  ssize_t (*read)(void*, void*, std::size_t, off_t, off_t) = nullptr;
  ssize_t (*write)(void*, const void*, std::size_t, off_t, off_t) = nullptr;
  Status (*register_memory)(const void*, std::size_t, int) = nullptr;
  Status (*unregister_memory)(const void*) = nullptr;
  bool is_open = false;

  template <class Function>
  bool find(Function& into, const char* name) {
    into = reinterpret_cast<Function>(dlsym(handle, name));
    return into != nullptr;
  }
  // The name of a function that the library lacks; null if it has all.
  const char* find_all() {
    if (!find(driver_open, "cuFileDriverOpen")) return "cuFileDriverOpen";
    if (!find(driver_close, "cuFileDriverClose_v2") && !find(driver_close, "cuFileDriverClose"))
      return "cuFileDriverClose";
    if (!find(properties, "cuFileDriverGetProperties")) return "cuFileDriverGetProperties";
    if (!find(open_file, "cuFileHandleRegister")) return "cuFileHandleRegister";
    if (!find(close_file, "cuFileHandleDeregister")) return "cuFileHandleDeregister";
    if (!find(read, "cuFileRead")) return "cuFileRead";
    if (!find(write, "cuFileWrite")) return "cuFileWrite";
    if (!find(register_memory, "cuFileBufRegister")) return "cuFileBufRegister";
    if (!find(unregister_memory, "cuFileBufDeregister")) return "cuFileBufDeregister";
    find(set_bool, "cuFileSetParameterBool");
    return nullptr;
  }
  ~Library() {
    if (is_open) {
      const Status status = driver_close();
      if (status.error != 0) log::warning("cuFile: closing its driver: {}", text_of(status));
    }
    // The library stays loaded: it has threads of its own, which may outlive its driver.
  }
};

Gds::Gds(std::unique_ptr<Library> library) : library_(std::move(library)) {}
Gds::~Gds() = default;

std::unique_ptr<Gds> Gds::load(std::string* why, bool any_way, const std::string& name) {
  // Without NVIDIA's driver, opening cuFile's own driver hangs (version 1.17).
  if (name == kLibrary && dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD) == nullptr) {
    *why = "GPUDirect Storage needs NVIDIA's driver, which this process does not use";
    return nullptr;
  }
  auto library = std::make_unique<Library>();
  library->handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library->handle == nullptr) {
    const char* text = dlerror();
    *why = fmt::format("GPUDirect Storage is not installed: {}", text != nullptr ? text : name.c_str());
    return nullptr;
  }
  if (const char* missing = library->find_all()) {
    *why = fmt::format("{} has no function {}", name, missing);
    dlclose(library->handle);
    return nullptr;
  }
  if (library->set_bool != nullptr) {
    if (const Status status = library->set_bool(kAllowCompatMode, any_way); status.error != 0)
      log::warning("cuFile: its compatibility mode cannot be set: {}", text_of(status));
  }
  if (const Status status = library->driver_open(); status.error != 0) {
    *why = fmt::format("cuFile's driver cannot be opened: {}", text_of(status));
    return nullptr;
  }
  library->is_open = true;
  auto gds = std::unique_ptr<Gds>(new Gds(std::move(library)));
  if (any_way || !gds->passes_host()) return gds;
  *why = "cuFile is in compatibility mode (the driver nvidia-fs is not loaded): it goes through host memory";
  return nullptr;
}

std::string Gds::describe() const {
  Properties p{};
  const Status status = library_->properties(&p);
  if (status.error != 0) return fmt::format("unknown: {}", text_of(status));
  if (p.driver.major != 0 || p.driver.minor != 0)
    return fmt::format("nvidia-fs {}.{}", p.driver.major, p.driver.minor);
  return (p.features & kFeatureP2p) != 0 ? "the kernel's PCI P2PDMA, where file and drive allow it"
                                         : "compatibility mode";
}

bool Gds::passes_host() const {
  Properties p{};
  if (library_->properties(&p).error != 0) return true;
  return p.driver.major == 0 && p.driver.minor == 0 && (p.features & kFeatureP2p) == 0;
}

Gds::File::File(File&& other) noexcept : gds_(other.gds_), handle_(std::exchange(other.handle_, nullptr)) {}
Gds::File& Gds::File::operator=(File&& other) noexcept {
  std::swap(gds_, other.gds_);
  std::swap(handle_, other.handle_);
  return *this;
}
Gds::File::~File() {
  if (handle_ != nullptr) gds_->library_->close_file(handle_);
}

Gds::File Gds::open(int fd, std::string* why) const {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0) {
    *why = errno_text(errno);
    return {};
  }
  if ((flags & O_DIRECT) == 0) {
    *why = text_of(5020);
    return {};
  }
  Descriptor descriptor{};
  descriptor.type = kTypeFd;
  descriptor.fd = fd;
  void* handle = nullptr;
  const Status status = library_->open_file(&handle, &descriptor);
  if (status.error != 0) {
    *why = text_of(status);
    return {};
  }
  return File(this, handle);
}

namespace {

// Calls move(done, left) until all bytes are moved, it returns 0, or it fails. It returns -1 with errno
// set, or the negated number of cuFile's error.
template <class Move>
Gds::Result move_all(std::int64_t bytes, const Move& move) {
  Gds::Result result;
  while (result.bytes < bytes) {
    const ssize_t n = move(result.bytes, static_cast<std::size_t>(bytes - result.bytes));
    if (n > 0) {
      result.bytes += n;
    } else if (n == 0) {
      break;
    } else if (n == -1 && errno == EINTR) {
      continue;
    } else {
      const auto error = static_cast<int>(-n);
      result.error = error > kFirstError ? EIO : errno;
      result.text = error > kFirstError ? text_of(Status{error, 0}) : errno_text(errno);
      break;
    }
  }
  return result;
}

}  // namespace

Gds::Result Gds::read(const File& file, std::int64_t offset, std::int64_t bytes, void* base,
                      std::int64_t at) const {
  ZG_ASSERT(file, "a file that is not open");
  return move_all(bytes, [&](std::int64_t done, std::size_t left) {
    return library_->read(file.handle_, base, left, offset + done, at + done);
  });
}

Gds::Result Gds::write(const File& file, std::int64_t offset, std::int64_t bytes, const void* base,
                       std::int64_t at) const {
  ZG_ASSERT(file, "a file that is not open");
  Result result = move_all(bytes, [&](std::int64_t done, std::size_t left) {
    return library_->write(file.handle_, base, left, offset + done, at + done);
  });
  if (result.bytes < bytes && result.error == 0) {
    result.error = ENOSPC;
    result.text = "the file takes no more";
  }
  return result;
}

bool Gds::register_memory(void* base, std::int64_t bytes, std::string* why) const {
  const Status status = library_->register_memory(base, static_cast<std::size_t>(bytes), 0);
  if (status.error != 0) *why = text_of(status);
  return status.error == 0;
}

void Gds::unregister_memory(void* base) const {
  const Status status = library_->unregister_memory(base);
  if (status.error != 0) log::warning("cuFile: unregistering memory: {}", text_of(status));
}

}  // namespace zg::cuda
