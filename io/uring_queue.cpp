// Blocks through io_uring: one ring per drive, registered file, registered buffers where the kernel and the
// memlock limit allow. wake() is an eventfd that the ring itself reads, so that one wait covers all.
#include <fcntl.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <thread>
#include <utility>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr unsigned kMaxBuffers = 1024;                 // entries of the table of registered buffers
constexpr std::int64_t kMaxBufferBytes = kGiB;         // the kernel's limit for one entry
constexpr auto kPause = std::chrono::milliseconds(1);  // before asking again a kernel short of memory

std::string read_line_of(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  char text[16] = {};
  const ssize_t n = read(fd, text, sizeof(text) - 1);
  close(fd);
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : std::string();
}

[[noreturn]] void throw_unavailable(int error) {
  const char* const other = "or take the back end \"threads\"";
  if (error == ENOSYS) {
    throw Error(Errc::kIo, "io_uring", "this kernel has none: " + errno_text(error),
                fmt::format("it needs Linux 5.11 or later, built with it; {}", other));
  }
  if (error == EPERM || error == EACCES) {
    const std::string disabled = read_line_of("/proc/sys/kernel/io_uring_disabled");
    if (!disabled.empty() && disabled[0] != '0') {
      throw Error(Errc::kIo, "io_uring", fmt::format("kernel.io_uring_disabled is {}", disabled[0]),
                  fmt::format("sysctl -w kernel.io_uring_disabled=0, {}", other));
    }
    throw Error(
        Errc::kIo, "io_uring", "forbidden, by a seccomp filter it seems: " + errno_text(error),
        fmt::format("run the container with a seccomp profile that allows io_uring_setup, {}", other));
  }
  if (error == ENOMEM) {
    throw Error(Errc::kIo, "io_uring", "the kernel has no memory for a ring: " + errno_text(error),
                fmt::format("raise the memlock limit (ulimit -l), {}", other));
  }
  throw Error(Errc::kIo, "io_uring", "a ring cannot be made: " + errno_text(error), other);
}

class UringQueue final : public Queue {
 public:
  UringQueue(int fd, int depth);
  ~UringQueue() override;

  void begin(const Block& block) override;
  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override;
  void wake() override;
  std::string register_memory(void* data, std::int64_t bytes) override;
  void unregister_memory(void* data) override;
  void end() override;
  std::string features() const override;

 private:
  struct Piece {  // one entry of the kernel's table
    char* begin;
    std::int64_t bytes;
    void* owner;  // what register_memory was called with
    int index;
  };

  void make_ring(unsigned entries);
  void await_wake();
  void enter(Clock::time_point deadline);
  void collect(std::vector<BlockDone>& done);
  int update(int index, void* data, std::int64_t bytes);
  const Piece* piece_of(const char* data, std::int64_t bytes) const;
  io_uring_sqe& next_sqe();

  io_uring ring_{};
  const int fd_;
  int wake_fd_ = -1;
  std::uint64_t wake_count_ = 0;  // the ring reads the eventfd into it
  bool fixed_file_ = false;
  bool deferred_ = false;
  bool complained_ = false;
  std::string no_table_;       // why there is no table of buffers
  std::vector<Piece> pieces_;  // by address
  std::vector<int> free_indices_;
};

UringQueue::UringQueue(int fd, int depth) : fd_(fd) {
  make_ring(static_cast<unsigned>(depth) + 1);  // and one for the eventfd
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  if (wake_fd_ < 0) {
    const int error = errno;
    io_uring_queue_exit(&ring_);
    throw Error(Errc::kIo, "io_uring", "no eventfd: " + errno_text(error),
                "raise the open files limit (ulimit -n)");
  }
  fixed_file_ = io_uring_register_files(&ring_, &fd_, 1) == 0;
  const int table = io_uring_register_buffers_sparse(&ring_, kMaxBuffers);
  if (table != 0) no_table_ = "this kernel has no sparse buffer table: " + errno_text(-table);
  for (int i = kMaxBuffers; i-- > 0;) free_indices_.push_back(i);
  await_wake();
}

UringQueue::~UringQueue() {
  io_uring_queue_exit(&ring_);
  close(wake_fd_);
}

// The kernel tears a ring down in its own time, and until then the file's space and the pages stay taken.
// Whatever is refused here goes then.
void UringQueue::end() {
  if (fixed_file_) io_uring_unregister_files(&ring_);
  if (no_table_.empty()) io_uring_unregister_buffers(&ring_);
}

void UringQueue::make_ring(unsigned entries) {
  // The first flags spare interrupts and locks (Linux 6.1); older kernels refuse what they do not know.
  int result = -EINVAL;
  for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0u}) {
    io_uring_params params{};
    params.flags = flags;
    result = io_uring_queue_init_params(entries, &ring_, &params);
    deferred_ = flags != 0;
    if (result != -EINVAL) break;
  }
  if (result < 0) throw_unavailable(-result);
  if ((ring_.features & IORING_FEAT_EXT_ARG) == 0 || (ring_.features & IORING_FEAT_NODROP) == 0) {
    io_uring_queue_exit(&ring_);
    throw_unavailable(ENOSYS);
  }
}

std::string UringQueue::features() const {
  std::string text = fixed_file_ ? "registered file" : "unregistered file";
  if (deferred_) text += ", deferred task work";
  return text;
}

// Never full: the ring has an entry for each block of the depth and one for the eventfd.
io_uring_sqe& UringQueue::next_sqe() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  ZG_ASSERT(sqe != nullptr, "the submission ring is full");
  return *sqe;
}

void UringQueue::await_wake() {
  io_uring_sqe& sqe = next_sqe();
  io_uring_prep_read(&sqe, wake_fd_, &wake_count_, sizeof(wake_count_), 0);
  sqe.user_data = kWakeTag;
}

