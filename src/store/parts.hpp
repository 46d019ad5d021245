// The inside of a TensorStore: its parts, and the functions that involve several of them.
//
//   Residency    decides which tiers have copies            LeaseTable   which copies are leased
//   MoveGraph    which moves may start                      Mover        carries them out
//   Waits        which acquires wait, and for what          Prefetcher   follows steps, prefetches for them
//   StoreReport  statistics and reports
//
// `mutex` guards all parts and all members, except those of which a part's header says otherwise: hits and
// words of copies, the log of accesses, atomic counters. It is never held while bytes move.
#pragma once
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "store/counters.hpp"
#include "store/leases.hpp"
#include "store/mover.hpp"
#include "store/prefetcher.hpp"
#include "store/recorder.hpp"
#include "store/report.hpp"
#include "store/waits.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

struct StoreParts final : private MoveEvents, private MoverEvents {
  using Lock = std::unique_lock<std::mutex>;
  using Obstacle = Waiter::Obstacle;

  explicit StoreParts(const TensorStore::Options& o);
  ~StoreParts();

  // Tensors, moves and failures (store.cpp).
  void grow();
  void fail(const Error& error);
  void throw_failure() const;
  void check_access(SegmentId segment, Tier tier) const {
    if (segment < 0 || segment >= leases.segments() || tier == Tier::kNvme) refuse(segment);
  }
  [[noreturn]] void refuse(SegmentId segment) const;
  void drain(Lock& lock);  // waits until nothing moves; throws the store's failure
  void rest(Lock& lock);   // the same, but works after a failure, too
  void unpin(SegmentId segment, Tier tier);

  // Leases without a program (acquire.cpp).
  void acquire_slowly(Lease& lease, const AccessStep& access, Stream* consumer);
  void check_together(std::span<const AccessStep> accesses) const;
  std::size_t take_all(Lock& lock, std::span<const AccessStep> accesses, std::size_t first, const void* turn,
                       std::vector<Lease>& out, Stream* consumer);
  bool try_take(Waiter& waiter, Lease& lease);
  bool hinder(Waiter& waiter, Obstacle obstacle, SegmentId moving = -1) const;
  bool resume(Waiter& waiter, Lease& lease);
  enum class Decision : std::uint8_t { kMade, kHindered, kAgain };
  Decision decide(Waiter& waiter, Access access);
  Decision no_room(Waiter& waiter, const NoRoom& missing);
  bool take(Waiter& waiter, Access access, Lease& lease);
  void let_go(Lock& lock, std::vector<Lease>& leases);
  void log_access(const AccessStep& access);

  // Leases along a program (programs.cpp).
  void enter_program(Lock& lock);
  void decide_ahead();
  void acquire_next(Lock& lock, std::span<const AccessStep> accesses, Stream* consumer, Lease* out);
  void wait_for(Lock& lock, ActionNode& use);
  void pass_use(ActionNode& use, Stream& stream, const Event& ended);
  void end_use(ActionNode& use);

  TensorTable table;
  TensorStore::Options options;
  mutable std::mutex mutex;
  Counters counters;
  Residency residency;
  LeaseTable leases;
  Waits waits;
  Prefetcher prefetcher;
  Recorder recorder;
  StoreReport report;
  std::vector<Action> actions;  // decisions, which the mover gets at once
  std::optional<Error> failure;
  bool closing = false;

  // The program that runs (null: none), and the one announced to follow it.
  const Program* program = nullptr;
  const Program* next = nullptr;
  std::int32_t decided = 0;          // operations decided, of `program` and then of `next`
  std::int32_t op = 0;               // operation being acquired
  std::int32_t accessed = 0;         // accesses of `program` acquired
  std::vector<ActionNode*> claimed;  // of the operation being acquired

  MoveGraph moves;
  Mover mover;  // destroyed first, since its threads call the other parts

 private:
  void evicting(const Action& action) override;
  void granted(const ActionNode& use) override;
  void changed(SegmentId segment) override;
  void finished(Action::Kind kind) override;
  void failed(const Error& error) override { fail(error); }
  void no_memory(Tier tier, const Error& error) override;
};

}  // namespace zg
