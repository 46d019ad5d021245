// Which waiter is served next, by urgency and by turns.
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "io/fair_queue.hpp"
#include "support.hpp"

namespace zg::io::test {
namespace {

QueueEntry waiter(Priority priority, Op op = Op::kRead) {
  QueueEntry w;
  w.priority = priority;
  w.op = op;
  return w;
}

// Serves `blocks` blocks, all of the waiters having more to do; how many each got.
std::map<const QueueEntry*, int> serve(FairQueue& queue, int blocks, std::int64_t bytes = kPage) {
  std::map<const QueueEntry*, int> served;
  for (int i = 0; i < blocks; ++i) {
    const QueueEntry* chosen = queue.choose(true);
    queue.began(*chosen, bytes);
    ++served[chosen];
  }
  return served;
}

TEST(FairQueue, TheMoreUrgentFirstAndInOrderWithinOneUrgency) {
  FairQueue queue;
  EXPECT_EQ(queue.choose(true), nullptr);
  QueueEntry back = waiter(Priority::kWriteBack), ahead = waiter(Priority::kPrefetch),
             first = waiter(Priority::kDemand), second = waiter(Priority::kDemand),
             third = waiter(Priority::kDemand);
  for (QueueEntry* w : {&back, &ahead, &first, &second, &third}) queue.push(*w);
  queue.remove(second);
  queue.push_front(second);
  for (QueueEntry* expected : {&second, &first, &third, &ahead, &back}) {
    EXPECT_EQ(queue.choose(true), expected);
    queue.remove(*expected);
  }
  EXPECT_TRUE(queue.empty());
}

TEST(FairQueue, NobodyStarves) {
  FairQueue queue;
  QueueEntry back = waiter(Priority::kWriteBack), ahead = waiter(Priority::kPrefetch),
             now = waiter(Priority::kDemand);
  for (QueueEntry* w : {&back, &ahead, &now}) queue.push(*w);
  auto served = serve(queue, 800);
  EXPECT_GE(served[&ahead], 800 / kFairShare - 2);  // the last round may be cut
  EXPECT_GE(served[&back], 800 / kFairShare - 2);
  EXPECT_GE(served[&now], 800 * 5 / kFairShare);
  queue.remove(ahead);
  served = serve(queue, 800);
  EXPECT_GE(served[&back], 800 / kFairShare);
  EXPECT_GE(served[&now], 800 * 6 / kFairShare);
}

// A waiter that comes late owes nothing for the time when nobody waited.
TEST(FairQueue, OnlyWhoWaitsIsPassed) {
  FairQueue queue;
  QueueEntry back = waiter(Priority::kWriteBack), now = waiter(Priority::kDemand);
  queue.push(now);
  serve(queue, 100);
  queue.push(back);
  EXPECT_EQ(serve(queue, kFairShare - 2)[&now], kFairShare - 2);
  EXPECT_GE(serve(queue, 2)[&back], 1);
}

TEST(FairQueue, ReadsAndWritesTakeTurnsInBytes) {
  FairQueue queue;
  QueueEntry read = waiter(Priority::kDemand, Op::kRead), write = waiter(Priority::kDemand, Op::kWrite);
  queue.push(read);
  serve(queue, 50);
  queue.push(write);
  std::int64_t bytes[2] = {0, 0};
  for (int i = 0; i < 300; ++i) {
    const QueueEntry* chosen = queue.choose(true);
    const std::int64_t n = chosen == &read ? 3 * kPage : kPage;
    queue.began(*chosen, n);
    bytes[chosen == &read ? 0 : 1] += n;
    EXPECT_LE(std::abs(bytes[0] - bytes[1]), 3 * kPage) << i;
  }
}

TEST(FairQueue, WriteBackCanBeHeldBack) {
  FairQueue queue;
  QueueEntry back = waiter(Priority::kWriteBack);
  queue.push(back);
  EXPECT_EQ(queue.choose(false), nullptr);
  EXPECT_EQ(queue.choose(true), &back);
}

TEST(FairQueue, PromotionGoesToTheEndOfTheMoreUrgentAndNeverDown) {
  FairQueue queue;
  QueueEntry a = waiter(Priority::kDemand), b = waiter(Priority::kWriteBack), c = waiter(Priority::kPrefetch);
  for (QueueEntry* w : {&a, &b, &c}) queue.push(*w);
  queue.promote(b, Priority::kDemand);
  queue.promote(a, Priority::kWriteBack);
  for (QueueEntry* expected : {&a, &b, &c}) {
    EXPECT_EQ(queue.choose(true), expected);
    queue.remove(*expected);
  }
}

// Against lists kept plainly: the same waiters, in the same order.
TEST(FairQueue, RandomPushesAndRemovalsKeepTheLists) {
  const std::uint64_t seed = printed_seed();
  const NamedRandom random(seed, "fair queue");
  std::vector<QueueEntry> waiters(40);
  std::map<int, std::vector<QueueEntry*>> model;
  FairQueue queue;
  std::uint64_t dice = 0;
  const auto roll = [&](std::uint64_t n) { return random.below(dice++, n); };
  const auto key = [](const QueueEntry& w) {
    return 2 * static_cast<int>(w.priority) + (w.op == Op::kRead ? 0 : 1);
  };
  for (int step = 0; step < 20'000; ++step) {
    QueueEntry& w = waiters[roll(waiters.size())];
    if (!w.queued) {
      w.priority = static_cast<Priority>(roll(kPriorities));
      w.op = roll(2) == 0 ? Op::kRead : Op::kWrite;
      auto& list = model[key(w)];
      if (roll(2) == 0) {
        queue.push(w);
        list.push_back(&w);
      } else {
        queue.push_front(w);
        list.insert(list.begin(), &w);
      }
    } else if (roll(3) == 0) {
      const auto to = static_cast<Priority>(roll(kPriorities));
      if (to < w.priority) {
        std::erase(model[key(w)], &w);
        queue.promote(w, to);
        model[key(w)].push_back(&w);
      }
    } else {
      std::erase(model[key(w)], &w);
      queue.remove(w);
    }
    const QueueEntry* chosen = queue.choose(true);
    bool nobody = true, head_of_one = false;
    for (const auto& [k, list] : model) {
      nobody = nobody && list.empty();
      head_of_one = head_of_one || (!list.empty() && list.front() == chosen);
    }
    ASSERT_EQ(nobody, queue.empty());
    if (!nobody) {
      ASSERT_TRUE(head_of_one) << step;
      queue.began(*chosen, kPage);
    }
  }
}

}  // namespace
}  // namespace zg::io::test
