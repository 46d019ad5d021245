// Errors of the library as Python's, and the two things that end a call early: a fork and a signal.
#include <nanobind/stl/string.h>
#include <pthread.h>

#include "python/errors.hpp"
#include "python/gil.hpp"

namespace zg::python {
namespace {

std::atomic<int> fork_count{0};

const char* name_of(Errc code) {
  switch (code) {
    case Errc::kUsage:
      return "usage";
    case Errc::kIo:
      return "io";
    case Errc::kMemory:
      return "memory";
    case Errc::kDevice:
      return "device";
    case Errc::kComm:
      return "comm";
    case Errc::kNumeric:
      return "numeric";
    case Errc::kInterrupted:
      return "interrupted";
  }
  return "bug";
}

void raise(const char* code, const std::string& where, const std::string& message, const std::string& hint) {
  if (PyObject* const error = exit_exception()) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    return;
  }
  const RunsPython counted;
  const nb::object error = nb::module_::import_("ziggurat._errors").attr("make")(code, where, message, hint);
  PyErr_SetObject(error.type().ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& e) {
    if (PyErr_Occurred() != nullptr) return;  // what interrupted the wait: KeyboardInterrupt
    raise(name_of(e.code()), e.where(), e.message(), e.hint());
  } catch (const ForkError& e) {
    raise("fork", e.what, "was made before this process was forked, and can be used in the parent alone",
          "make it in the child, or start processes by spawn instead of fork");
  }
}

}  // namespace

int forks() {
  return fork_count.load(std::memory_order_relaxed);
}

void Owned::check_here(const char* what) const {
  if (!here()) throw ForkError{what};
}

void refuse(const std::string& where, const std::string& what, const std::string& hint) {
  throw Error(Errc::kUsage, where, what, hint);
}

bool signal_raised() {
  if (interpreter_ends()) return true;
  nb::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

void throw_interrupted() {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  throw Error(Errc::kInterrupted, "ziggurat", "the interpreter is ending");
}

void bind_errors() {
  pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
  nb::register_exception_translator(translate);
  bind_exit();
}

}  // namespace zg::python
