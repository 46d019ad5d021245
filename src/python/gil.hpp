// How the modules let go of the GIL, and what becomes of threads that did so when the interpreter ends.
//
// A thread that waits for a lock, a move, a drive or another thread while it holds the GIL can hang the whole
// process: who would end the wait may need the GIL first, if only to see whether Ctrl-C was pressed. So
// whatever may wait asks for a WithoutGil, which only a thread that has let go of the GIL can have. The lock
// of a store cannot be taken without one (StoreLock).
//
// When the interpreter ends, Python cuts off threads that ask for the GIL, and a thread of C++ that is cut
// off so ends the process by std::terminate(). An exit handler therefore brings all threads back first: waits
// end with Error(kInterrupted), new ones are refused, and stores are closed.
#pragma once
#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <new>

namespace zg::python {

namespace nb = nanobind;

// Lives as long as the calling thread does without the GIL.
class WithoutGil {
 public:
  // Lets go of the GIL, which the caller holds. Throws Error(kInterrupted) when the interpreter ends.
  WithoutGil();
  // Destructors use it, since they cannot refuse: it keeps the GIL when the interpreter ends.
  explicit WithoutGil(std::nothrow_t);
  // Takes the GIL again. Never returns where the interpreter has not waited for this thread.
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Lives while C++ runs code of Python's under frames of its own: the exit handler waits for it, since Python
// cuts off threads in the middle of such code. With the GIL.
class RunsPython {
 public:
  RunsPython();
  ~RunsPython();
  RunsPython(const RunsPython&) = delete;
};

// Whether the interpreter ends. May be called without the GIL; who gets true must not ask for it.
bool interpreter_ends();
// The exception that a thread gets then, made beforehand; null: this thread may run Python's code. With the
// GIL.
PyObject* exit_exception();

// Registers the exit handler of this module. Once in a module, with the GIL.
void bind_exit();
// `close` is called by the exit handler, with the GIL, when all threads are back or were given up. With the
// GIL.
void at_exit(std::function<void()> close);

// Gives up an object of Python's share of what is under it; the last share, whose end may wait for moves,
// ends without the GIL, which the caller holds.
template <class T>
void drop(std::shared_ptr<T>& share) {
  if (share.use_count() != 1) return share.reset();
  WithoutGil released(std::nothrow);
  share.reset();
}

}  // namespace zg::python
