// Reports when a run has stalled, and dumps the state of all its parts then, or when a signal arrives.
//
// A part is a component such as the store or a stream. It registers callbacks for its state (work that is
// queued, moving or held), its progress (a counter of finished work) and whether somebody waits for it. A run
// has stalled when somebody waits for a part, and no part has made progress for `stall_seconds`. A stall is
// reported with the state of all parts, again after twice that time, and so on. Its end is reported too.
//
// Threads: the watchdog has one thread that looks for stalls and writes dumps, and one for each part, which
// sleeps until it is asked. A part's callbacks run only on that part's thread. So a callback that blocks,
// because a stuck thread holds a lock that it needs, keeps no other part from answering: all parts are asked
// at once, and all must answer within the same `answer_seconds`. A part that has not answered by then is
// reported as silent, counts as waited for (whoever holds its lock keeps others out), and is not asked again
// before it has answered. So a round of questions takes at most `answer_seconds`, however many parts are
// stuck, and no threads pile up. Timed locks would achieve that only if every lock that a callback may take
// were timed. The watchdog holds no lock of its own while a callback runs, so a callback may take any lock
// except one that is held while a registration ends.
//
// Signals: a handler receives only the signal's number, so it finds the eventfd that it writes to (write() is
// async-signal-safe) through static objects: the atomic descriptor, and an atomic count of the handlers that
// may be using it, so that it is not closed while they do. There is no other global state; the watchdog's
// thread makes the dump.
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
// should be short. If one throws, the exception's text is shown as the part's state.
struct WatchedPart {
  std::string name;                              // one word
  std::function<std::string()> state;            // lines of text: work that is queued, moving or held
  std::function<std::uint64_t()> progress = {};  // grows whenever something is done; null: never
  std::function<bool()> waiting = {};            // whether somebody waits for this part; null: never
};

class Watchdog {
 public:
  enum class Message { kStall, kGoesOn, kDump };
  struct Options {
    double stall_seconds = 10;  // 0: do not look for stalls
    double answer_seconds = 1;
    std::string file = {};  // dumps are appended to it, each with its date; empty: no file
    // A clock for tests. With it, only check() looks for stalls.
    std::function<Clock::time_point()> now = {};
    // Receives all reports; null: they go to the log at any log level. Called on the watchdog's thread, or by
    // check().
    std::function<void(Message, const std::string&)> tell = {};
  };

  // A part is watched as long as its registration lives. Once the destructor or end() has returned, none of
  // the part's callbacks runs or will run. A callback must not end the registration. Move-only.
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
  ~Watchdog();  // all registrations must have ended
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  [[nodiscard]] Registration watch(WatchedPart part);

  // The state of all parts, in the order of their registration. May be called from any thread, but not from a
  // callback.
  std::string dump();
  // Makes the watchdog write a dump to the log and the file at each `signal`. May be called once, on one
  // watchdog of the process. The destructor restores the signal's old handler; if that is the default
  // handler, it ignores the signal instead, so that a late signal does not end the process.
  void dump_on_signal(int signal);
  void set_file(const std::string& path);

  // Looks once for a stall. Only for use with Options::now, from one thread.
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
  double still_seconds_ = 0;  // time since a part made progress, or nobody waited
  double tell_at_ = 0;        // the value of still_seconds_ at which to report a stall next
  bool told_ = false;         // a stall was reported and is not over

  int descriptor_ = -1;  // eventfd that wakes the thread, for a dump or to end it
  int signal_ = 0;
  struct sigaction before_ {};
  std::atomic<bool> ending_{false};
  NamedThread thread_;  // last
};

}  // namespace zg
