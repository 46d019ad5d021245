#include "ziggurat/base/watchdog.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <optional>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr double kLooksPerStall = 10, kLeastLook = 1e-3;

// State of the signal handler. `handlers` is the number of handlers that may be about to write to
// `descriptor`.
struct SignalTarget {
  std::atomic<int> descriptor{-1};
  std::atomic<int> handlers{0};
};
SignalTarget signal_target;
static_assert(std::atomic<int>::is_always_lock_free);

void wake(int descriptor) {
  const std::uint64_t one = 1;
  // Fails only if the counter is full, and then the reader is awake anyway.
  [[maybe_unused]] const ssize_t n = ::write(descriptor, &one, sizeof one);
}

extern "C" void on_dump_signal(int) {
  const int error = errno;
  signal_target.handlers.fetch_add(1);
  const int descriptor = signal_target.descriptor.load();
  if (descriptor >= 0) wake(descriptor);
  signal_target.handlers.fetch_sub(1);
  errno = error;
}

std::string date_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[64];
  return std::string(text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S %z", &parts));
}

// Indents every line by two spaces, except those that are indented already.
std::string indented(const std::string& text) {
  std::string result;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    if (text[begin] != ' ') result += "  ";
    result.append(text, begin, end - begin);
    result += '\n';
    begin = end + 1;
  }
  return result;
}

// Returns 0 or an errno.
int append_to_file(const std::string& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return errno;
  int error = 0;
  for (std::size_t done = 0; done < text.size() && error == 0;) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n > 0) done += static_cast<std::size_t>(n);
    if (n <= 0 && errno != EINTR) error = n < 0 ? errno : EIO;
  }
  if (::close(fd) != 0 && error == 0) error = errno;
  return error;
}

}  // namespace

// The watchdog's mutex_ guards all members after `thread`. Only the part's thread uses `callbacks`, and once
// it has ended, the code that ends the registration.
struct AskedPart {
  WatchedPart callbacks;
  NamedThread thread;
  enum class Phase { kIdle, kAsked, kAnswering } phase = Phase::kIdle;
  bool with_state = false;
  bool ended = false;
  Clock::time_point asked_at;
  // The last answer.
  std::string state;
  std::uint64_t progress = 0;
  bool waiting = false;
  // The progress that look() saw last.
  std::optional<std::uint64_t> seen;
};

struct Watchdog::Answer {
  std::shared_ptr<AskedPart> part;
  std::string name, state;
  std::uint64_t progress = 0;
  bool waiting = false;
  std::optional<double> silent_seconds;  // how long a question has been unanswered; none: it was answered
};

Watchdog::Registration& Watchdog::Registration::operator=(Registration&& other) noexcept {
  if (this != &other) {
    end();
    owner_ = std::exchange(other.owner_, nullptr);
    part_ = std::move(other.part_);
  }
  return *this;
}

void Watchdog::Registration::end() {
  if (owner_ == nullptr) return;
  std::exchange(owner_, nullptr)->remove(*part_);
  part_.reset();
}

Watchdog::Watchdog(Options options)
    : options_(std::move(options)),
      file_(options_.file),
      looked_at_(options_.now ? options_.now() : Clock::now()),
      tell_at_(options_.stall_seconds) {
  ZG_ASSERT(options_.stall_seconds >= 0 && options_.answer_seconds > 0, "{} {}", options_.stall_seconds,
            options_.answer_seconds);
  descriptor_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (descriptor_ < 0) {
    throw Error(
        Errc::kIo, "eventfd", "the watchdog cannot have one: " + errno_text(errno),
        "raise the limit of open files (ulimit -n), or run with a seccomp profile that allows eventfd2");
  }
  thread_ = NamedThread("zg-watchdog", [this] { run(); });
}

Watchdog::~Watchdog() {
  {
    Lock lock(mutex_);
    ZG_ASSERT(parts_.empty(), "{} is still watched", parts_.front()->callbacks.name);
  }
  if (signal_ != 0) {
    if ((before_.sa_flags & SA_SIGINFO) == 0 && before_.sa_handler == SIG_DFL) before_.sa_handler = SIG_IGN;
    const int result = ::sigaction(signal_, &before_, nullptr);
    ZG_ASSERT_EQ(result, 0);
    signal_target.descriptor.store(-1);
    // A handler that starts now finds no descriptor. Wait a moment for those that have found it.
    while (signal_target.handlers.load() != 0) std::this_thread::yield();
  }
  ending_.store(true);
  wake(descriptor_);
  thread_.join();
  ::close(descriptor_);
}

