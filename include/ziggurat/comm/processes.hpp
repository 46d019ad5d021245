// The processes of a run that an MPI launcher has started: how many there are, which of them are on this
// machine, and how they fail together.
//
// In each process one thread calls these functions. A process that waits for the others sleeps.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg {

// Another process has failed and prints the reason; this one ends without a message. code() is the code of
// the other process's error.
class FailedElsewhere : public Error {
 public:
  using Error::Error;
};

class Processes {
 public:
  Processes();  // this process alone
  // The processes of the launcher, or this process alone if there is no launcher. MPI is initialised only
  // under a launcher, and is finalised when all processes have destroyed this object and their ranks. May be
  // called once. If not all processes have joined within the limit, this one says so on stderr and ends with
  // exit code 1. Throws Error(kUsage) if a launcher reports several processes but MPI knows of only one: in a
  // build without MPI, under the launcher of another MPI, and under one that does not use MPI.
  static Processes join(std::chrono::duration<double> limit);
  Processes(Processes&&) noexcept;
  Processes& operator=(Processes&&) = delete;
  // Waits for the others, unless a failure has ended the run. May end the process: see abort().
  ~Processes();

  int count() const { return count_; }
  int number() const { return number_; }  // this process's number, from 0
  // count_here(): processes on this machine. number_here(): this process's number among them. machine(): the
  // number() of the first of them, which identifies the machine.
  int count_here() const { return count_here_; }
  int number_here() const { return number_here_; }
  int machine() const { return machine_; }

  // All-gathers `mine`; the result is indexed by process. All processes pass equally many values, at most
  // kMost. Throws FailedElsewhere if another process cannot take part, since it has failed.
  static constexpr std::size_t kMost = 14;
  std::vector<std::vector<double>> all_gather(std::span<const double> mine);
  // Runs `work` in every process. If it throws in some processes, all processes throw: the lowest-numbered of
  // those its own error, all others FailedElsewhere. After that, no process waits for another. May be nested.
  // The work must not leave a rank of another process waiting.
  void together(const std::function<void()>& work);
  bool has_agreed() const { return ended_; }  // on a failure: all processes end, and none waits

  // Call when this process fails on its own while others may wait for it. The others learn of it, and their
  // ranks fail. Returns true if this is the first failure of the run; then the process must print the reason
  // before it calls abort(). Among processes that fail within half a second of each other, the lowest counts
  // as the first.
  bool is_first_to_fail();
  // Ends all processes of the run with this exit code, without finalising anything. If another process was
  // the first to fail, it gets two seconds to print the reason.
  [[noreturn]] void abort(int exit_code);

 private:
  struct State;
  struct Word;
  std::vector<Word> exchange(const Word& mine);
  std::vector<Word> exchange_or_fail(const Word& mine);
  std::unique_ptr<State> state_;  // null: this process is alone
  int count_ = 1, number_ = 0, count_here_ = 1, number_here_ = 0, machine_ = 0;
  // No further exchange is made: the processes have agreed on a failure (ended_), or another process does not
  // come (lost_).
  bool ended_ = false, lost_ = false;
};

}  // namespace zg
