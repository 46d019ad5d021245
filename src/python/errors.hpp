// Errors, forks and signals, shared by both modules.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <string>

#include "ziggurat/base/error.hpp"

namespace zg::python {

namespace nb = nanobind;

// Turns the library's errors into exceptions of ziggurat._errors, counts forks, and brings threads back when
// the interpreter ends. Call once in a module.
void bind_errors();

// Becomes ziggurat.ForkError. A child of fork() has none of the library's threads, so a call of the library
// would hang there.
struct ForkError {
  std::string what;
};

// The number of forks between this process and the one that loaded the module.
int forks();

// An object that belongs to the process that made it. A forked child can neither use nor destroy it.
class Owned {
 public:
  bool here() const { return made_ == forks(); }
  void check_here(const char* what) const;

 private:
  int made_ = forks();
};

[[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& hint = {});

// Whether a Python signal handler has raised an exception, or the interpreter is ending. Takes the GIL to
// check the former, and leaves the exception set.
bool signal_raised();

// Call, with the GIL held, after signal_raised() has ended a wait. Throws the exception that the handler has
// raised, or Error(kInterrupted) if the interpreter is ending.
[[noreturn]] void throw_interrupted();

}  // namespace zg::python
