// Moves bytes between files and memory that read() and write() cannot reach: that of a GPU.
//
// The one implementation is GPUDirect Storage (device/cuda/direct_storage.hpp). An engine that has a
// DirectStorage (EngineOptions::direct) runs one more lane per drive, for transfers to and from such memory
// (Transfer::on_device).
//
// Threads: any thread may call, several at once; each must have called enter_thread() before.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace zg::io {

class DirectStorage {
 public:
  virtual ~DirectStorage() = default;

  // A file that can be read into device memory, and written from it. Both calls block until the bytes have
  // moved, and return like pread() and pwrite(), but with a negative errno: the number of bytes moved, which
  // may be fewer than asked for. Offsets, sizes and addresses are multiples of 4096.
  class File {
   public:
    virtual ~File() = default;
    virtual std::int64_t read(void* data, std::int64_t bytes, std::int64_t offset) = 0;
    virtual std::int64_t write(const void* data, std::int64_t bytes, std::int64_t offset) = 0;
  };
  // `fd` is open with O_DIRECT. It and this object must outlive the File. Throws Error(kIo) with the cause
  // when the file cannot be used this way.
  virtual std::unique_ptr<File> open(int fd) = 0;

  virtual void enter_thread() = 0;  // throws Error when the device is not usable
  // The same value as io::checksum() of the same bytes; none when the device has failed. At least 4096 bytes.
  virtual std::optional<std::uint64_t> checksum(const void* data, std::int64_t bytes) = 0;
  virtual std::string describe() const = 0;  // "GPUDirect Storage (nvidia-fs 2.26)"
};

// Why files in this directory cannot be used with `storage`; empty when they can. Tries it with a file of one
// page that has no name. Never throws Error: whatever is wrong with the directory is the reason returned.
std::string why_not_direct(DirectStorage& storage, const std::string& directory);

}  // namespace zg::io
