// Stalls on a clock of the test's own, registrations, parts that do not answer, dumps on a signal.
#include "ziggurat/base/watchdog.hpp"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <stdexcept>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {
namespace {

using Message = Watchdog::Message;

class Told {
 public:
  void add(Message message, const std::string& text) {
    std::lock_guard lock(mutex_);
    all_.push_back({message, text});
    changed_.notify_all();
  }
  // Waits for so many messages, and returns them.
  std::vector<std::pair<Message, std::string>> wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return all_.size() >= count; }));
    return all_;
  }
  std::vector<std::pair<Message, std::string>> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(all_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<Message, std::string>> all_;
};

struct Counters {
  std::atomic<std::uint64_t> done{0};
  std::atomic<bool> waiting{false};
  WatchedPart part(const std::string& name) {
    return {.name = name,
            .state = [name] { return "holds what " + name + " holds\n  and more"; },
            .progress = [this] { return done.load(); },
            .waiting = [this] { return waiting.load(); }};
  }
};

// A gate at which callbacks wait.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait_until_reached() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool open_ = false;
};

class WatchdogTest : public testing::Test {
 protected:
  // Answers are waited for as long as it takes, but where a test has a part that gives none.
  Watchdog::Options options(double answer_seconds = 60) {
    return {.stall_seconds = 10,
            .answer_seconds = answer_seconds,
            .now = [this] { return now_; },
            .tell = [this](Message m, const std::string& text) { told_.add(m, text); }};
  }
  // Looks every second for so long; the kinds of what was told, by second, like "10: stall".
  std::string look(Watchdog& watchdog, int seconds) {
    std::string log;
    for (int s = 0; s < seconds; ++s) {
      now_ += std::chrono::seconds(1);
      ++second_;
      watchdog.check();
      for (const auto& [message, text] : told_.take()) {
        static constexpr const char* kNames[] = {"stall", "goes on", "dump"};
        log += fmt::format("{}{}: {}", log.empty() ? "" : ", ", second_, kNames[static_cast<int>(message)]);
        last_text_ = text;
      }
    }
    return log;
  }
  Clock::time_point now_ = Clock::time_point() + std::chrono::hours(1);
  int second_ = 0;
  Told told_;
  std::string last_text_;
};

TEST_F(WatchdogTest, AStallIsToldOnceAndAgainAfterTwiceTheTime) {
  Counters busy, idle;
  Watchdog watchdog(options());
  const auto a = watchdog.watch(busy.part("busy")), b = watchdog.watch(idle.part("idle"));
  EXPECT_EQ(look(watchdog, 100), "");  // nobody waits
  busy.waiting = true;
  second_ = 0;
  EXPECT_EQ(look(watchdog, 9), "");
  EXPECT_EQ(look(watchdog, 91), "10: stall, 20: stall, 40: stall, 80: stall");
  EXPECT_EQ(last_text_,
            "no progress for 1:20, and somebody waits for busy\n"
            "busy: progress 0, somebody waits\n  holds what busy holds\n  and more\n"
            "idle: progress 0\n  holds what idle holds\n  and more\n");
  // Anybody's progress ends it; then it may come again.
  ++idle.done;
  second_ = 0;
  EXPECT_EQ(look(watchdog, 11), "1: goes on, 11: stall");
  EXPECT_HAS(last_text_, "no progress for 10 s");
  busy.waiting = false;  // who waited has given up
  EXPECT_EQ(look(watchdog, 50), "12: goes on");
  EXPECT_EQ(last_text_, "it goes on, after 11 s without any progress");
}

TEST_F(WatchdogTest, ProgressOfAnyPartIsNoStall) {
  Counters waits, works;
  waits.waiting = true;
  Watchdog watchdog(options());
  const auto a = watchdog.watch(waits.part("waits")), b = watchdog.watch(works.part("works"));
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(look(watchdog, 9), "");
    ++works.done;
    EXPECT_EQ(look(watchdog, 1), "");
  }
  EXPECT_EQ(look(watchdog, 10), "210: stall");
}

// A pause in which the watchdog itself did not run (SIGSTOP, or the machine slept) is no stall.
TEST_F(WatchdogTest, APauseOfTheWatchdogItselfIsNoStall) {
  Counters part;
  part.waiting = true;
  Watchdog watchdog(options());
  const auto registration = watchdog.watch(part.part("part"));
  EXPECT_EQ(look(watchdog, 5), "");
  now_ += std::chrono::hours(3);
  EXPECT_EQ(look(watchdog, 1), "");
  ++part.done;
  EXPECT_EQ(look(watchdog, 1), "");
}

TEST_F(WatchdogTest, RegistrationsComeAndGo) {
  Counters one, two;
  one.waiting = true;
  Watchdog watchdog(options());
  EXPECT_EQ(watchdog.dump(), "nothing is watched\n");
  auto a = watchdog.watch(one.part("one"));
  EXPECT_EQ(look(watchdog, 11), "11: stall");  // it was first seen after a second
  {
    Watchdog::Registration moved = std::move(a);
    a = watchdog.watch(two.part("two"));
    EXPECT_HAS(watchdog.dump(), "one: progress 0, somebody waits\n");
  }
  EXPECT_EQ(watchdog.dump(), "two: progress 0\n  holds what two holds\n  and more\n");
  EXPECT_EQ(look(watchdog, 30), "12: goes on");  // nobody waits any more
  a = {};
  a.end();
  EXPECT_EQ(watchdog.dump(), "nothing is watched\n");
}

TEST_F(WatchdogTest, APartThatThrowsSaysSo) {
  Watchdog watchdog(options());
  const auto a = watchdog.watch({"bad", []() -> std::string { throw std::runtime_error("no idea"); }});
  const auto b = watchdog.watch({"good", [] { return std::string("well"); }});
  EXPECT_EQ(watchdog.dump(), "bad: progress 0\n  cannot tell its state: no idea\ngood: progress 0\n  well\n");
}

