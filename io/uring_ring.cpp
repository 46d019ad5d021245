#include "io/uring_ring.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <thread>

#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

// How long the thread of SQPOLL looks for submissions before it sleeps and must be woken by a system call:
// longer than the gaps in a stream of blocks, but short enough to free the core between two streams.
constexpr unsigned kSqIdleMs = 20;

// The first word of a small file of the kernel's; empty if there is none.
std::string first_word_of(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

[[noreturn]] void throw_unavailable(int error) {
  const char* const other = "or take the back end \"libaio\" or \"threads\"";
  if (error == ENOSYS) {
    throw Error(Errc::kIo, "io_uring", "this kernel has none: " + errno_text(error),
                fmt::format("it needs Linux 5.11 or later, built with it; {}", other));
  }
  if (error == EPERM || error == EACCES) {
    const std::string disabled = first_word_of("/proc/sys/kernel/io_uring_disabled");
    if (!disabled.empty() && disabled[0] != '0') {
      throw Error(Errc::kIo, "io_uring", fmt::format("kernel.io_uring_disabled is {}", disabled[0]),
                  fmt::format("sysctl -w kernel.io_uring_disabled=0, {}", other));
    }
    throw Error(
        Errc::kIo, "io_uring", "forbidden, by a seccomp filter it seems: " + errno_text(error),
        fmt::format(
            "run the container with a seccomp profile that allows io_uring_setup and io_uring_enter, {}",
            other));
  }
  if (error == ENOMEM) {
    throw Error(Errc::kIo, "io_uring", "the kernel has no memory for a ring: " + errno_text(error),
                fmt::format("raise the memlock limit (ulimit -l), {}", other));
  }
  throw Error(Errc::kIo, "io_uring", "a ring cannot be made: " + errno_text(error), other);
}

const char* name_of_mode(unsigned mode) {
  return mode == IORING_SETUP_SQPOLL ? "SQPOLL" : "IOPOLL";
}

const char* hint_for_mode(unsigned mode) {
  return mode == IORING_SETUP_SQPOLL
             ? "Linux 5.13 or later, or CAP_SYS_NICE, gives it; or leave \"sqpoll\" out"
             : "load the driver with polled queues (nvme.poll_queues=4 on the kernel's command line), or "
               "leave \"iopoll\" out";
}

}  // namespace

std::string unpolled_because(int fd, const std::string& sysfs) {
  if ((fcntl(fd, F_GETFL) & O_DIRECT) == 0) return "its file is not open with O_DIRECT";
  struct stat info {};
  if (fstat(fd, &info) != 0) return "fstat: " + errno_text(errno);
  const dev_t device = S_ISBLK(info.st_mode) ? info.st_rdev : info.st_dev;
  const std::string block = fmt::format("{}/dev/block/{}:{}", sysfs, major(device), minor(device));
  // Kernels from 5.16 to 6.10 accept polled requests for any drive, but complete them by an interrupt while
  // the caller spins. So the drive itself is asked.
  for (const char* queue : {"/queue/io_poll", "/../queue/io_poll"}) {  // a partition has that of its disk
    const std::string polled = first_word_of(block + queue);
    if (!polled.empty()) return polled[0] == '0' ? "its drive has no polled queues" : "";
  }
  return {};
}

void UringRing::Exit::operator()(io_uring* ring) const {
  io_uring_queue_exit(ring);
  delete ring;
}

// Makes a plain ring first and then tries each mode by itself, so that a failure says whether io_uring or the
// mode does not work.
UringRing::UringRing(int fd, unsigned entries, const UringOptions& options, const std::string& sysfs)
    : entries_(entries) {
  if (const int error = make(0); error != 0) throw_unavailable(error);
  if ((ring_->features & IORING_FEAT_EXT_ARG) == 0 || (ring_->features & IORING_FEAT_NODROP) == 0)
    throw_unavailable(ENOSYS);
  if (const int error = try_enter(); error != 0) throw_unavailable(error);
  if (options.sqpoll) try_mode(IORING_SETUP_SQPOLL, "", fd, options.require);
  if (options.iopoll)
    try_mode(IORING_SETUP_IOPOLL, fd >= 0 ? unpolled_because(fd, sysfs) : "", fd, options.require);
}

