// Blocks through io_uring: one ring per queue, with the file registered, and buffers as far as the kernel and
// the memlock limit allow. wake() writes to an eventfd that the ring itself reads, so that one wait covers
// blocks and wake-ups. A polled ring (IOPOLL) can read only the drive; there reap() spins while blocks are in
// flight.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>

#include "io/clock.hpp"
#include "io/owned_fd.hpp"
#include "io/queue.hpp"
#include "io/uring_ring.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr unsigned kMaxBuffers = 1024;                 // entries of the table of registered buffers
constexpr std::int64_t kMaxBufferBytes = kGiB;         // the kernel's limit for one entry
constexpr auto kPause = std::chrono::milliseconds(1);  // between tries, while the kernel has no memory

class UringQueue final : public Queue {
 public:
  UringQueue(int fd, int depth, const UringOptions& options);

  void begin(const Block& block) override;
  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override;
  void wake() override;
  std::string register_memory(void* data, std::int64_t bytes) override;
  void unregister_memory(void* data) override;
  void end() override;
  std::string features() const override;

 private:
  struct Registered {  // one entry of the kernel's table of buffers
    std::int64_t bytes;
    void* memory;  // the address passed to register_memory()
    int index;
  };

  void register_all();
  void await_wake();
  void enter(Clock::time_point deadline);
  void spin(Clock::time_point deadline);
  void sleep_until_woken(Clock::time_point deadline) const;
  void check(int result);
  void collect(std::vector<BlockDone>& done);
  int update(int index, void* data, std::int64_t bytes);
  const Registered* buffer_of(const char* data, std::int64_t bytes) const;
  io_uring_sqe& next_sqe();

  const UringRing made_;
  io_uring* const ring_;
  const int fd_;
  const bool registered_;  // as far as the kernel allows it
  const bool spins_;
  const OwnedFd wake_fd_;
  std::uint64_t wake_count_ = 0;    // the ring reads the eventfd into it
  std::atomic<bool> woken_{false};  // tells a spinning reap() of a wake-up
  int in_flight_ = 0;
  bool fixed_file_ = false;
  bool awaits_wake_ = false;  // the eventfd is being read
  bool ended_ = false;
  bool warned_ = false;
  std::string no_table_;                       // why there is no table of buffers
  std::map<const char*, Registered> buffers_;  // by their first byte
  std::vector<int> free_indices_;
};

OwnedFd make_eventfd() {
  OwnedFd fd(eventfd(0, EFD_CLOEXEC));
  if (!fd) {
    throw Error(Errc::kIo, "io_uring", "no eventfd: " + errno_text(errno),
                "raise the open files limit (ulimit -n)");
  }
  return fd;
}

UringQueue::UringQueue(int fd, int depth, const UringOptions& options)
    : made_(fd, static_cast<unsigned>(depth) + 1, options),  // one for the eventfd
      ring_(made_.get()),
      fd_(fd),
      registered_(options.registered),
      spins_(made_.polled() || options.spin),
      wake_fd_(make_eventfd()) {
  if (registered_) register_all();
  if (!spins_) await_wake();
}

void UringQueue::register_all() {
  fixed_file_ = io_uring_register_files(ring_, &fd_, 1) == 0;
  const int table = io_uring_register_buffers_sparse(ring_, kMaxBuffers);
  if (table != 0) no_table_ = "this kernel has no sparse buffer table: " + errno_text(-table);
  for (int i = kMaxBuffers; i-- > 0;) free_indices_.push_back(i);
}

// The kernel destroys a ring some time after it was closed, and until then the file's space and the
// registered pages stay in use. So both are unregistered here; where that is refused, they are released with
// the ring.
void UringQueue::end() {
  // The read of the eventfd must complete first, since it writes into this object.
  ended_ = true;
  if (!spins_) wake();
  for (std::vector<BlockDone> none; awaits_wake_;) {
    enter(kForever);
    collect(none);
  }
  if (fixed_file_) io_uring_unregister_files(ring_);
  if (registered_ && no_table_.empty()) io_uring_unregister_buffers(ring_);
}

