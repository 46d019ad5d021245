// Reports when a run has stalled, and dumps the state of all its parts then, or when a signal asks for it.
//
// A part registers callbacks for its state (what is queued, moving, held), its progress (a counter of what it
// has done) and whether somebody waits for it. A stall: somebody waits for a part, and no part has made
// progress for `stall_seconds`. It is reported with the state of all parts, again after twice that time, and
// so on, and its end is reported too.
//
// Threads: the watchdog has one that looks for stalls and writes dumps, and one for each part, which sleeps
// until it is asked. A part's callbacks run on that part's thread alone. A callback that blocks, because a
// stuck thread holds a lock that it needs, therefore keeps no other part from answering: all parts are asked
// at once and have `answer_seconds` together. A part that has not answered by then is reported as silent,
// counts as waited for (whoever holds its lock keeps others out), and is not asked again before it has
// answered. So a round of questions takes at most `answer_seconds`, however many parts are stuck, and no
// threads pile up. Timed locks would achieve that only if every lock that a callback can meet were timed. The
// watchdog holds no lock of its own while a callback runs, so a callback may take any lock except one that is
// held while a registration ends.
//
// Signals: a handler is given nothing but the signal's number, so it must find what it writes to through a
// static object: an atomic descriptor (an eventfd; write() is async-signal-safe), and an atomic count of the
// handlers that may be using it, so that it is not closed under them. There is no other global state; the
// dump is made by the watchdog's thread.
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

// The callbacks may be called at any time until the registration ends, may take locks of that part, and
// should be short. The text of an exception is shown as the part's state.
struct WatchedPart {
  std::string name;                              // one word
  std::function<std::string()> state;            // lines of text: what is queued, moving, held
  std::function<std::uint64_t()> progress = {};  // grows whenever something is done; null: never
  std::function<bool()> waiting = {};            // whether somebody waits for this part; null: never
};

class Watchdog {
 public:
  enum class Message { kStall, kGoesOn, kDump };
  struct Options {
    double stall_seconds = 10;  // 0: stalls are not looked for
    double answer_seconds = 1;
    std::string file = {};  // dumps are appended to it, each with its date; empty: to no file
    // A clock for tests. With it stalls are looked for by check() alone.
    std::function<Clock::time_point()> now = {};
    // Receives all reports; null: they go to the log, whatever its level. Called on the watchdog's thread, or
    // by check().
    std::function<void(Message, const std::string&)> tell = {};
  };

  // The part is watched as long as its registration lives. Once the destructor or end() has returned, none of
  // the part's callbacks runs or will run. Must not be ended by a callback. Move-only.
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

  // The state of all parts, in the order of their registration. Any thread may call it, but no callback.
  std::string dump();
  // From now on `signal` makes the watchdog write a dump to the log and the file. May be called once, on one
  // watchdog of the process. The destructor restores the signal's old handler; where that is the default, it
  // ignores the signal instead, so that one which comes late does not end the process.
  void dump_on_signal(int signal);
  void set_file(const std::string& path);

  // Looks once for a stall. Only with Options::now, from one thread.
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
  std::mutex asking_;  // held during a round of questions, so that rounds do not mix
  std::mutex mutex_;   // guards parts_, file_, the questions and answers; not held while a callback runs
  std::condition_variable changed_;
  std::vector<std::shared_ptr<AskedPart>> parts_;
  std::string file_;

  // Used only by the thread that looks for stalls.
  Clock::time_point looked_at_;
  double still_seconds_ = 0;  // since a part made progress, or nobody waited
  double tell_at_ = 0;        // the value of still_seconds_ at which a stall is reported
  bool told_ = false;         // a stall was reported that is not over

  int descriptor_ = -1;  // eventfd that wakes the thread for a dump, or to end
  int signal_ = 0;
  struct sigaction before_ {};
  std::atomic<bool> ending_{false};
  NamedThread thread_;  // last
};

}  // namespace zg
