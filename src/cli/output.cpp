#include "cli/output.hpp"

#include <poll.h>
#include <stdio_ext.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "ziggurat/base/error.hpp"

namespace zg::cli {
namespace {

// True where stdout is a pipe or socket whose other end is closed.
bool nobody_reads() {
  pollfd output{STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&output, 1, 0) == 1 && (output.revents & (POLLERR | POLLHUP)) != 0;
}

}  // namespace

void buffer_output() {
  static char buffer[1 << 20];
  if (::isatty(STDOUT_FILENO) == 0) (void)std::setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
}

void flush_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  const int error = errno;  // 0: an earlier write failed, and its errno is lost
  std::clearerr(stdout);
  __fpurge(stdout);
  if (error == EPIPE || (error == 0 && nobody_reads())) throw OutputClosed();
  const char* const hint = error == EBADF ? "stdout is closed: do not start the command with >&-"
                                          : "make room where it goes, or send it elsewhere";
  throw Error(Errc::kIo, "stdout",
              "what the command says cannot be written" + (error == 0 ? "" : ": " + errno_text(error)), hint);
}

}  // namespace zg::cli
