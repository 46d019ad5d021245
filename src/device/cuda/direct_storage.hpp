// The I/O engine's access to a CUDA device's memory: cuFile moves the bytes (gds.hpp), and a kernel
// computes their checksums (kernels/cuda/checksum.cu), the same as the host's: either can check what the
// other wrote.
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
  // The most bytes of a checksum: an io::Volume's piece.
  static constexpr std::int64_t kMaxBytes = io::kMaxPieceBytes;

  // Takes a granule of device memory, outside of the arena, and computes a first checksum. Throws
  // Error(kMemory), or the checksum's error. A later checksum that fails is reported to `completions` as a
  // failure of the device.
  CudaDirectStorage(Runtime& runtime, Completions& completions, int device, const DeviceInfo& info,
                    std::unique_ptr<Gds> gds);
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

  std::uint64_t checksum_at(const ChecksumSlot& slot, const void* data, std::int64_t bytes) const;
  void give_back();

  Runtime& runtime_;
  Completions& completions_;
  const int device_, multiprocessors_;
  const std::int64_t granule_;
  const std::unique_ptr<Gds> gds_;
  DeviceBuffer scratch_;
  void* results_ = nullptr;  // pinned
  std::mutex mutex_;
  std::condition_variable slot_freed_;
  std::vector<ChecksumSlot> free_slots_;
};

}  // namespace zg::cuda
