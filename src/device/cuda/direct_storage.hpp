// The I/O engine's access to a CUDA device's memory: cuFile moves the bytes (gds.hpp), and a kernel
// computes their checksums (kernels/cuda/checksum.cu), the same as the host's: either can check what the
// other wrote.
//
// cuFile cannot use the arena's memory: each granule of 2 MiB is a mapping of its own, whose end no transfer
// may cross, and a registration would not follow a granule that is remapped. So drives read into and write
// from buffers that are registered with cuFile once, and the device copies between them and the arena, at the
// speed of its memory. Each transfer uses one buffer, so at most as many are in flight as there are buffers.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/device_buffer.hpp"
#include "device/cuda/gds.hpp"
#include "device/cuda/stream.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::cuda {

class CudaDirectStorage final : public io::DirectStorage {
 public:
  // The most bytes of a checksum, and the size of a buffer: an io::Volume's piece.
  static constexpr std::int64_t kMaxBytes = io::kMaxPieceBytes;
  static constexpr std::int64_t kMostBuffers = 16;

  // Takes a granule of device memory for checksums, and buffers that use at most half of `free` bytes, but at
  // least one buffer; both outside of the arena. Computes a first checksum. Throws Error(kMemory), or the
  // checksum's error. A later checksum or copy that fails is reported to `completions` as a failure of the
  // device.
  CudaDirectStorage(Runtime& runtime, Completions& completions, int device, const DeviceInfo& info,
                    std::unique_ptr<Gds> gds, std::int64_t free);
  ~CudaDirectStorage() override;

  std::unique_ptr<File> open(int fd) override;
  void enter_thread() override { runtime_.use_device(device_); }
  std::optional<std::uint64_t> checksum(const void* data, std::int64_t bytes) override;
  std::string describe() const override;

 private:
  class OpenFile;
  // The resources of one checksum in flight.
  struct ChecksumSlot {
    StreamHandle stream = nullptr;
    void* scratch = nullptr;
    std::uint64_t* result = nullptr;  // pinned
  };

  std::int64_t take_buffer();  // waits until a buffer is free
  void give_buffer(std::int64_t at);
  void copy(void* to, const void* from, std::int64_t bytes) const;  // returns when it is done
  std::uint64_t checksum_at(const ChecksumSlot& slot, const void* data, std::int64_t bytes) const;
  void give_back();

  Runtime& runtime_;
  Completions& completions_;
  const int device_, multiprocessors_;
  const std::unique_ptr<Gds> gds_;
  DeviceBuffer scratch_, buffers_;
  bool registered_ = false;        // buffers_ is registered with cuFile
  StreamHandle copies_ = nullptr;  // between buffers_ and the arena
  void* results_ = nullptr;        // pinned
  std::mutex mutex_;
  std::condition_variable slot_freed_, buffer_freed_;
  std::vector<ChecksumSlot> free_slots_;
  std::vector<std::int64_t> free_buffers_;  // their offsets in buffers_
};

}  // namespace zg::cuda
