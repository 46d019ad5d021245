// GPUDirect Storage: files read into, and written from, device memory without a copy through the host's.
// NVIDIA's cuFile is found when the program runs; where it is not, everything goes through host memory as
// ever. DirectStorage (direct_storage.hpp) puts it behind the I/O engine.
//
// Each transfer is a call that returns when it is done. It sees none of a stream's work: a buffer is read into
// when the work that used it is done, and written from when the work that makes it is. Offsets, sizes and
// device addresses that are multiples of 4096 go straight; others go through cuFile's own buffers.
// Memory is not registered (cuFileBufRegister): the arena moves granules from hole to hole, and what was
// registered would lead to where they were. cuFile then moves the bytes by way of a buffer of its own on the
// device.
//
// Failures of transfers are values; a text is made only for a failure. Any thread that has chosen the device.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace zg::cuda {

class Gds {
 public:
  static constexpr const char* kLibrary = "libcufile.so.0";
  // Finds the library and opens its driver, after the process has begun to use CUDA. Null: it cannot be had,
  // and `why` says why not. any_way: also where cuFile would go through host memory itself (compatibility mode),
  // for all files or for some; else open() refuses those.
  static std::unique_ptr<Gds> load(std::string* why, bool any_way, const std::string& library = kLibrary);
  ~Gds();  // after its files
  Gds(const Gds&) = delete;
  Gds& operator=(const Gds&) = delete;

  // "nvidia-fs 2.26": who moves the bytes. "compatibility mode": cuFile itself goes through host memory,
  // which is no faster than we are.
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
  // For a descriptor with O_DIRECT, which must outlive it. Empty: this file cannot be had so.
  File open(int fd, std::string* why) const;

  struct Result {
    std::int64_t bytes = 0;  // moved: all, fewer at the end of the file, or fewer than wanted and an error
    int error = 0;           // an errno; EIO where cuFile has a number of its own
    std::string text = {};   // of the error
  };
  [[nodiscard]] Result read(const File& file, std::int64_t offset, std::int64_t bytes, void* device) const;
  [[nodiscard]] Result write(const File& file, std::int64_t offset, std::int64_t bytes, const void* device) const;

 private:
  struct Library;
  explicit Gds(std::unique_ptr<Library> library);
  std::unique_ptr<Library> library_;
};

}  // namespace zg::cuda
