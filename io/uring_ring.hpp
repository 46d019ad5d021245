// An io_uring as the options ask for it, or as near to that as this machine comes; it says what it lacks.
//
// Threads: all on the thread that made it (the ring's one submitter). Invariant: get() is a ring that works.
#pragma once
#include <liburing.h>

#include <memory>
#include <string>

#include "io/queue.hpp"

namespace zg::io {

class UringRing {
 public:
  // Throws Error(kIo) where there is no io_uring, or where `options.require` and a mode is not to be had.
  // `fd`, if not negative, is read from to see whether its drive can be polled. `sysfs`: see
  // unpolled_because().
  UringRing(int fd, unsigned entries, const UringOptions& options, const std::string& sysfs = "/sys");

  io_uring* get() const { return ring_.get(); }
  // Completions must be asked for, since no interrupt brings them; and only the drive's file can be read.
  bool polled() const { return (modes_ & IORING_SETUP_IOPOLL) != 0; }
  // "SQPOLL, no IOPOLL (its drive has no polled queues)".
  std::string features() const;

 private:
  struct Exit {
    void operator()(io_uring* ring) const;
  };
  using Handle = std::unique_ptr<io_uring, Exit>;

  int make(unsigned modes);
  void ask_for(unsigned mode, std::string why_not, int fd, bool require);
  std::string cannot_poll(int fd) const;

  const unsigned entries_;
  Handle ring_;
  unsigned modes_ = 0;     // that were asked for and are had
  bool deferred_ = false;  // DEFER_TASKRUN
  std::string lacks_;
};

// Why reads and writes of `fd` cannot be polled for, as far as that is known without trying; else empty.
// `sysfs` can be another directory, so that drives that are not here can be tested.
std::string unpolled_because(int fd, const std::string& sysfs = "/sys");

}  // namespace zg::io
