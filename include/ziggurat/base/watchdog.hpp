// Tells when a run stands still, and what every part of it is doing, on a signal too.
//
// A part registers what it holds (state), a counter of what it has done (progress) and whether somebody waits
// for it (waiting). A stall: somebody waits, and for `stall_seconds` no part at all made progress. It is told
// once with the state of all parts, again after twice that time, and so on; and once when it is over.
//
// Threads: one that looks and dumps, and one for each part, asleep but while it is asked. A part's callbacks
// run on that part's thread alone, so one that blocks, since a stuck thread holds the lock that it needs,
// keeps no other part from answering: all are asked at once and given `answer_seconds` together. One that has
// not answered by then is told as such, counts as waited for (who holds its lock keeps others out), and is
// not asked again before it has. So one round of questions takes `answer_seconds` at most, however many are
// stuck, and no threads pile up. Timed attempts at locks would do the same only as far as every lock below a
// part had them. No lock of the watchdog is held while a callback runs: a callback may take any lock but one
// that is held while a registration ends.
//
// Signals: a handler gets nothing but the signal's number, so what it writes to must be found through a
// static object: an atomic descriptor (an eventfd; write() is async-signal-safe) and an atomic count of
// handlers that may be using it, so that it is not closed under them. That is all there is of global state;
// the dump is made by the watchdog's thread.
#pragma once
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg {

// Callbacks may be called at any time until the registration ends, may take locks of that part, and should be
// short. What they throw is shown as the part's state.
struct WatchedPart {
  std::string name;                              // a word
  std::function<std::string()> state;            // what is queued, moving, held; lines
  std::function<std::uint64_t()> progress = {};  // grows whenever something gets done; null: never
  std::function<bool()> waiting = {};            // somebody waits for this part; null: nobody ever
};

class Watchdog {
 public:
  enum class Message { kStall, kGoesOn, kDump };
  struct Options {
    double stall_seconds = 10;  // 0: stalls are not looked for
    double answer_seconds = 1;
    std::string file = {};  // dumps are appended to it, with their date; empty: none
    // A clock for tests: then stalls are looked for by check() alone.
    std::function<Clock::time_point()> now = {};
    // Where texts go; null: to the log, whatever its level. Called on the watchdog's thread, or by check().
    std::function<void(Message, const std::string&)> tell = {};
  };

  // While it lives the part is watched. When its destructor (or assignment to it) returns, no callback runs
  // or will run. Not to be ended from a callback. Move-only.
  class Registration {
   public:
    Registration() = default;
    Registration(Registration&& other) noexcept { *this = std::move(other); }
    Registration& operator=(Registration&& other) noexcept;
    ~Registration() { end(); }
    void end();

   private:
    friend class Watchdog;
    Watchdog* owner_ = nullptr;
    std::shared_ptr<struct AskedPart> part_;
  };

  explicit Watchdog(Options options);
  Watchdog() : Watchdog(Options()) {}
  ~Watchdog();  // all registrations have ended
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  [[nodiscard]] Registration watch(WatchedPart part);

  // The state of all parts, in the order of their registration. Any thread, but no callback.
  std::string dump();
  // From now on `signal` has the state written to the log and the file. Once; one watchdog of a process. When
  // the watchdog ends, a signal that would end the process is ignored: one that comes late does no harm.
  void dump_on_signal(int signal);
  void set_file(const std::string& path);

  // Looks once for a stall. Only with Options::now; one thread.
  void check();

 private:
  struct Answer;
  using Lock = std::unique_lock<std::mutex>;
  void run();
  void look();
  std::vector<Answer> ask(bool with_state);
  void answer_questions(AskedPart& part);
  void remove(AskedPart& part);
  void tell(Message message, const std::string& text) const;
  void write_dump();
  static std::string text_of(const std::vector<Answer>& answers);

  const Options options_;
  std::mutex asking_;  // held by who asks, so that questions do not mix
  std::mutex mutex_;   // for parts_ and what is asked and answered; never while a callback runs
  std::condition_variable changed_;
  std::vector<std::shared_ptr<AskedPart>> parts_;
  std::string file_;

  // Of who looks for stalls.
  Clock::time_point looked_at_;
  double still_seconds_ = 0;  // since something was done last, or nobody waited
  double tell_at_ = 0;        // of still_seconds_
  bool told_ = false;

  int descriptor_ = -1;  // eventfd: somebody wants a dump, or the end
  int signal_ = 0;
  struct sigaction before_ {};
  std::atomic<bool> ending_{false};
  NamedThread thread_;  // last
};

}  // namespace zg
