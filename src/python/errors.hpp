// What both modules share: errors, forks and signals.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <string>

#include "ziggurat/base/error.hpp"

namespace zg::python {

namespace nb = nanobind;

// Errors of the library become those of ziggurat._errors from now on, forks are counted, and threads are
// brought back when the interpreter ends. Once in a module.
void bind_errors();

// Becomes ziggurat.ForkError: a child of fork() has no threads of the library, so a call of it would hang.
struct ForkError {
  std::string what;
};

// The number of forks between this process and the one that loaded the module.
int forks();

// Belongs to the process that made it. In a forked child it can be neither used nor destroyed.
class Owned {
 public:
  bool here() const { return made_ == forks(); }
  void check_here(const char* what) const;

 private:
  int made_ = forks();
};

[[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& hint = {});

// Whether a signal's handler of Python has raised, or the interpreter ends; asks for the GIL in the first
// case, and leaves the exception set.
bool signal_raised();

// Ends a call that signal_raised() has ended: with the exception that the handler has raised, or
// Error(kInterrupted) where the interpreter ends. With the GIL.
[[noreturn]] void throw_interrupted();

}  // namespace zg::python