std::string UringQueue::features() const {
  std::string text = fixed_file_   ? "registered file"
                     : registered_ ? "unregistered file"
                                   : "nothing registered";
  if (const std::string ring = made_.features(); !ring.empty()) text += ", " + ring;
  return text;
}

// The ring has an entry for each block of the depth and one for the eventfd, so it is never full. With SQPOLL
// it can be for a moment, since the kernel's thread returns entries only after a whole batch.
io_uring_sqe& UringQueue::next_sqe() {
  io_uring_sqe* sqe = io_uring_get_sqe(ring_);
  while (sqe == nullptr) {
    ZG_ASSERT((ring_->flags & IORING_SETUP_SQPOLL) != 0, "the submission ring is full");
    check(io_uring_submit(ring_));  // the thread may sleep
    check(io_uring_sqring_wait(ring_));
    sqe = io_uring_get_sqe(ring_);
  }
  return *sqe;
}

void UringQueue::await_wake() {
  io_uring_sqe& sqe = next_sqe();
  io_uring_prep_read(&sqe, wake_fd_.get(), &wake_count_, sizeof(wake_count_), 0);
  sqe.user_data = kWakeTag;
  awaits_wake_ = true;
}

void UringQueue::wake() {
  woken_ = true;
  const std::uint64_t one = 1;
  ssize_t n = 0;
  do {
    n = write(wake_fd_.get(), &one, sizeof(one));
  } while (n < 0 && errno == EINTR);
  ZG_ASSERT(n == sizeof(one), "eventfd: {}", errno_text(errno));
}

// The registered buffer that holds all these bytes; null: none does.
const UringQueue::Registered* UringQueue::buffer_of(const char* data, std::int64_t bytes) const {
  auto it = buffers_.upper_bound(data);
  if (it == buffers_.begin()) return nullptr;
  --it;
  return data + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
}

void UringQueue::begin(const Block& block) {
  io_uring_sqe& sqe = next_sqe();
  const int fd = fixed_file_ ? 0 : fd_;
  const auto bytes = static_cast<unsigned>(block.bytes);
  const auto offset = static_cast<__u64>(block.offset);
  const Registered* buffer = buffer_of(block.data, block.bytes);
  if (block.op == Op::kRead && buffer != nullptr) {
    io_uring_prep_read_fixed(&sqe, fd, block.data, bytes, offset, buffer->index);
  } else if (block.op == Op::kRead) {
    io_uring_prep_read(&sqe, fd, block.data, bytes, offset);
  } else if (buffer != nullptr) {
    io_uring_prep_write_fixed(&sqe, fd, block.data, bytes, offset, buffer->index);
  } else {
    io_uring_prep_write(&sqe, fd, block.data, bytes, offset);
  }
  if (fixed_file_) sqe.flags |= IOSQE_FIXED_FILE;
  sqe.user_data = block.id;
  ++in_flight_;
}

void UringQueue::reap(std::vector<BlockDone>& done, Clock::time_point deadline) {
  if (spins_) {
    spin(deadline);
  } else {
    enter(deadline);
  }
  collect(done);
}

// Submits what begin() has prepared, and waits. If the kernel does not accept all of it, it does not wait
// either; so the rest, which stays in the ring, is submitted by the next call soon.
void UringQueue::enter(Clock::time_point deadline) {
  int result = 0;
  if (deadline == kForever) {
    result = io_uring_submit_and_wait(ring_, 1);
  } else if (const auto left = deadline == kNoWait ? Clock::duration(0) : deadline - Clock::now();
             left.count() > 0) {
    auto timeout = timespec_of<__kernel_timespec>(left);
    io_uring_cqe* cqe = nullptr;
    result = io_uring_submit_and_wait_timeout(ring_, &cqe, 1, &timeout, nullptr);
  } else {
    result = io_uring_submit_and_get_events(ring_);
  }
  check(result);
}

// Submits, and polls until a block is done. While no block is in flight it sleeps instead.
void UringQueue::spin(Clock::time_point deadline) {
  while (true) {
    check(io_uring_submit_and_get_events(ring_));
    if (woken_.exchange(false) || io_uring_cq_ready(ring_) > 0) return;
    if (deadline != kForever && Clock::now() >= deadline) return;
    if (in_flight_ == 0) {
      sleep_until_woken(deadline);
    } else {
      std::this_thread::yield();  // lets other threads work, where cores are few
    }
  }
}