TEST_F(WatchdogTest, AStuckPartDoesNotHoldUpTheOthers) {
  Gate gate;
  Counters good;
  std::atomic<int> calls{0};
  Watchdog watchdog(options(1));
  const auto a = watchdog.watch({"stuck", [&] {
                                   ++calls;
                                   gate.pass();
                                   return std::string("free again");
                                 }});
  const auto b = watchdog.watch(good.part("good"));
  for (int i = 0; i < 3; ++i) {
    const std::string text = watchdog.dump();
    EXPECT_EQ(text.rfind("stuck: does not answer, asked ", 0), 0u) << text;
    EXPECT_HAS(text, "\ngood: progress 0\n  holds what good holds\n");
    EXPECT_EQ(calls, 1);  // not asked again before it has answered
  }
  // A part that does not answer, since its lock is held, counts as one that waits.
  EXPECT_EQ(look(watchdog, 11), "11: stall");
  EXPECT_EQ(last_text_.rfind("no progress for 10 s, and somebody waits for stuck\nstuck: does not", 0), 0u)
      << last_text_;
  gate.open();
  // The answer to the old question is still on its way, for a moment.
  std::string text;
  while ((text = watchdog.dump()).rfind("stuck: does not answer", 0) == 0) std::this_thread::yield();
  EXPECT_EQ(text.rfind("stuck: progress 0\n  free again\n", 0), 0u) << text;
  EXPECT_EQ(look(watchdog, 20), "12: goes on");
}

TEST_F(WatchdogTest, ARegistrationEndsOnlyWhenItsCallbackHas) {
  Gate gate;
  std::atomic<bool> inside{false}, ended{false};
  Watchdog watchdog(options());
  auto registration = watchdog.watch({"part", [&] {
                                        inside = true;
                                        gate.pass();
                                        inside = false;
                                        return std::string();
                                      }});
  auto dump = std::async(std::launch::async, [&] { return watchdog.dump(); });
  gate.wait_until_reached();
  auto end = std::async(std::launch::async, [&] {
    registration.end();
    ended = true;
    return inside.load();
  });
  // The dump need not wait for a part that is going.
  EXPECT_EQ(dump.get(), "nothing is watched\n");
  EXPECT_FALSE(ended);
  gate.open();
  EXPECT_FALSE(end.get());
  EXPECT_EQ(watchdog.dump(), "nothing is watched\n");
}

TEST_F(WatchdogTest, PartsComeAndGoWhileOthersDump) {
  Watchdog watchdog(options());
  std::atomic<bool> stop{false};
  auto dumps = std::async(std::launch::async, [&] {
    int count = 0;
    for (; !stop; ++count) watchdog.dump();
    return count;
  });
  std::vector<std::future<void>> users;
  for (int u = 0; u < 3; ++u) {
    users.push_back(std::async(std::launch::async, [&, u] {
      for (int i = 0; i < 200; ++i) {
        // Gone when the registration is: a callback that ran later would touch freed memory.
        auto alive = std::make_unique<Counters>();
        const auto registration = watchdog.watch(alive->part(fmt::format("user{}", u)));
        if (i % 3 == 0) watchdog.dump();
      }
    }));
  }
  for (auto& user : users) user.get();
  stop = true;
  EXPECT_GT(dumps.get(), 0);
}

TEST_F(WatchdogTest, ASignalHasTheStateWrittenAndAppended) {
  const test::TempDir directory;
  Counters part;
  for (int round = 1; round <= 2; ++round) {  // a second watchdog takes over from the first
    auto o = options();
    o.file = directory / "elsewhere.txt";
    Watchdog watchdog(o);
    watchdog.set_file(directory / "state.txt");
    const auto registration = watchdog.watch(part.part("part"));
    watchdog.dump_on_signal(SIGUSR1);
    for (std::size_t i = 1; i <= 3; ++i) {
      part.done = 10 * static_cast<std::uint64_t>(round) + i;
      ASSERT_EQ(kill(getpid(), SIGUSR1), 0);
      const auto told = told_.wait_for(i);
      EXPECT_EQ(told.back().first, Message::kDump);
      EXPECT_HAS(told.back().second, fmt::format("part: progress {}\n", part.done.load()));
    }
    told_.take();
  }
  // One that comes when the watchdog has gone does no harm.
  ASSERT_EQ(kill(getpid(), SIGUSR1), 0);
  const std::string file = read_text_file(directory / "state.txt", "the dumps");
  std::size_t at = 0;
  for (const int number : {11, 12, 13, 21, 22, 23}) {  // newest last
    const std::size_t next = file.find(fmt::format("part: progress {}\n", number), at);
    ASSERT_NE(next, std::string::npos) << number << " is not in\n" << file;
    at = next;
  }
  EXPECT_FALSE(std::filesystem::exists(directory / "elsewhere.txt"));
  const int year = std::atoi(file.c_str());
  EXPECT_GE(year, 2025) << file;
}

// With the machine's clock the watchdog's own thread looks.
TEST_F(WatchdogTest, TheThreadFindsAStallByItself) {
  Counters part;
  part.waiting = true;
  auto o = options();
  o.now = {};
  o.stall_seconds = 0.02;
  Watchdog watchdog(o);
  const auto registration = watchdog.watch(part.part("part"));
  EXPECT_EQ(told_.wait_for(1).at(0).first, Message::kStall);
  ++part.done;
  const auto told = told_.wait_for(2);
  EXPECT_TRUE(
      std::any_of(told.begin(), told.end(), [](const auto& t) { return t.first == Message::kStall; }));
}

}  // namespace
}  // namespace zg
