// GPUDirect Storage: files read into, and written from, device memory without a copy through the host's.
// NVIDIA's cuFile is found when the program runs; where it is not, everything goes through host memory as
// ever.
//
// How the store's mover would use it, as a link from drives to a device beside the one over the host: each
// transfer is a call of read() or write() that returns when it is done, so the link has a few threads of its
// own, which choose the device (Runtime::use_device) once and take transfers from a queue; a transfer's event
// is set by its thread, which a stream waits for as for any other. read() sees none of the stream's work:
// a buffer is read into when the work that used it is done, and written from when the work that makes it is.
// Offsets, sizes and device addresses that are multiples of 4096 go straight; others go through cuFile's own
// buffers. The arena's hooks register its memory (register_buffer; what cannot be registered works too, over
// cuFile's buffers). Bytes that never were in host memory have no checksum made there: the link needs one
// that the device makes, or files without.
//
// Failures of transfers are values; a text is made only for a failure. Any thread.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace zg::cuda {

class Gds {
 public:
  static constexpr const char* kLibrary = "libcufile.so.0";
  // Finds the library and opens its driver, after the process has begun to use CUDA. Null: it cannot be had,
  // and `why` says why not.
  static std::unique_ptr<Gds> load(std::string* why, const std::string& library = kLibrary);
  ~Gds();  // after its files
  Gds(const Gds&) = delete;
  Gds& operator=(const Gds&) = delete;

  // "nvidia-fs 2.26": who moves the bytes. "compatibility mode": cuFile itself goes through host memory,
  // which is no faster than we are.
  std::string describe() const;

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
    std::string error = {};
  };
  [[nodiscard]] Result read(const File& file, std::int64_t offset, std::int64_t bytes, void* device,
                            std::int64_t device_offset) const;
  [[nodiscard]] Result write(const File& file, std::int64_t offset, std::int64_t bytes, const void* device,
                             std::int64_t device_offset) const;

  // Device memory that transfers use again and again; its transfers name it by `device`, its beginning, and
  // an offset. Empty text: done.
  [[nodiscard]] std::string register_buffer(void* device, std::int64_t bytes) const;
  [[nodiscard]] std::string unregister_buffer(void* device) const;

 private:
  struct Library;
  explicit Gds(std::unique_ptr<Library> library);
  std::unique_ptr<Library> library_;
};

}  // namespace zg::cuda
