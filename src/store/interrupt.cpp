#include "ziggurat/store/interrupt.hpp"

#include <chrono>
#include <utility>

namespace zg {
namespace {

using Clock = std::chrono::steady_clock;

thread_local bool (*interrupt_asked)() = nullptr;
thread_local Clock::time_point ask_next{};

}  // namespace

InterruptibleWaits::InterruptibleWaits(bool (*asked)()) : before_(std::exchange(interrupt_asked, asked)) {}
InterruptibleWaits::~InterruptibleWaits() {
  interrupt_asked = before_;
}

// However often moves wake the thread.
bool time_to_ask_for_interrupt() {
  if (interrupt_asked == nullptr || Clock::now() < ask_next) return false;
  ask_next = Clock::now() + std::chrono::milliseconds(100);
  return true;
}

bool ask_for_interrupt() {
  return interrupt_asked != nullptr && interrupt_asked();
}

}  // namespace zg