void Watchdog::dump_on_signal(int signal) {
  ZG_ASSERT(signal_ == 0, "signal {} is taken already", signal_);
  int none = -1;
  const bool taken = signal_target.descriptor.compare_exchange_strong(none, descriptor_);
  ZG_ASSERT(taken, "another watchdog of this process dumps on a signal");
  struct sigaction action {};
  action.sa_handler = on_dump_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  if (::sigaction(signal, &action, &before_) != 0) {
    const int error = errno;
    signal_target.descriptor.store(-1);
    log::warning("signal {} does not make this process tell its state: {}", signal, errno_text(error));
    return;
  }
  signal_ = signal;
}

void Watchdog::set_file(const std::string& path) {
  Lock lock(mutex_);
  file_ = path;
}

Watchdog::Registration Watchdog::watch(WatchedPart part) {
  ZG_ASSERT(part.state != nullptr, "{} has no state", part.name);
  Registration registration;
  registration.part_ = std::make_shared<AskedPart>();
  AskedPart& asked = *registration.part_;
  asked.callbacks = std::move(part);
  asked.thread = NamedThread("zg-ask-" + asked.callbacks.name, [this, &asked] { answer_questions(asked); });
  registration.owner_ = this;  // from here on the registration's destructor ends the thread
  Lock lock(mutex_);
  parts_.push_back(registration.part_);
  return registration;
}

void Watchdog::remove(AskedPart& part) {
  {
    Lock lock(mutex_);
    part.ended = true;
    std::erase_if(parts_, [&](const auto& p) { return p.get() == &part; });
  }
  changed_.notify_all();
  part.thread.join();
  part.callbacks = {};  // destroys their captures now, and not with the last answer that refers to the part
}

// The body of the part's thread.
void Watchdog::answer_questions(AskedPart& part) {
  const WatchedPart& callbacks = part.callbacks;
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return part.ended || part.phase == AskedPart::Phase::kAsked; });
    if (part.ended) return;
    part.phase = AskedPart::Phase::kAnswering;
    const bool with_state = part.with_state;
    lock.unlock();
    std::string state;
    std::uint64_t progress = 0;
    bool waiting = false;
    try {
      if (callbacks.progress) progress = callbacks.progress();
      if (callbacks.waiting) waiting = callbacks.waiting();
      if (with_state) state = callbacks.state();
    } catch (const std::exception& e) {
      state = fmt::format("cannot tell its state: {}", e.what());
    } catch (...) {
      state = "cannot tell its state";
    }
    lock.lock();
    part.state = std::move(state);
    part.progress = progress;
    part.waiting = waiting;
    part.phase = AskedPart::Phase::kIdle;
    changed_.notify_all();
  }
}

// Asks all parts at once.
std::vector<Watchdog::Answer> Watchdog::ask(bool with_state) {
  std::lock_guard asking(asking_);
  Lock lock(mutex_);
  const auto begin = Clock::now();
  std::vector<std::shared_ptr<AskedPart>> asked, all = parts_;
  for (const auto& part : all) {
    // A part that has not answered the last question is not asked again.
    if (part->phase != AskedPart::Phase::kIdle) continue;
    part->phase = AskedPart::Phase::kAsked;
    part->with_state = with_state;
    part->asked_at = begin;
    asked.push_back(part);
  }
  changed_.notify_all();
  const auto deadline = begin + std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(options_.answer_seconds));
  changed_.wait_until(lock, deadline, [&] {
    return std::all_of(asked.begin(), asked.end(), [](const auto& part) {
      return part->ended || part->phase == AskedPart::Phase::kIdle;
    });
  });
  std::vector<Answer> answers;
  for (const auto& part : all) {
    if (part->ended) continue;
    Answer& a = answers.emplace_back();
    a.part = part;
    a.name = part->callbacks.name;
    const bool answered =
        part->phase == AskedPart::Phase::kIdle && std::find(asked.begin(), asked.end(), part) != asked.end();
    if (!answered) {
      a.silent_seconds = seconds_between(part->asked_at, Clock::now());
      a.waiting = true;
      continue;
    }
    a.state = part->state;
    a.progress = part->progress;
    a.waiting = part->waiting;
  }
  return answers;
}