// Replaces the ring by one with these modes. Returns 0, or an errno, and then there is no ring.
int UringRing::make(unsigned modes) {
  ring_.reset();
  // kDeferred saves interrupts and locks. It needs Linux 6.1, older kernels refuse it, and it excludes
  // SQPOLL.
  constexpr unsigned kDeferred = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  int result = -EINVAL;
  for (const unsigned flags : {kDeferred, 0u}) {
    if (flags != 0 && (modes & IORING_SETUP_SQPOLL) != 0) continue;
    io_uring_params params{};
    params.flags = flags | modes;
    params.sq_thread_idle = kSqIdleMs;
    auto ring = std::make_unique<io_uring>();
    result = io_uring_queue_init_params(entries_, ring.get(), &params);
    if (result == 0) ring_ = Handle(ring.release());
    deferred_ = flags != 0;
    if (result != -EINVAL) break;
  }
  return -result;
}

// Enters the kernel once, since a sandbox may allow to make a ring and forbid to use it. Returns 0 or an
// errno.
int UringRing::try_enter() const {
  io_uring_prep_nop(io_uring_get_sqe(get()));
  io_uring_cqe* cqe = nullptr;
  for (int tries = 0; io_uring_peek_cqe(get(), &cqe) != 0; ++tries) {
    constexpr int kTries = 100;  // while the kernel has no memory
    const int result = io_uring_submit_and_wait(get(), 1);
    if (result >= 0 || result == -EINTR) continue;
    if ((result != -EAGAIN && result != -EBUSY && result != -ENOMEM) || tries >= kTries) return -result;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  io_uring_cqe_seen(get(), cqe);
  return 0;
}

// Adds a mode to the ring, unless `why_not` says beforehand that it cannot work.
void UringRing::try_mode(unsigned mode, std::string why_not, int fd, bool require) {
  if (why_not.empty()) {
    const int error = make(modes_ | mode);
    if (error != 0) why_not = errno_text(error);
    if (error == 0 && mode == IORING_SETUP_IOPOLL && fd >= 0) why_not = cannot_poll(fd);
    if (why_not.empty()) {
      modes_ |= mode;
      return;
    }
    if (const int lost = make(modes_); lost != 0) throw_unavailable(lost);
  }
  if (require) {
    throw Error(Errc::kIo, "io_uring",
                fmt::format("{} is required and not to be had: {}", name_of_mode(mode), why_not),
                hint_for_mode(mode));
  }
  lacks_ += fmt::format("{}no {} ({})", lacks_.empty() ? "" : ", ", name_of_mode(mode), why_not);
}

// Tries one read, since a drive or file system that cannot be polled refuses only the requests. Empty: it
// works.
std::string UringRing::cannot_poll(int fd) const {
  alignas(4096) static thread_local char page[Engine::alignment()];
  io_uring_prep_read(io_uring_get_sqe(get()), fd, page, sizeof(page), 0);
  io_uring_cqe* cqe = nullptr;
  while (io_uring_peek_cqe(get(), &cqe) != 0) {
    const int result = io_uring_submit_and_get_events(get());
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY)
      return "a read that is polled for: " + errno_text(-result);
  }
  const int result = cqe->res;
  io_uring_cqe_seen(get(), cqe);
  return result < 0 ? "a read that is polled for: " + errno_text(-result) : std::string();
}

std::string UringRing::features() const {
  std::string text;
  const auto add = [&](const std::string& feature) { text += (text.empty() ? "" : ", ") + feature; };
  if (deferred_) add("deferred task work");
  for (const unsigned mode : {IORING_SETUP_SQPOLL, IORING_SETUP_IOPOLL}) {
    if ((modes_ & mode) != 0) add(name_of_mode(mode));
  }
  if (!lacks_.empty()) add(lacks_);
  return text;
}

}  // namespace zg::io
