// What moves bytes between files and memory that the kernel's calls do not reach: a GPU's.
//
// GPUDirect Storage is one (device/cuda/direct_storage.hpp). An engine that is given one (EngineOptions::direct)
// has for each drive, beside its lanes, one for transfers whose memory is there (Transfer::on_device).
//
// Threads: any, several at once; each of the engine's threads calls enter_thread() first.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace zg::io {

class DirectStorage {
 public:
  virtual ~DirectStorage() = default;

  // As pread() and pwrite() say it: bytes moved, which may be fewer, or a negative errno. Return when the
  // bytes are there. Offsets, sizes and addresses are multiples of 4096.
  class File {
   public:
    virtual ~File() = default;
    virtual std::int64_t read(void* data, std::int64_t bytes, std::int64_t offset) = 0;
    virtual std::int64_t write(const void* data, std::int64_t bytes, std::int64_t offset) = 0;
  };
  // Of a descriptor with O_DIRECT, which outlives the File, as this does. Throws Error(kIo) with the cause where
  // the file cannot be had so.
  virtual std::unique_ptr<File> open(int fd) = 0;

  virtual void enter_thread() = 0;  // throws Error where the device cannot be had
  // What io::checksum() says of the same bytes; nothing where the device has failed. At least 4096 bytes.
  virtual std::optional<std::uint64_t> checksum(const void* data, std::int64_t bytes) = 0;
  virtual std::string describe() const = 0;  // "GPUDirect Storage (nvidia-fs 2.26)"
};

// Why files in this directory cannot be had so; empty: they can. Makes a file without a name, of a page. What is
// wrong with the directory is such a reason, too: nothing is thrown.
std::string why_not_direct(DirectStorage& storage, const std::string& directory);

}  // namespace zg::io
