// Blocks through the kernel's AIO (libaio): one context per queue, and one io_submit for all blocks begun
// since the last reap().
//
// wake() submits a read of 0 bytes from /dev/null. It completes at once, and its event ends the wait as that
// of a block does. So a wait is a single io_getevents, on every kernel that has AIO. An eventfd would be no
// better: IOCB_CMD_POLL needs Linux 4.19, and the older IOCB_FLAG_RESFD costs one more poll() and read() for
// each wait.
#include "io/aio_queue.hpp"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <thread>
#include <utility>

#include "io/clock.hpp"
#include "io/owned_fd.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::io {
namespace {

constexpr auto kPause = std::chrono::milliseconds(1);  // between tries, while the kernel has no memory

std::int64_t number_in(const char* path) {
  std::int64_t number = -1;
  std::ifstream(path) >> number;
  return number;
}

OwnedFd open_null() {
  OwnedFd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!fd) throw Error(Errc::kIo, "libaio", "cannot open /dev/null: " + errno_text(errno));
  return fd;
}

class AioQueue final : public Queue {
 public:
  AioQueue(int fd, int depth, AioCalls calls);
  ~AioQueue() override;

  void begin(const Block& block) override;
  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override;
  void wake() override;
  void end() override;
  std::string features() const override;

 private:
  int submit_wake();
  void submit_pending(std::vector<BlockDone>& done);
  void collect(std::vector<BlockDone>& done, Clock::time_point deadline);

  const AioCalls calls_;
  const int fd_;
  const OwnedFd null_fd_;
  io_context_t context_ = nullptr;
  std::vector<iocb> iocbs_;       // by block id
  std::vector<iocb*> pending_;    // begun, but not yet accepted by io_submit; in order
  std::vector<io_event> events_;  // filled by io_getevents
  iocb wake_iocb_{};
  std::atomic<bool> woken_{false};  // a wake-up was submitted, and its event not yet collected
  int in_flight_ = 0;
  bool warned_ = false;
  bool ended_ = false;
};

// The context has room for one event more than there are blocks: the wake-up's.
AioQueue::AioQueue(int fd, int depth, AioCalls calls)
    : calls_(std::move(calls)),
      fd_(fd),
      null_fd_(open_null()),
      iocbs_(static_cast<std::size_t>(depth)),
      events_(iocbs_.size() + 1) {
  pending_.reserve(iocbs_.size());
  const int events = static_cast<int>(events_.size());
  if (const int result = calls_.setup(events, &context_); result != 0) throw aio_setup_error(-result, events);
  io_prep_pread(&wake_iocb_, null_fd_.get(), nullptr, 0, 0);
  // Tried here, since a sandbox may allow io_setup and forbid io_submit.
  if (const int result = submit_wake(); result != 1) {
    io_destroy(context_);
    throw Error(Errc::kIo, "libaio", "io_submit does not work: " + errno_text(-result),
                "take the back end \"io_uring\" or \"threads\"");
  }
  int n = 0;
  do {
    n = io_getevents(context_, 1, 1, events_.data(), nullptr);
  } while (n == -EINTR);
  if (n != 1) {
    io_destroy(context_);
    throw Error(Errc::kIo, "libaio", "io_getevents does not work: " + errno_text(-n),
                "take the back end \"io_uring\" or \"threads\"");
  }
}

AioQueue::~AioQueue() {
  if (!ended_) io_destroy(context_);  // waits for the blocks in flight
}

// Sets woken_ for good, so that no wake() touches the context from here on. A wake() that had found it clear
// has submitted, or will submit, its event; the loop waits for that.
void AioQueue::end() {
  std::vector<BlockDone> none;
  while (woken_.exchange(true)) collect(none, kForever);
  io_destroy(context_);
  ended_ = true;
}

std::string AioQueue::features() const {
  const int flags = fcntl(fd_, F_GETFL);
  const bool buffered = flags >= 0 && (flags & O_DIRECT) == 0;
  return buffered ? "io_submit in batches, each waiting for its blocks (no O_DIRECT)"
                  : "io_submit in batches";
}

void AioQueue::begin(const Block& block) {
  ZG_ASSERT_LT(block.id, iocbs_.size());
  iocb& request = iocbs_[block.id];
  const auto bytes = static_cast<std::size_t>(block.bytes);
  if (block.op == Op::kRead) {
    io_prep_pread(&request, fd_, block.data, bytes, block.offset);
  } else {
    io_prep_pwrite(&request, fd_, block.data, bytes, block.offset);
  }
  pending_.push_back(&request);
}

