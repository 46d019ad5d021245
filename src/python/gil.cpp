#include "python/gil.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::python {
namespace {

using Clock = std::chrono::steady_clock;

// The longest wait at exit, for a training step or a transfer that may hang. Ctrl-C ends the wait, too.
constexpr std::chrono::seconds kPatience{60};

std::atomic<int> away{0};       // WithoutGil objects whose thread lacks the GIL, and RunsPython objects
std::atomic<int> returning{0};  // threads that have read `given_up`, and ask for the GIL
std::atomic<bool> ending{false}, given_up{false};
std::atomic<std::thread::id> exit_thread{};  // the thread that runs Python code until the very end

constexpr const char* kEnding = "the interpreter is ending";
constexpr const char* kHint = "let threads that use it end before the program does";
PyObject* exit_error = nullptr;  // lives as long as the process

bool refused() {
  return ending && exit_thread.load() != std::this_thread::get_id();
}

std::vector<std::function<void()>>& closers() {
  static auto* all = new std::vector<std::function<void()>>;
  return *all;
}

// Called without the GIL, so that threads that come back can take it.
void wait_for_threads() {
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  const auto end = Clock::now() + kPatience;
  bool interrupted = false;
  for (int i = 1; away > 1 && Clock::now() < end && !interrupted; ++i) {  // one is the caller
    pause();
    if (i % 100 != 0) continue;
    nb::gil_scoped_acquire held;
    interrupted = PyErr_CheckSignals() != 0;
    if (interrupted) PyErr_Clear();
  }
  if (away <= 1) return;
  log::warning("the interpreter ends while {} thread(s) are inside ziggurat", away.load() - 1);
  given_up = true;
  while (returning > 0) pause();
}

void leave() {
  exit_error = nb::module_::import_("ziggurat._errors")
                   .attr("make")("interrupted", "ziggurat", kEnding, kHint)
                   .release()
                   .ptr();
  // Objects in the frames of killed threads are no leak.
  if (nb::cast<int>(nb::module_::import_("threading").attr("active_count")()) > 1)
    nb::set_leak_warnings(false);
  exit_thread = std::this_thread::get_id();
  ending = true;
  {
    WithoutGil released;
    wait_for_threads();
  }
  for (const std::function<void()>& close : closers()) close();
}

}  // namespace

WithoutGil::WithoutGil() {
  if (refused()) throw Error(Errc::kInterrupted, "ziggurat", kEnding, kHint);
  ++away;
  state_ = PyEval_SaveThread();
}

WithoutGil::WithoutGil(std::nothrow_t) {
  if (refused()) return;
  ++away;
  state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ == nullptr) return;
  ++returning;
  if (given_up && exit_thread.load() != std::this_thread::get_id()) {
    --returning;
    while (true) pause();  // until the process ends; Python would kill the thread
  }
  PyEval_RestoreThread(state_);
  --returning;
  --away;
}

RunsPython::RunsPython() {
  ++away;
}
RunsPython::~RunsPython() {
  --away;
}

bool interpreter_ends() {
  return ending;
}

PyObject* exit_exception() {
  return refused() ? exit_error : nullptr;
}

void bind_exit() {
  ending = given_up = false;
  closers().clear();
  // A forked child has no other thread.
  pthread_atfork(nullptr, nullptr, [] { away = returning = 0; });
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(leave));
}

void at_exit(std::function<void()> close) {
  closers().push_back(std::move(close));
}

}  // namespace zg::python