// The eventfd may still hold a wake-up that woken_ has reported already. That costs one more turn of spin(),
// no more.
void UringQueue::sleep_until_woken(Clock::time_point deadline) const {
  timespec left{};
  if (deadline != kForever) {
    const Clock::time_point now = Clock::now();
    if (deadline <= now) return;
    left = timespec_of(deadline - now);
  }
  pollfd wanted{.fd = wake_fd_.get(), .events = POLLIN, .revents = 0};
  if (ppoll(&wanted, 1, deadline == kForever ? nullptr : &left, nullptr) <= 0) return;
  std::uint64_t count = 0;
  const ssize_t n = read(wake_fd_.get(), &count, sizeof(count));
  ZG_ASSERT(n == sizeof(count) || errno == EINTR, "eventfd: {}", errno_text(errno));
}

// Looks at the result of io_uring_enter. When the kernel had no memory, the next reap() tries again.
void UringQueue::check(int result) {
  if (result >= 0 || result == -EINTR || result == -ETIME) return;
  ZG_ASSERT(result == -EAGAIN || result == -EBUSY || result == -ENOMEM, "io_uring_enter: {}",
            errno_text(-result));
  if (!std::exchange(warned_, true)) log::warning("io_uring_enter: {}; trying again", errno_text(-result));
  // Completions free memory; where there are none, all that can help is to wait.
  io_uring_get_events(ring_);
  if (io_uring_cq_ready(ring_) == 0) std::this_thread::sleep_for(kPause);
}

void UringQueue::collect(std::vector<BlockDone>& done) {
  unsigned head = 0, count = 0;
  io_uring_cqe* cqe = nullptr;
  io_uring_for_each_cqe(ring_, head, cqe) {
    ++count;
    if (cqe->user_data == kWakeTag) {
      awaits_wake_ = false;
    } else {
      done.push_back({static_cast<std::uint32_t>(cqe->user_data), cqe->res});
      --in_flight_;
    }
  }
  io_uring_cq_advance(ring_, count);
  if (!awaits_wake_ && !spins_ && !ended_) await_wake();
}

int UringQueue::update(int index, void* data, std::int64_t bytes) {
  const iovec entry{.iov_base = data, .iov_len = static_cast<std::size_t>(bytes)};
  const __u64 tag = 0;
  const int result =
      io_uring_register_buffers_update_tag(ring_, static_cast<unsigned>(index), &entry, &tag, 1);
  return result == 1 ? 0 : result == 0 ? EINVAL : -result;
}

std::string UringQueue::register_memory(void* data, std::int64_t bytes) {
  if (!registered_) return "registration is switched off";
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
    buffers_[begin] = {.bytes = n, .memory = data, .index = free_indices_.back()};
    free_indices_.pop_back();
  }
  return {};
}

// Blocks that the kernel has accepted keep their buffer's entry alive, but those still in the ring would not
// find it. So all are submitted first.
void UringQueue::unregister_memory(void* data) {
  while (io_uring_sq_ready(ring_) > 0) {
    check(io_uring_submit(ring_));
    if (io_uring_sq_ready(ring_) > 0) std::this_thread::yield();  // the thread of SQPOLL will take them
  }
  std::erase_if(buffers_, [&](const auto& entry) {
    const Registered& buffer = entry.second;
    if (buffer.memory != data) return false;
    int error = 0;
    while ((error = update(buffer.index, nullptr, 0)) == EINTR || error == ENOMEM)
      std::this_thread::sleep_for(kPause);
    ZG_ASSERT(error == 0, "unregistering a buffer: {}", errno_text(error));
    free_indices_.push_back(buffer.index);
    return true;
  });
}

}  // namespace

std::unique_ptr<Queue> make_uring_queue(int fd, int depth, const UringOptions& options) {
  return std::make_unique<UringQueue>(fd, depth, options);
}

}  // namespace zg::io
