#include "device/cuda/direct_storage.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "kernels/cuda/kernels.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::cuda {

class CudaDirectStorage::OpenFile final : public io::DirectStorage::File {
 public:
  OpenFile(CudaDirectStorage& owner, Gds::File file) : owner_(owner), file_(std::move(file)) {}

  std::int64_t read(void* data, std::int64_t bytes, std::int64_t offset) override {
    return in_parts(bytes, "reading", [&](std::int64_t done, std::int64_t part, std::int64_t at) {
      void* const base = owner_.buffers_.data();
      Gds::Result result = owner_.gds_->read(file_, offset + done, part, base, at);
      owner_.copy(static_cast<char*>(data) + done, static_cast<char*>(base) + at, result.bytes);
      return result;
    });
  }
  std::int64_t write(const void* data, std::int64_t bytes, std::int64_t offset) override {
    return in_parts(bytes, "writing", [&](std::int64_t done, std::int64_t part, std::int64_t at) {
      void* const base = owner_.buffers_.data();
      owner_.copy(static_cast<char*>(base) + at, static_cast<const char*>(data) + done, part);
      return owner_.gds_->write(file_, offset + done, part, base, at);
    });
  }

 private:
  // Moves `bytes` in parts. Calls move() with the bytes done so far, the bytes to move now, and the place of
  // a buffer for them.
  template <class Move>
  std::int64_t in_parts(std::int64_t bytes, const char* what, const Move& move) const {
    const std::int64_t buffer = owner_.take_buffer();
    std::int64_t done = 0;
    int error = 0;
    while (done < bytes && error == 0) {
      const std::int64_t part = std::min(bytes - done, kMaxBytes);
      try {
        const Gds::Result result = move(done, part, buffer);
        done += result.bytes;
        error = result.error;
        if (error != 0) log::error("{}: {} {} bytes: {}", owner_.describe(), what, part, result.text);
        if (result.bytes < part) break;  // the caller gets the error when it continues from there
      } catch (const std::exception& e) {
        log::error("{}: {} {} bytes: {}", owner_.describe(), what, part, e.what());
        owner_.completions_.fail(std::current_exception());
        error = EIO;
      }
    }
    owner_.give_buffer(buffer);
    return done == 0 ? -error : done;
  }

  CudaDirectStorage& owner_;
  const Gds::File file_;
};

CudaDirectStorage::CudaDirectStorage(Runtime& runtime, Completions& completions, int device,
                                     const DeviceInfo& info, std::unique_ptr<Gds> gds, std::int64_t free)
    : runtime_(runtime),
      completions_(completions),
      device_(device),
      multiprocessors_(info.multiprocessors),
      gds_(std::move(gds)),
      scratch_(runtime, device, std::max<std::int64_t>(info.granule, checksum_scratch_bytes(kMaxBytes))),
      buffers_(runtime, device, kMaxBytes * std::clamp<std::int64_t>(free / 2 / kMaxBytes, 1, kMostBuffers)) {
  const std::int64_t each = checksum_scratch_bytes(kMaxBytes), slots = scratch_.bytes() / each;
  try {
    std::string why;
    registered_ = gds_->register_memory(buffers_.data(), buffers_.bytes(), &why);
    if (!registered_)
      log::warning("{}: transfers take a detour, since memory cannot be registered: {}", describe(), why);
    for (std::int64_t at = 0; at < buffers_.bytes(); at += kMaxBytes) free_buffers_.push_back(at);
    copies_ = runtime_.create_stream(true);
    results_ = runtime_.allocate_host(slots * static_cast<std::int64_t>(sizeof(std::uint64_t)));
    for (std::int64_t i = 0; i < slots; ++i) {
      // Urgent: a transfer waits for its checksum.
      free_slots_.push_back({runtime_.create_stream(true), static_cast<char*>(scratch_.data()) + i * each,
                             static_cast<std::uint64_t*>(results_) + i});
    }
    // Loads the kernels now, for which CUDA may synchronize with the device. The data do not matter.
    checksum_at(free_slots_[0], scratch_.data(), 4096);
  } catch (...) {
    give_back();
    throw;
  }
}

CudaDirectStorage::~CudaDirectStorage() {
  give_back();
}

void CudaDirectStorage::give_back() {
  for (const ChecksumSlot& slot : free_slots_) runtime_.destroy_stream(slot.stream);
  if (copies_ != nullptr) runtime_.destroy_stream(copies_);
  if (registered_) gds_->unregister_memory(buffers_.data());
  if (results_ != nullptr) runtime_.release_host(results_);
}

std::int64_t CudaDirectStorage::take_buffer() {
  std::unique_lock lock(mutex_);
  buffer_freed_.wait(lock, [&] { return !free_buffers_.empty(); });
  const std::int64_t at = free_buffers_.back();
  free_buffers_.pop_back();
  return at;
}

void CudaDirectStorage::give_buffer(std::int64_t at) {
  {
    std::lock_guard lock(mutex_);
    free_buffers_.push_back(at);
  }
  buffer_freed_.notify_one();
}

void CudaDirectStorage::copy(void* to, const void* from, std::int64_t bytes) const {
  if (bytes == 0) return;
  runtime_.copy(copies_, to, from, bytes, Direction::kOnDevice);
  runtime_.synchronize(copies_);
}

std::uint64_t CudaDirectStorage::checksum_at(const ChecksumSlot& slot, const void* data,
                                             std::int64_t bytes) const {
  cuda::checksum({slot.stream, multiprocessors_}, bytes, data, slot.scratch, slot.result);
  runtime_.synchronize(slot.stream);
  return *slot.result;
}

std::unique_ptr<io::DirectStorage::File> CudaDirectStorage::open(int fd) {
  std::string why;
  Gds::File file = gds_->open(fd, &why);
  if (!file) {
    throw Error(Errc::kIo, "GPUDirect Storage", why,
                "gdscheck, of NVIDIA's toolkit, says which file systems and drives it supports; without it: "
                "cuda.gpudirect_storage = \"off\"");
  }
  return std::make_unique<OpenFile>(*this, std::move(file));
}

std::optional<std::uint64_t> CudaDirectStorage::checksum(const void* data, std::int64_t bytes) {
  ZG_ASSERT_LE(bytes, kMaxBytes);
  ChecksumSlot slot;
  {
    std::unique_lock lock(mutex_);
    slot_freed_.wait(lock, [&] { return !free_slots_.empty(); });
    slot = std::move(free_slots_.back());
    free_slots_.pop_back();
  }
  // This thread synchronizes by itself: the thread of `completions_` may be waiting for an I/O thread.
  std::optional<std::uint64_t> sum;
  try {
    sum = checksum_at(slot, data, bytes);
  } catch (const std::exception& e) {
    log::error("{}: a checksum of {} bytes: {}", describe(), bytes, e.what());
    completions_.fail(std::current_exception());
  }
  {
    std::lock_guard lock(mutex_);
    free_slots_.push_back(std::move(slot));
  }
  slot_freed_.notify_one();
  return sum;
}

std::string CudaDirectStorage::describe() const {
  return fmt::format("GPUDirect Storage ({})", gds_->describe());
}

}  // namespace zg::cuda
