// Failures that are not reported as an Error: exceptions of the standard library, threads that cannot be
// started, and ends of the process that skip destructors. Any thread may call these functions.
#pragma once
#include <exception>
#include <string>

#include "ziggurat/base/error.hpp"

namespace zg {

// Converts an exception to an Error with place, cause and hint. An Error stays as it is.
Error error_from(const std::exception& e);

// The error for a thread of this name that cannot be started: it states how many threads there are, and which
// limit may be raised. `error`: an errno.
Error thread_error(const std::string& name, int error);

// Makes an uncaught exception, such as one in a destructor or in a library's thread, end the process with one
// sentence and the exit code of its Error. Any other termination (a thrown object that is no std::exception,
// std::terminate() without an exception) aborts, since it is a bug. Call once, from main.
void install_failure_handler();

// Registers a function that end_at_once() calls. It may do only what a signal handler may do. There is room
// for a few functions, and none can be removed.
void at_sudden_end(void (*clean)());
// Calls the registered functions and ends the process without destructors. A signal handler may call it.
[[noreturn]] void end_at_once(int exit_code);

}  // namespace zg
