// The I/O engine's way to a CUDA device's memory: cuFile moves the bytes (gds.hpp), the device makes their
// checksums (kernels/cuda/checksum.cu), so that what it wrote, the host can check, and the other way round.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/block.hpp"
#include "device/cuda/gds.hpp"
#include "device/cuda/stream.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::cuda {

class CudaDirectStorage final : public io::DirectStorage {
 public:
  // Checksums are of so many bytes at most: an io::Volume's pieces.
  static constexpr std::int64_t kMostBytes = io::kMaxPieceBytes;

  // Takes a granule of device memory, outside of the arena. Throws Error(kMemory), and what a first checksum
  // fails by. One that fails later is a failure of the device, which `completions` is told of.
  CudaDirectStorage(Runtime& runtime, Completions& completions, int device, const DeviceInfo& info,
                    std::unique_ptr<Gds> gds);
  ~CudaDirectStorage() override;

  std::unique_ptr<File> open(int fd) override;
  void enter_thread() override { runtime_.use_device(device_); }
  std::optional<std::uint64_t> checksum(const void* data, std::int64_t bytes) override;
  std::string describe() const override;

 private:
  class OpenFile;
  // What one checksum under way has for itself.
  struct Desk {
    StreamHandle stream = nullptr;
    void* scratch = nullptr;
    std::uint64_t* result = nullptr;  // pinned
  };

  std::uint64_t checksum_at(const Desk& desk, const void* data, std::int64_t bytes) const;
  void give_back();

  Runtime& runtime_;
  Completions& completions_;
  const int device_, multiprocessors_;
  const std::int64_t granule_;
  const std::unique_ptr<Gds> gds_;
  Block scratch_;
  void* results_ = nullptr;  // pinned
  std::mutex mutex_;
  std::condition_variable free_desk_;
  std::vector<Desk> desks_;  // not in use; all, in the end
};

}  // namespace zg::cuda
