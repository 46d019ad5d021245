// Waits that a user interrupts.
#include "ziggurat/store/interrupt.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "ziggurat/store/open.hpp"

namespace zg::test {
namespace {

std::atomic<int> asked{0};

bool yes() {
  ++asked;
  return true;
}
bool no() {
  ++asked;
  return false;
}

struct Interrupt : testing::Test {
  std::unique_ptr<OpenStore> opened = open_store({.host_bytes = 1 << 20});
  Interrupt() {
    asked = 0;
    store().add({.name = "w", .dtype = DType::kU8, .count = 4096});
    opened->acquire("w", 0, Tier::kHost, Access::kOverwrite).release();
  }
  TensorStore& store() { return opened->store(); }
  // Runs `call` on a thread of its own while this one holds a lease, and returns its error.
  template <class Call>
  Errc error_beside_a_lease(const Call& call) {
    Lease mine = opened->acquire("w", 0, Tier::kHost, Access::kWrite);
    Errc code = Errc::kUsage;
    std::thread other([&] {
      try {
        call();
      } catch (const Error& e) {
        code = e.code();
      }
    });
    other.join();
    return code;
  }
};

TEST_F(Interrupt, AWaitForALeaseEndsAndLeavesTheStoreAsItWas) {
  EXPECT_EQ(error_beside_a_lease([&] {
              InterruptibleWaits interruptible(yes);
              opened->acquire("w", 0, Tier::kHost, Access::kRead);
            }),
            Errc::kInterrupted);
  EXPECT_EQ(asked.load(), 1);
  store().check();
  EXPECT_TRUE(store().has_content(0));
  EXPECT_TRUE(opened->acquire("w", 0, Tier::kHost, Access::kWrite));
}

TEST_F(Interrupt, SoDoesADiscard) {
  EXPECT_EQ(error_beside_a_lease([&] {
              InterruptibleWaits interruptible(yes);
              store().discard(0);
            }),
            Errc::kInterrupted);
  EXPECT_TRUE(store().has_content(0));
  store().check();
}

TEST_F(Interrupt, WhoDoesNotAskForItWaitsOn) {
  Lease mine = opened->acquire("w", 0, Tier::kHost, Access::kWrite);
  std::thread other([&] {
    InterruptibleWaits interruptible(no);
    { InterruptibleWaits inner(yes); }  // over before the wait
    EXPECT_TRUE(opened->acquire("w", 0, Tier::kHost, Access::kRead));
  });
  while (asked < 2) std::this_thread::yield();
  mine.release();
  other.join();
}

}  // namespace
}  // namespace zg::test
