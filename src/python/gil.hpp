// Releasing the GIL in the modules, and handling threads that have released it when the interpreter ends.
//
// A thread that waits for a lock, a move, a drive or another thread while it holds the GIL can hang the whole
// process: the thread that would end the wait may need the GIL first, if only to see whether Ctrl-C was
// pressed. So every function that may wait takes a WithoutGil, which only a thread that has released the GIL
// can have. The lock of a store cannot be taken without one (StoreLock).
//
// When the interpreter ends, Python kills threads that ask for the GIL, and a C++ thread killed this way ends
// the process by std::terminate(). So an exit handler first brings all threads back: waits end with
// Error(kInterrupted), new waits are refused, and stores are closed.
#pragma once
#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <new>

namespace zg::python {

namespace nb = nanobind;

// Releases the GIL during its life, on the calling thread.
class WithoutGil {
 public:
  // Releases the GIL, which the caller holds. Throws Error(kInterrupted) when the interpreter is ending.
  WithoutGil();
  // For destructors, which must not throw: keeps the GIL when the interpreter is ending.
  explicit WithoutGil(std::nothrow_t);
  // Takes the GIL again. Never returns if the interpreter has ended without waiting for this thread.
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Lives while C++ code calls Python code. The exit handler waits for it, since Python kills threads in the
// middle of such code. Made and destroyed with the GIL held.
class RunsPython {
 public:
  RunsPython();
  ~RunsPython();
  RunsPython(const RunsPython&) = delete;
};

// Whether the interpreter is ending. May be called without the GIL; after true, the caller must not ask for
// the GIL.
bool interpreter_ends();
// The exception, made beforehand, that a thread gets when the interpreter is ending. Null: this thread may
// run Python code. Call with the GIL held.
PyObject* exit_exception();

// Registers this module's exit handler. Call once in a module, with the GIL held.
void bind_exit();
// The exit handler will call `close`, with the GIL held, when all threads are back or were given up. Call
// with the GIL held.
void at_exit(std::function<void()> close);

// Drops a Python object's shared pointer to the C++ object that it wraps. The caller holds the GIL; if this
// is the last pointer, the GIL is released while the object is destroyed, since that may wait for moves.
template <class T>
void drop(std::shared_ptr<T>& share) {
  if (share.use_count() != 1) return share.reset();
  WithoutGil released(std::nothrow);
  share.reset();
}

}  // namespace zg::python
