#include "ziggurat/base/fiber.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace zg {
namespace {

constexpr std::size_t kStack = std::size_t{128} << 10;

struct Said {
  explicit Said(std::vector<std::string>& all) : to(all) {}
  ~Said() { to.emplace_back("destroyed"); }
  std::vector<std::string>& to;
};

TEST(Fibers, TakeTurnsWithTheirOwner) {
  std::vector<std::string> said;
  Fiber* self = nullptr;
  Fiber fiber(kStack, [&] {
    for (const char* word : {"one", "two"}) {
      said.emplace_back(word);
      self->suspend();
    }
    said.emplace_back("three");
  });
  self = &fiber;
  EXPECT_TRUE(said.empty());
  fiber.resume();
  said.emplace_back("owner");
  EXPECT_FALSE(fiber.ended());
  fiber.resume();
  EXPECT_FALSE(fiber.ended());
  fiber.resume();
  EXPECT_TRUE(fiber.ended());
  EXPECT_EQ(said, (std::vector<std::string>{"one", "owner", "two", "three"}));
}

TEST(Fibers, HandTheirErrorsToTheOwner) {
  std::vector<std::string> said;
  Fiber* self = nullptr;
  Fiber fiber(kStack, [&] {
    const Said at_the_end(said);
    self->suspend();
    throw std::runtime_error("no tile");
  });
  self = &fiber;
  fiber.resume();
  EXPECT_THROW(fiber.resume(), std::runtime_error);
  EXPECT_TRUE(fiber.ended());
  EXPECT_EQ(said, std::vector<std::string>{"destroyed"});
}

// One that is suspended, or has not begun, ends with its owner: what lies on its stack is destroyed.
TEST(Fibers, EndWithTheirOwner) {
  std::vector<std::string> said;
  bool went_on = false;
  {
    Fiber* self = nullptr;
    Fiber fiber(kStack, [&] {
      const Said at_the_end(said);
      self->suspend();
      went_on = true;
    });
    self = &fiber;
    fiber.resume();
  }
  EXPECT_FALSE(went_on);
  EXPECT_EQ(said, std::vector<std::string>{"destroyed"});
  const Fiber never_begun(kStack, [&] { went_on = true; });
  EXPECT_FALSE(never_begun.ended());
  EXPECT_FALSE(went_on);
}

TEST(Fibers, MayRunWithinEachOther) {
  std::vector<std::string> said;
  Fiber *outer_self = nullptr, *inner_self = nullptr;
  Fiber inner(kStack, [&] {
    said.emplace_back("inner");
    inner_self->suspend();
    said.emplace_back("inner again");
  });
  inner_self = &inner;
  Fiber outer(kStack, [&] {
    inner.resume();
    outer_self->suspend();
    inner.resume();
  });
  outer_self = &outer;
  outer.resume();
  said.emplace_back("owner");
  outer.resume();
  EXPECT_TRUE(inner.ended() && outer.ended());
  EXPECT_EQ(said, (std::vector<std::string>{"inner", "owner", "inner again"}));
}

}  // namespace
}  // namespace zg
