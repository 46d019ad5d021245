// Blocks through io_uring: one ring per queue, registered file, registered buffers where the kernel and the
// memlock limit allow. wake() is an eventfd that the ring itself reads, so that one wait covers all; a polled
// ring (IOPOLL) can read nothing but the drive, and so is asked again and again while blocks are in flight.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>

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
constexpr auto kPause = std::chrono::milliseconds(1);  // before asking again a kernel short of memory

class UringQueue final : public Queue {
 public:
  UringQueue(int fd, int depth, const UringOptions& options);
  ~UringQueue() override { close(wake_fd_); }

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

  void register_all();
  void await_wake();
  void enter(Clock::time_point deadline);
  void spin(Clock::time_point deadline);
  void sleep_until_woken(Clock::time_point deadline) const;
  void check(int result);
  void collect(std::vector<BlockDone>& done);
  int update(int index, void* data, std::int64_t bytes);
  const Piece* piece_of(const char* data, std::int64_t bytes) const;
  io_uring_sqe& next_sqe();

  const UringRing made_;
  io_uring* const ring_;
  const int fd_;
  const bool registered_;  // as far as the kernel gives it
  const bool spins_;
  const int wake_fd_;
  std::uint64_t wake_count_ = 0;    // the ring reads the eventfd into it
  std::atomic<bool> woken_{false};  // what a spinning reap() looks at
  int in_flight_ = 0;
  bool fixed_file_ = false;
  bool awaits_wake_ = false;  // the eventfd is being read
  bool ended_ = false;
  bool complained_ = false;
  std::string no_table_;       // why there is no table of buffers
  std::vector<Piece> pieces_;  // by address
  std::vector<int> free_indices_;
};

int make_eventfd() {
  const int fd = eventfd(0, EFD_CLOEXEC);
  if (fd < 0) {
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

// The kernel tears a ring down in its own time, and until then the file's space and the pages stay taken.
// Whatever is refused here goes then.
void UringQueue::end() {
  // The eventfd's read too must be over: it would still write into this object.
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

// An entry for each block of the depth and one for the eventfd: never full, but for a moment where the thread
// of SQPOLL gives back what it took only when its batch is through.
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
  io_uring_prep_read(&sqe, wake_fd_, &wake_count_, sizeof(wake_count_), 0);
  sqe.user_data = kWakeTag;
  awaits_wake_ = true;
}

void UringQueue::wake() {
  woken_ = true;
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

// Submits what begin() prepared and waits. What the kernel does not take now stays in the ring, and goes
// with the next call; it does not wait then, so nothing is left lying.
void UringQueue::enter(Clock::time_point deadline) {
  int result = 0;
  if (deadline == kForever) {
    result = io_uring_submit_and_wait(ring_, 1);
  } else if (const auto left = deadline == kNoWait ? Clock::duration(0) : deadline - Clock::now();
             left.count() > 0) {
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    __kernel_timespec timeout{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    io_uring_cqe* cqe = nullptr;
    result = io_uring_submit_and_wait_timeout(ring_, &cqe, 1, &timeout, nullptr);
  } else {
    result = io_uring_submit_and_get_events(ring_);
  }
  check(result);
}

// Submits, and asks until something is done; where nothing is in flight there is nothing to ask for, and it
// sleeps.
void UringQueue::spin(Clock::time_point deadline) {
  while (true) {
    check(io_uring_submit_and_get_events(ring_));
    if (woken_.exchange(false) || io_uring_cq_ready(ring_) > 0) return;
    if (deadline != kForever && Clock::now() >= deadline) return;
    if (in_flight_ == 0) {
      sleep_until_woken(deadline);
    } else {
      std::this_thread::yield();  // to whoever has work, where cores are few
    }
  }
}

// The eventfd may hold a wake() that was seen by woken_ already: one turn more, and nothing is lost.
void UringQueue::sleep_until_woken(Clock::time_point deadline) const {
  timespec left{};
  if (deadline != kForever) {
    const auto ns = std::chrono::nanoseconds(deadline - Clock::now()).count();
    if (ns <= 0) return;
    left = {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  }
  pollfd wanted{.fd = wake_fd_, .events = POLLIN, .revents = 0};
  if (ppoll(&wanted, 1, deadline == kForever ? nullptr : &left, nullptr) <= 0) return;
  std::uint64_t count = 0;
  const ssize_t n = read(wake_fd_, &count, sizeof(count));
  ZG_ASSERT(n == sizeof(count) || errno == EINTR, "eventfd: {}", errno_text(errno));
}

// What io_uring_enter says. Short of memory it is asked again, by the next reap().
void UringQueue::check(int result) {
  if (result >= 0 || result == -EINTR || result == -ETIME) return;
  ZG_ASSERT(result == -EAGAIN || result == -EBUSY || result == -ENOMEM, "io_uring_enter: {}",
            errno_text(-result));
  if (!std::exchange(complained_, true))
    log::warning("io_uring_enter: {}; trying again", errno_text(-result));
  // Completions give memory back; where there are none, only time does.
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
    const auto place = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                        [](const char* p, const Piece& piece) { return p < piece.begin; });
    pieces_.insert(place, {begin, n, data, free_indices_.back()});
    free_indices_.pop_back();
  }
  return {};
}

// Blocks that the kernel has taken keep their buffer's entry alive; those that it has not would not find it.
void UringQueue::unregister_memory(void* data) {
  while (io_uring_sq_ready(ring_) > 0) {
    check(io_uring_submit(ring_));
    if (io_uring_sq_ready(ring_) > 0) std::this_thread::yield();  // SQPOLL: its thread is on its way
  }
  std::erase_if(pieces_, [&](const Piece& piece) {
    if (piece.owner != data) return false;
    int error = 0;
    while ((error = update(piece.index, nullptr, 0)) == EINTR || error == ENOMEM)
      std::this_thread::sleep_for(kPause);
    ZG_ASSERT(error == 0, "unregistering a buffer: {}", errno_text(error));
    free_indices_.push_back(piece.index);
    return true;
  });
}

}  // namespace

std::unique_ptr<Queue> make_uring_queue(int fd, int depth, const UringOptions& options) {
  return std::make_unique<UringQueue>(fd, depth, options);
}

}  // namespace zg::io
