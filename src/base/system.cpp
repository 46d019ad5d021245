#include "ziggurat/base/system.hpp"

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace zg {
namespace {

// Written by a signal handler, which may use nothing but lock-free atomics.
std::atomic<int> interrupt_count{0};
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void on_interrupt(int) {
  if (interrupt_count.fetch_add(1) >= 1) _exit(130);
}

}  // namespace

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() {
  return interrupt_count.load() > 0;
}
void request_interrupt() {
  interrupt_count = 1;
}

}  // namespace zg
