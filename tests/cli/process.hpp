// Runs the program as a user does: a process of its own, its output captured, with a limit on its time.
#pragma once
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zg::cli_test {

struct Launch {
  std::vector<std::string> arguments;
  std::string directory = {};  // the process's current one
  // Called between fork and exec: system calls only.
  std::function<void()> in_child = {};
  // `signal` is sent when the process has written this to stdout or stderr; empty: never.
  std::string interrupt_at = {};
  int signal = SIGINT;
  bool terminal = false;            // stderr is one
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

// argv[0] is `program`.
Outcome launch(const std::string& program, const Launch& launch);

}  // namespace zg::cli_test