void AioQueue::reap(std::vector<BlockDone>& done, Clock::time_point deadline) {
  const std::size_t before = done.size();
  submit_pending(done);
  if (done.size() > before) {
    deadline = kNoWait;
  } else if (!pending_.empty() && in_flight_ == 0) {
    // No block is in flight whose completion could make room, so all that can help is to wait.
    if (!std::exchange(warned_, true)) log::warning("io_submit: {}; trying again", errno_text(EAGAIN));
    deadline = std::min(deadline, Clock::now() + kPause);
  }
  collect(done, deadline);
}

// io_submit accepts blocks in order, and may stop early. The next call then begins with the block that it
// stopped at, and returns the reason.
void AioQueue::submit_pending(std::vector<BlockDone>& done) {
  std::size_t taken = 0;
  while (taken < pending_.size()) {
    const int n = calls_.submit(context_, static_cast<long>(pending_.size() - taken), &pending_[taken]);
    if (n == 0 || n == -EAGAIN) break;  // completions must make room first
    if (n > 0) {
      taken += static_cast<std::size_t>(n);
      in_flight_ += n;
    } else if (n != -EINTR) {
      done.push_back({static_cast<std::uint32_t>(pending_[taken++] - iocbs_.data()), n});
    }
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(taken));
}

void AioQueue::collect(std::vector<BlockDone>& done, Clock::time_point deadline) {
  timespec left{};
  if (deadline != kForever && deadline != kNoWait) left = timespec_of(deadline - Clock::now());
  const int n = io_getevents(context_, deadline == kNoWait ? 0 : 1, static_cast<long>(events_.size()),
                             events_.data(), deadline == kForever ? nullptr : &left);
  ZG_ASSERT(n >= 0 || n == -EINTR, "io_getevents: {}", errno_text(-n));
  for (int i = 0; i < n; ++i) {
    const io_event& event = events_[static_cast<std::size_t>(i)];
    if (event.obj == &wake_iocb_) {
      // A read-modify-write, so that this thread sees all that was written before each wake() that found the
      // flag set and left it to this event.
      woken_.exchange(false);
    } else {
      --in_flight_;
      done.push_back({static_cast<std::uint32_t>(event.obj - iocbs_.data()),
                      static_cast<std::int64_t>(event.res)});  // unsigned, but may hold a negative errno
    }
  }
}

int AioQueue::submit_wake() {
  iocb* request = &wake_iocb_;
  int n = 0;
  while ((n = io_submit(context_, 1, &request)) == -EAGAIN || n == -EINTR)
    std::this_thread::sleep_for(kPause);
  return n;
}

void AioQueue::wake() {
  if (woken_.exchange(true)) return;
  const int n = submit_wake();
  ZG_ASSERT(n == 1, "io_submit of a wake-up: {}", errno_text(-n));
}

}  // namespace

Error aio_setup_error(int error, int events) {
  const char* const other = "or take the back end \"io_uring\" or \"threads\"";
  if (error == EAGAIN) {
    return Error(
        Errc::kIo, "libaio",
        fmt::format("the machine's limit of asynchronous requests is reached: {} more are asked for, and "
                    "of fs.aio-max-nr = {} there are {} taken",
                    events, number_in("/proc/sys/fs/aio-max-nr"), number_in("/proc/sys/fs/aio-nr")),
        fmt::format("sysctl -w fs.aio-max-nr=1048576, a smaller \"queue_depth\", {}", other));
  }
  if (error == ENOSYS) {
    return Error(Errc::kIo, "libaio", "this kernel is built without it: " + errno_text(error),
                 fmt::format("CONFIG_AIO builds it in, {}", other));
  }
  if (error == EPERM || error == EACCES) {
    return Error(Errc::kIo, "libaio", "forbidden, by a seccomp filter it seems: " + errno_text(error),
                 fmt::format("run the container with a seccomp profile that allows io_setup, {}", other));
  }
  return Error(Errc::kIo, "libaio",
               fmt::format("no context for {} requests can be made: {}", events, errno_text(error)), other);
}

std::unique_ptr<Queue> make_aio_queue(int fd, int depth, AioCalls calls) {
  return std::make_unique<AioQueue>(fd, depth, std::move(calls));
}

std::unique_ptr<Queue> make_aio_queue(int fd, int depth) {
  return make_aio_queue(fd, depth, AioCalls());
}

}  // namespace zg::io
