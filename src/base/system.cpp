#include "ziggurat/base/system.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "ziggurat/base/failure.hpp"

namespace zg {
namespace {

// Written by signal handlers, which may use nothing but lock-free atomics.
std::atomic<bool> is_interrupted{false};
std::atomic<int> demands{0};  // to end, by a signal that ends the process when it comes again
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

extern "C" void on_demand(int) {
  is_interrupted = true;
  if (demands.fetch_add(1) >= 1) end_at_once(130);
}

// A shell sends SIGHUP again after the terminal has, and the kernel sends SIGXCPU every second.
extern "C" void on_request(int) {
  is_interrupted = true;
}

// A function, and not SIG_IGN, which programs that are started would inherit.
extern "C" void on_failed_write(int) {}

void take(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  // A sandbox may refuse it; then the signal ends the process, as it does by itself.
  (void)sigaction(signal, &action, nullptr);
}

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

void open_standard_streams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    // Gets the lowest number that is free, which is this one.
    (void)open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY);
  }
}

void install_interrupt_handler() {
  take(SIGINT, on_demand);
  take(SIGTERM, on_demand);
  for (const int signal : {SIGHUP, SIGXCPU}) {
    if (!is_ignored(signal)) take(signal, on_request);
  }
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    if (!is_ignored(signal)) take(signal, on_failed_write);
  }
}

bool interrupted() {
  return is_interrupted.load();
}
void request_interrupt() {
  is_interrupted = true;
  demands = 1;
}

}  // namespace zg
