#include "device/cuda/direct_storage.hpp"

#include <algorithm>
#include <utility>

#include "kernels/cuda/kernels.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::cuda {

// What cuFile asks CUDA about an address holds for one mapping, and each granule of the arena is one: no call
// may go past the end of the granule that it begins in.
class CudaDirectStorage::OpenFile final : public io::DirectStorage::File {
 public:
  OpenFile(const CudaDirectStorage& owner, Gds::File file) : owner_(owner), file_(std::move(file)) {}

  std::int64_t read(void* data, std::int64_t bytes, std::int64_t offset) override {
    return in_granules(data, bytes, "reading", [&](std::int64_t done, std::int64_t part) {
      return owner_.gds_->read(file_, offset + done, part, static_cast<char*>(data) + done);
    });
  }
  std::int64_t write(const void* data, std::int64_t bytes, std::int64_t offset) override {
    return in_granules(data, bytes, "writing", [&](std::int64_t done, std::int64_t part) {
      return owner_.gds_->write(file_, offset + done, part, static_cast<const char*>(data) + done);
    });
  }

 private:
  template <class Move>
  std::int64_t in_granules(const void* data, std::int64_t bytes, const char* what, const Move& move) const {
    const auto at = reinterpret_cast<std::int64_t>(data);
    std::int64_t done = 0;
    while (done < bytes) {
      const std::int64_t part = std::min(bytes - done, owner_.granule_ - (at + done) % owner_.granule_);
      const Gds::Result result = move(done, part);
      done += result.bytes;
      if (result.error != 0) {
        log::error("{}: {} {} bytes: {}", owner_.describe(), what, part, result.text);
        if (done == 0) return -result.error;
      }
      if (result.bytes < part) break;  // who goes on there is told the error
    }
    return done;
  }

  const CudaDirectStorage& owner_;
  const Gds::File file_;
};

CudaDirectStorage::CudaDirectStorage(Runtime& runtime, Completions& completions, int device,
                                     const DeviceInfo& info, std::unique_ptr<Gds> gds)
    : runtime_(runtime),
      completions_(completions),
      device_(device),
      multiprocessors_(info.multiprocessors),
      granule_(info.granule),
      gds_(std::move(gds)),
      scratch_(runtime, device, std::max<std::int64_t>(info.granule, checksum_scratch_bytes(kMostBytes))) {
  const std::int64_t each = checksum_scratch_bytes(kMostBytes), desks = scratch_.bytes() / each;
  try {
    results_ = runtime_.allocate_host(desks * static_cast<std::int64_t>(sizeof(std::uint64_t)));
    for (std::int64_t i = 0; i < desks; ++i) {
      // Whoever waits for it waits for a drive.
      desks_.push_back({runtime_.create_stream(true), static_cast<char*>(scratch_.data()) + i * each,
                        static_cast<std::uint64_t*>(results_) + i});
    }
    // Its kernels are loaded now, for which CUDA may wait for the device. Of what, is no matter.
    checksum_at(desks_[0], scratch_.data(), 4096);
  } catch (...) {
    give_back();
    throw;
  }
}

CudaDirectStorage::~CudaDirectStorage() {
  give_back();
}

void CudaDirectStorage::give_back() {
  for (const Desk& desk : desks_) runtime_.destroy_stream(desk.stream);
  if (results_ != nullptr) runtime_.release_host(results_);
}

std::uint64_t CudaDirectStorage::checksum_at(const Desk& desk, const void* data, std::int64_t bytes) const {
  cuda::checksum({desk.stream, multiprocessors_}, bytes, data, desk.scratch, desk.result);
  runtime_.synchronize(desk.stream);
  return *desk.result;
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
  ZG_ASSERT_LE(bytes, kMostBytes);
  Desk desk;
  {
    std::unique_lock lock(mutex_);
    free_desk_.wait(lock, [&] { return !desks_.empty(); });
    desk = std::move(desks_.back());
    desks_.pop_back();
  }
  // Waits by itself: the thread that learns what is done on the device may be waiting for an I/O thread.
  std::optional<std::uint64_t> sum;
  try {
    sum = checksum_at(desk, data, bytes);
  } catch (const std::exception& e) {
    log::error("{}: a checksum of {} bytes: {}", describe(), bytes, e.what());
    completions_.fail(std::current_exception());
  }
  {
    std::lock_guard lock(mutex_);
    desks_.push_back(std::move(desk));
  }
  free_desk_.notify_one();
  return sum;
}

std::string CudaDirectStorage::describe() const {
  return fmt::format("GPUDirect Storage ({})", gds_->describe());
}

}  // namespace zg::cuda
