// An io_uring with those of the wanted modes that work on this machine. features() says which do not, and
// why.
//
// Threads: only the thread that made it may use it, since the ring allows one submitter. Invariant: get() is
// a ring that works.
#pragma once
#include <liburing.h>

#include <memory>
#include <string>

#include "io/queue.hpp"

namespace zg::io {

class UringRing {
 public:
  // Throws Error(kIo) when there is no io_uring, or when a wanted mode does not work and options.require is
  // set. If `fd` is not negative, a read from it shows whether its drive can be polled. `sysfs`: see
  // unpolled_because().
  UringRing(int fd, unsigned entries, const UringOptions& options, const std::string& sysfs = "/sys");

  io_uring* get() const { return ring_.get(); }
  // Whether completions must be polled for. Such a ring can read and write the drive's file only, and no
  // eventfd.
  bool polled() const { return (modes_ & IORING_SETUP_IOPOLL) != 0; }
  // "SQPOLL, no IOPOLL (its drive has no polled queues)".
  std::string features() const;

 private:
  struct Exit {
    void operator()(io_uring* ring) const;
  };
  using Handle = std::unique_ptr<io_uring, Exit>;

  int make(unsigned modes);
  int try_enter() const;
  void try_mode(unsigned mode, std::string why_not, int fd, bool require);
  std::string cannot_poll(int fd) const;

  const unsigned entries_;
  Handle ring_;
  unsigned modes_ = 0;     // those in use
  bool deferred_ = false;  // DEFER_TASKRUN
  std::string lacks_;      // the wanted modes that do not work
};

// Why the completions of reads and writes of `fd` cannot be polled for, as far as can be known without
// trying; else empty. Tests pass another directory as `sysfs`, which describes other drives.
std::string unpolled_because(int fd, const std::string& sysfs = "/sys");

}  // namespace zg::io
