// Waits inside a store that a user can interrupt: for hosts such as Python, whose Ctrl-C must reach a thread
// that waits for a lease.
#pragma once

namespace zg {

// While one lives, the waits of the calling thread for leases, room and moves (acquire, discard, remove,
// drain) end with Error(kInterrupted) once `asked` returns true. `asked` is called on this thread about ten
// times a second while it waits, holds none of the store's locks, and must not call the store. After such an
// Error the store is as it was before the call, but for moves that had begun; only a remove() may have
// dropped content already.
class InterruptibleWaits {
 public:
  explicit InterruptibleWaits(bool (*asked)());
  ~InterruptibleWaits();
  InterruptibleWaits(const InterruptibleWaits&) = delete;

 private:
  bool (*before_)();
};

// For the store. Whether this thread's waits can be interrupted, and nobody was asked for a tenth of a
// second; and whether the user asks to.
bool time_to_ask_for_interrupt();
bool ask_for_interrupt();

}  // namespace zg