void UringQueue::wake() {
  const std::uint64_t one = 1;
  ssize_t n = 0;
  do {
    n = write(wake_fd_, &one, sizeof(one));
  } while (n < 0 && errno == EINTR);
  ZG_ASSERT(n == sizeof(one), "eventfd: {}", errno_text(errno));
}

const UringQueue::Piece* UringQueue::piece_of(const char* data, std::int64_t bytes) const {
  auto it = std::upper_bound(pieces_.begin(), pieces_.end(), data,
                             [](const char* p, const Piece& piece) { return p < piece.begin; });
  if (it == pieces_.begin()) return nullptr;
  --it;
  return data + bytes <= it->begin + it->bytes ? &*it : nullptr;
}

void UringQueue::begin(const Block& block) {
  io_uring_sqe& sqe = next_sqe();
  const int fd = fixed_file_ ? 0 : fd_;
  const auto bytes = static_cast<unsigned>(block.bytes);
  const auto offset = static_cast<__u64>(block.offset);
  const Piece* piece = piece_of(block.data, block.bytes);
  if (block.op == Op::kRead && piece != nullptr) {
    io_uring_prep_read_fixed(&sqe, fd, block.data, bytes, offset, piece->index);
  } else if (block.op == Op::kRead) {
    io_uring_prep_read(&sqe, fd, block.data, bytes, offset);
  } else if (piece != nullptr) {
    io_uring_prep_write_fixed(&sqe, fd, block.data, bytes, offset, piece->index);
  } else {
    io_uring_prep_write(&sqe, fd, block.data, bytes, offset);
  }
  if (fixed_file_) sqe.flags |= IOSQE_FIXED_FILE;
  sqe.user_data = block.id;
}

void UringQueue::reap(std::vector<BlockDone>& done, Clock::time_point deadline) {
  enter(deadline);
  collect(done);
}

// Submits what begin() prepared and waits. What the kernel does not take now stays in the ring, and goes
// with the next call; it does not wait then, so nothing is left lying.
void UringQueue::enter(Clock::time_point deadline) {
  int result = 0;
  if (deadline == kForever) {
    result = io_uring_submit_and_wait(&ring_, 1);
  } else if (const auto left = deadline == kNoWait ? Clock::duration(0) : deadline - Clock::now();
             left.count() > 0) {
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    __kernel_timespec timeout{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    io_uring_cqe* cqe = nullptr;
    result = io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &timeout, nullptr);
  } else {
    result = io_uring_submit_and_get_events(&ring_);
  }
  if (result >= 0 || result == -EINTR || result == -ETIME) return;
  ZG_ASSERT(result == -EAGAIN || result == -EBUSY || result == -ENOMEM, "io_uring_enter: {}",
            errno_text(-result));
  if (!std::exchange(complained_, true))
    log::warning("io_uring_enter: {}; trying again", errno_text(-result));
  // Completions give memory back; where there are none, only time does.
  if (io_uring_cq_ready(&ring_) == 0) std::this_thread::sleep_for(kPause);
}

void UringQueue::collect(std::vector<BlockDone>& done) {
  unsigned head = 0, count = 0;
  bool woken = false;
  io_uring_cqe* cqe = nullptr;
  io_uring_for_each_cqe(&ring_, head, cqe) {
    ++count;
    if (cqe->user_data == kWakeTag) {
      woken = true;
    } else {
      done.push_back({static_cast<std::uint32_t>(cqe->user_data), cqe->res});
    }
  }
  io_uring_cq_advance(&ring_, count);
  if (woken) await_wake();
}

int UringQueue::update(int index, void* data, std::int64_t bytes) {
  const iovec entry{.iov_base = data, .iov_len = static_cast<std::size_t>(bytes)};
  const __u64 tag = 0;
  const int result =
      io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &entry, &tag, 1);
  return result == 1 ? 0 : result == 0 ? EINVAL : -result;
}

std::string UringQueue::register_memory(void* data, std::int64_t bytes) {
  if (!no_table_.empty()) return no_table_;
  for (std::int64_t at = 0; at < bytes; at += kMaxBufferBytes) {
    std::string refusal;
    const std::int64_t n = std::min(kMaxBufferBytes, bytes - at);
    char* begin = static_cast<char*>(data) + at;
    if (free_indices_.empty()) {
      refusal = fmt::format("the table's {} entries are taken", kMaxBuffers);
    } else if (const int error = update(free_indices_.back(), begin, n); error != 0) {
      refusal = fmt::format("{} refused: {}", format_bytes(n), errno_text(error));
      if (error == ENOMEM || error == EPERM) refusal += "; the memlock limit (ulimit -l) may be too low";
    }
    if (!refusal.empty()) {
      unregister_memory(data);
      return refusal;
    }
    const auto place = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                        [](const char* p, const Piece& piece) { return p < piece.begin; });
    pieces_.insert(place, {begin, n, data, free_indices_.back()});
    free_indices_.pop_back();
  }
  return {};
}

// Blocks in flight keep their buffer's entry alive in the kernel.
void UringQueue::unregister_memory(void* data) {
  std::erase_if(pieces_, [&](const Piece& piece) {
    if (piece.owner != data) return false;
    const int error = update(piece.index, nullptr, 0);
    ZG_ASSERT(error == 0, "unregistering a buffer: {}", errno_text(error));
    free_indices_.push_back(piece.index);
    return true;
  });
}

}  // namespace

std::unique_ptr<Queue> make_uring_queue(int fd, int depth, const UringOptions&) {
  return std::make_unique<UringQueue>(fd, depth);
}

}  // namespace zg::io
