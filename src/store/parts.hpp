// The inside of a TensorStore: its parts, and what they have to know of each other.
//
//   StoreCore     copies, leases and the order of moves      FreeFront     leases without a program
//   Mover         carries moves out                          ProgramFront  leases along a program
//   StoreReport   statistics and reports
//
// One of the two fronts is in use at a time. The core's mutex guards all parts and all members.
#pragma once
#include "store/core.hpp"
#include "store/free_front.hpp"
#include "store/mover.hpp"
#include "store/program_front.hpp"
#include "store/recorder.hpp"
#include "store/report.hpp"

namespace zg {

struct StoreParts final : private MoveEvents, private MoverEvents {
  using Lock = StoreCore::Lock;

  explicit StoreParts(const TensorStore::Options& options);
  ~StoreParts();
  void grow();  // makes every part fit for the segments that the table has
  // The front for calls that a program does not allow; `otherwise`: what such a call does instead.
  FreeFront& without_program(const char* otherwise) {
    ZG_ASSERT(!program.runs(), "{}", otherwise);
    return free;
  }
  void drain(Lock& lock);      // waits until nothing moves; throws the store's failure
  void wait_idle(Lock& lock);  // the same, but works after a failure, too

  StoreCore core;
  FreeFront free;
  ProgramFront program;
  Recorder recorder;
  StoreReport report;
  Mover mover;  // destroyed first, since its threads call the other parts

 private:
  void evicting(const Action& action) override;
  void granted(const ActionNode& use) override { program.granted(use); }
  void changed(SegmentId segment) override { free.changed(segment); }
  void finished(Action::Kind kind) override;
  void failed(const Error& error) override { core.fail(error); }
  void no_memory(Tier tier, const Error& error) override;
};

}  // namespace zg
