// Runs a program as a user does: a process of its own, its output captured, with a limit on its time.
#pragma once
#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace zg::test {

struct Launch {
  std::vector<std::string> arguments;
  std::string directory = {};  // the process's current one
  // Called in the child between fork and exec, so it may do nothing but system calls.
  std::function<void()> in_child = {};
  // `signal` is sent when the process has written this to stdout or stderr; empty: never.
  std::string interrupt_at = {};
  int signal = SIGINT;
  bool terminal = false;            // whether stderr is a terminal
  std::chrono::seconds limit{200};  // generous: sanitizers and a busy machine
};

struct Outcome {
  int code = -1;  // exit code; -1: ended by a signal
  int signal = 0;
  bool timed_out = false;
  bool interrupted = false;     // the signal was sent
  std::int64_t peak_bytes = 0;  // resident, of the process (VmHWM)
  std::string out, err;
};

// argv[0] is `program`. The process ends before this returns.
Outcome launch(const std::string& program, const Launch& launch);

// Waits for the end of a child: its exit code, or minus the signal that ended it.
int end_of(pid_t child);

// From here on these system calls, 8 at most, fail with `error` in this process and its children, as in a
// container with a strict profile. Where that is not allowed, the process ends with kCannotForbid. Does
// nothing but system calls: may be called between fork and exec.
inline constexpr int kCannotForbid = 125;
void forbid_calls(std::initializer_list<unsigned> calls, int error);

}  // namespace zg::test
