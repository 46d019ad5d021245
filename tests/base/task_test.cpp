#include "ziggurat/base/task.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>

namespace zg {
namespace {

TEST(Task, RunsWhatItHoldsAsOftenAsItIsAsked) {
  int ran = 0;
  Task task = [&] { ++ran; };
  task();
  task();
  EXPECT_EQ(ran, 2);
  const std::function<void()> function = [&] { ran += 10; };
  Task copy = function;
  copy();
  EXPECT_EQ(ran, 12);
}

TEST(Task, HoldsWhatCanOnlyBeMoved) {
  int seen = 0;
  Task task = [p = std::make_unique<int>(7), &seen] { seen = *p; };
  Task moved = std::move(task);
  moved();
  EXPECT_EQ(seen, 7);
}

// Small and large captures alike.
template <std::size_t kBytes>
void expect_captures_end_once() {
  auto captured = std::make_shared<int>(0);
  const std::array<char, kBytes> ballast{};
  {
    Task task = [captured, ballast] { *captured += 1 + ballast[0]; };
    EXPECT_EQ(captured.use_count(), 2);
    Task moved = std::move(task);
    EXPECT_FALSE(task);
    EXPECT_TRUE(moved);
    EXPECT_EQ(captured.use_count(), 2);
    moved();
    Task other = [captured, ballast] { *captured += 10 + ballast[0]; };
    EXPECT_EQ(captured.use_count(), 3);
    moved = std::move(other);
    EXPECT_EQ(captured.use_count(), 2);
    moved();
    moved = nullptr;
    EXPECT_FALSE(moved);
    EXPECT_EQ(captured.use_count(), 1);
    moved = Task([captured, ballast] {});
  }
  EXPECT_EQ(captured.use_count(), 1);
  EXPECT_EQ(*captured, 11);
}

TEST(Task, CapturesEndOnce) {
  expect_captures_end_once<1>();
  expect_captures_end_once<200>();
}

TEST(Task, KeepsSmallCapturesInItself) {
  EXPECT_TRUE((Task::fits<std::array<char, Task::kInline>>));
  EXPECT_FALSE((Task::fits<std::array<char, Task::kInline + 1>>));
  EXPECT_TRUE(Task::fits<std::function<void()>>);
  struct alignas(64) Aligned {};
  EXPECT_FALSE(Task::fits<Aligned>);
  struct ThrowsWhenMoved {
    ThrowsWhenMoved(ThrowsWhenMoved&&) noexcept(false) {}
  };
  EXPECT_FALSE(Task::fits<ThrowsWhenMoved>);
}

TEST(Task, LetsExceptionsThrough) {
  Task task = [] { throw Error(Errc::kDevice, "here", "why"); };
  EXPECT_THROW(task(), Error);
  EXPECT_TRUE(task);
}

TEST(TaskDeathTest, AnEmptyOneCannotBeRun) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(Task()(), "a task without work is run");
}

}  // namespace
}  // namespace zg