std::string Watchdog::text_of(const std::vector<Answer>& answers) {
  std::string text;
  for (const Answer& a : answers) {
    if (a.silent_seconds) {
      text += fmt::format("{}: does not answer, asked {} ago\n", a.name, format_seconds(*a.silent_seconds));
      continue;
    }
    text += fmt::format("{}: progress {}{}\n{}", a.name, a.progress, a.waiting ? ", somebody waits" : "",
                        indented(a.state));
  }
  return text.empty() ? "nothing is watched\n" : text;
}

std::string Watchdog::dump() {
  return text_of(ask(true));
}

void Watchdog::check() {
  ZG_ASSERT(options_.now != nullptr, "the watchdog's thread looks by itself");
  look();
}

void Watchdog::look() {
  const std::vector<Answer> answers = ask(false);
  const auto now = options_.now ? options_.now() : Clock::now();
  const double since = seconds_between(looked_at_, now);
  looked_at_ = now;
  std::string who;
  bool moved = false;
  for (const Answer& a : answers) {
    if (a.waiting) who += (who.empty() ? "" : ", ") + a.name;
    if (a.silent_seconds) continue;
    moved |= a.part->seen != a.progress;  // a part that is seen for the first time counts as progress
    a.part->seen = a.progress;
  }
  // A pause of this thread itself (SIGSTOP, a suspended machine) is no stall, so one interval counts as at
  // most half of stall_seconds.
  still_seconds_ += std::min(since, options_.stall_seconds / 2);
  if (moved || who.empty()) {
    if (std::exchange(told_, false))
      tell(Message::kGoesOn,
           fmt::format("it goes on, after {} without any progress", format_seconds(still_seconds_)));
    still_seconds_ = 0;
    tell_at_ = options_.stall_seconds;
    return;
  }
  if (still_seconds_ < tell_at_) return;
  tell_at_ *= 2;
  told_ = true;
  tell(Message::kStall, fmt::format("no progress for {}, and somebody waits for {}\n{}",
                                    format_seconds(still_seconds_), who, dump()));
}

void Watchdog::tell(Message message, const std::string& text) const {
  if (options_.tell) {
    options_.tell(message, text);
  } else {
    log::write_always(message == Message::kDump ? log::Level::kInfo : log::Level::kWarning, text);
  }
}

void Watchdog::write_dump() {
  const std::string text = dump();
  tell(Message::kDump, "state, as asked for\n" + text);
  std::string file;
  {
    Lock lock(mutex_);
    file = file_;
  }
  if (file.empty()) return;
  if (const int error = append_to_file(file, fmt::format("{}\n{}\n", date_now(), text)))
    log::write_always(log::Level::kWarning,
                      fmt::format("{}: cannot be written: {}", file, errno_text(error)));
}

void Watchdog::run() {
  const bool looks = options_.stall_seconds > 0 && !options_.now;
  const auto every = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::max(options_.stall_seconds / kLooksPerStall, kLeastLook)));
  auto next = Clock::now() + every;
  while (!ending_.load()) {
    int timeout_ms = -1;
    if (looks) {
      const double left = std::max(0.0, seconds_between(Clock::now(), next));
      timeout_ms = static_cast<int>(std::ceil(std::min(left * 1e3, 1e9)));
    }
    pollfd descriptor{descriptor_, POLLIN, 0};
    const int ready = ::poll(&descriptor, 1, timeout_ms);
    if (ready < 0 && errno != EINTR) {
      log::warning("stalls are not looked for: poll: {}", errno_text(errno));
      return;
    }
    if (ready > 0) {
      std::uint64_t requests = 0;
      const ssize_t n = ::read(descriptor_, &requests, sizeof requests);
      if (n == sizeof requests && !ending_.load()) write_dump();
    }
    if (looks && Clock::now() >= next && !ending_.load()) {
      look();
      next = Clock::now() + every;
    }
  }
}

}  // namespace zg
