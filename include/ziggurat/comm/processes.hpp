// The processes of a run, as an MPI launcher has started them: how many they are, which of them are on this
// machine, and how they fail together.
//
// One thread of each process calls the functions. A process that waits for the others sleeps.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg {

// Another process has failed and says why; this one ends without a word. The code is that of the other's
// error.
class FailedElsewhere : public Error {
 public:
  using Error::Error;
};

class Processes {
 public:
  Processes();  // this process alone
  // The processes of the launcher, or this one alone where there is no launcher: MPI is initialised only
  // under one, and is finalised when all processes have destroyed this object and their ranks. Once. Where
  // not all processes have come within the limit, this one says so on stderr and ends with exit code 1.
  // Throws Error(kUsage) where a launcher says that it has started several processes and MPI knows of one: in
  // a build without MPI, under the launcher of another MPI, and under one that does not use MPI.
  static Processes join(std::chrono::duration<double> limit);
  Processes(Processes&&) noexcept;
  Processes& operator=(Processes&&) = delete;
  // Waits for the others, unless a failure has ended the run. May end the process: see abort().
  ~Processes();

  int count() const { return count_; }
  int number() const { return number_; }  // of this process, from 0
  // The processes on this machine; and the number of the first of them, which names the machine.
  int count_here() const { return count_here_; }
  int number_here() const { return number_here_; }
  int machine() const { return machine_; }

  // What each process brings, by its number: equally many numbers, kMost at most. Throws FailedElsewhere
  // where another process cannot take part, since it has failed.
  static constexpr std::size_t kMost = 14;
  std::vector<std::vector<double>> all_gather(std::span<const double> mine);
  // Runs `work` in every process. If it throws in some of them, all processes throw: the first of those its
  // own error, all others FailedElsewhere. After that, nothing waits any more. May be nested. The work must
  // not leave a rank of another process waiting.
  void together(const std::function<void()>& work);
  bool has_agreed() const { return ended_; }  // on a failure: all processes end, and none waits

  // This process fails on its own while others may wait for it. They learn of it, and their ranks fail. True
  // if this is the first failure of the run, which must say why before it calls abort(); of processes that
  // fail within half a second of each other the lowest is the first.
  bool is_first_to_fail();
  // Ends all processes of the run with this exit code, without finalising anything. Where another process is
  // the first to fail, it is given two seconds to say why.
  [[noreturn]] void abort(int exit_code);

 private:
  struct State;
  struct Word;
  std::vector<Word> exchange(const Word& mine);
  std::vector<Word> exchange_or_fail(const Word& mine);
  std::unique_ptr<State> state_;  // null: this process is alone
  int count_ = 1, number_ = 0, count_here_ = 1, number_here_ = 0, machine_ = 0;
  // Nothing is exchanged any more, since a failure has been agreed on, or another process does not come.
  bool ended_ = false, lost_ = false;
};

}  // namespace zg
