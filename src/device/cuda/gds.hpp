// GPUDirect Storage: transfers between files and device memory that do not pass through host memory.
// NVIDIA's library cuFile is loaded at run time; without it, transfers go through host memory.
// direct_storage.hpp implements the I/O engine's interface with it.
//
// A transfer is a blocking call, and is not ordered with streams: the caller must wait for work that uses
// the buffer before it reads into it, and for work that fills the buffer before it writes from it. Offsets,
// sizes and device addresses that are multiples of 4096 are transferred directly, others through cuFile's
// own buffers. The memory of a transfer must lie in one mapping of device memory: CUDA reports to libraries
// only the mapping that contains an address (cuMemGetAddressRange). cuFile moves data of unregistered memory
// through buffers of its own on the device, 1 MiB at a time unless its configuration says otherwise.
//
// A failed transfer returns a value and throws nothing; its text is made only on failure. Calls may come from
// any thread whose current device owns the memory.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace zg::cuda {

class Gds {
 public:
  static constexpr const char* kLibrary = "libcufile.so.0";
  // Loads the library and opens its driver; to be called after the process has begun to use CUDA. Null,
  // with the reason in `why`, if that fails. any_way: accept cuFile's compatibility mode, in which it goes
  // through host memory itself; else that mode is refused here, or for single files by open().
  static std::unique_ptr<Gds> load(std::string* why, bool any_way, const std::string& library = kLibrary);
  ~Gds();  // after its files
  Gds(const Gds&) = delete;
  Gds& operator=(const Gds&) = delete;

  // What moves the bytes: "nvidia-fs 2.26", or "compatibility mode", which is no faster than our own
  // transfers.
  std::string describe() const;
  bool passes_host() const;  // compatibility mode, or unknown

  class File {
   public:
    File() = default;
    File(File&& other) noexcept;
    File& operator=(File&& other) noexcept;
    ~File();
    explicit operator bool() const { return handle_ != nullptr; }

   private:
    friend class Gds;
    File(const Gds* gds, void* handle) : gds_(gds), handle_(handle) {}
    const Gds* gds_ = nullptr;
    void* handle_ = nullptr;
  };
  // fd: opened with O_DIRECT; must outlive the File. Empty, with the reason in `why`, if cuFile refuses the
  // file.
  File open(int fd, std::string* why) const;

  struct Result {
    std::int64_t bytes = 0;  // that were moved: fewer than asked for at the end of the file, or with an error
    int error = 0;           // an errno; EIO for cuFile's own errors; 0: none
    std::string text = {};   // the error's
  };
  // To or from `at` bytes behind `base`. Of registered memory, `base` must be what was registered.
  [[nodiscard]] Result read(const File& file, std::int64_t offset, std::int64_t bytes, void* base,
                            std::int64_t at = 0) const;
  [[nodiscard]] Result write(const File& file, std::int64_t offset, std::int64_t bytes, const void* base,
                             std::int64_t at = 0) const;

  // Memory that is used for many transfers: drives reach it directly, until it is unregistered. It must not
  // be remapped. False, with the reason in `why`, if cuFile refuses.
  bool register_memory(void* base, std::int64_t bytes, std::string* why) const;
  void unregister_memory(void* base) const;  // no transfer may use it any more

 private:
  struct Library;
  explicit Gds(std::unique_ptr<Library> library);
  std::unique_ptr<Library> library_;
};

}  // namespace zg::cuda
