// Failures that no code has turned into an Error: exceptions of the standard library, threads that cannot be
// had, and ends of the process that skip destructors. Any thread may call these functions.
#pragma once
#include <exception>
#include <string>

#include "ziggurat/base/error.hpp"

namespace zg {

// The exception with place, cause and hint. An Error stays as it is.
Error error_from(const std::exception& e);

// Why a thread of this name cannot be started: how many there are, and which limit may be raised. `error`: an
// errno.
Error thread_error(const std::string& name, int error);

// From now on an exception that nobody catches, as one in a destructor or in a thread of a library, ends the
// process with one sentence and the exit code of its Error. What is no exception aborts, since it is a bug.
// Call once, from main.
void install_failure_handler();

// `clean` is called when the process ends at once. It may do nothing but what a signal handler may. There is
// room for a few, and none is removed.
void at_sudden_end(void (*clean)());
// Calls those functions and ends the process without destructors. A signal handler may call it.
[[noreturn]] void end_at_once(int exit_code);

}  // namespace zg
