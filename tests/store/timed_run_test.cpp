// Timed runs against arithmetic: programs whose time is known, bounds that hold for every program, and the
// exact effect of a machine that is faster by a factor.
#include "ziggurat/store/timed_run.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "io/fair_queue.hpp"
#include "store/drive_queue.hpp"
#include "store/programs.hpp"
#include "support/seed.hpp"

namespace zg {
namespace {

using test::below;
using test::Random;

constexpr std::int64_t kSegment = 1 << 20;

// Resources: a drive's time (half duplex), the link each way, the host's memory.
TimedMachine machine_of(double read, double write, double link, double memory) {
  TimedMachine m;
  m.capacities = {1, link, link, memory};
  m.links[kNvmeRead].per_byte = {{0, 1 / read}, {3, 1}};
  m.links[kNvmeWrite].per_byte = {{0, 1 / write}, {3, 1}};
  m.links[kToDevice].per_byte = {{1, 1}, {3, 1}};
  m.links[kToHost].per_byte = {{2, 1}, {3, 1}};
  m.piece_bytes = 4 << 20;
  m.copies_in_flight = 16 << 20;
  m.prefetch_depth = 8;
  m.streams = 2;
  m.goes_on = {false, true};
  return m;
}

struct Decided {
  Decided(const TensorTable& table, const Budgets& budgets, const Program& program, int times) {
    Residency residency(table, budgets);
    for (SegmentId id = 0; id < table.segment_count(); ++id) residency.assume_content(id, Tier::kNvme);
    for (int i = 0; i < times; ++i) all.emplace_back(residency, program);
  }
  std::vector<TimedProgram> with(const std::vector<TimedOp>& ops) const {
    std::vector<TimedProgram> timed;
    for (const DecidedProgram& one : all) timed.push_back({&one, ops});
    return timed;
  }
  std::vector<DecidedProgram> all;
};

// Every operation reads a segment of its own at the device.
Program reads_in_turn(const TensorTable& table) {
  Program program("reads");
  for (SegmentId id = 0; id < table.segment_count(); ++id)
    program.add_op(std::vector<AccessStep>{{id, Tier::kDevice, Access::kRead}});
  program.finish(table.segment_count());
  return program;
}

TEST(TimedRun, APipelineOfReadsTakesTheSlowestOfItsParts) {
  const TensorTable table = test::equal_table(1, 16, kSegment);
  const Program program = reads_in_turn(table);
  const Budgets budgets{16 * kSegment, 16 * kSegment};
  const Decided decided(table, budgets, program, 1);
  const double second = static_cast<double>(kSegment);
  // The drive needs 2 s a segment, the link 1 s, an operation 0.5 s: the drive never rests, and behind it
  // come the last copy and the last operation.
  TimedMachine m = machine_of(second / 2, second, second, 100 * second);
  m.memory = budgets;
  std::vector<TimedOp> ops(16);
  for (TimedOp& op : ops) op.flow.own_seconds = 0.5;
  const TimedResult slow_drive = timed_run(table, m, decided.with(ops));
  EXPECT_DOUBLE_EQ(slow_drive.ends.back(), 16 * 2 + 1 + 0.5);
  EXPECT_DOUBLE_EQ(slow_drive.links_busy[kNvmeRead], 32);
  EXPECT_DOUBLE_EQ(slow_drive.busy[0], 8);
  EXPECT_EQ(slow_drive.traffic[kToDevice], 16 * kSegment);
  // Operations of 3 s wait for the first segment alone.
  for (TimedOp& op : ops) op.flow.own_seconds = 3;
  EXPECT_DOUBLE_EQ(timed_run(table, m, decided.with(ops)).ends.back(), 2 + 1 + 16 * 3);
}

TEST(TimedRun, LargeSegmentsPassBothLinksInPieces) {
  const TensorTable table = test::equal_table(1, 1, 4 * kSegment);
  const Program program = reads_in_turn(table);
  const Budgets budgets{4 * kSegment, 4 * kSegment};
  const Decided decided(table, budgets, program, 1);
  const double second = static_cast<double>(kSegment);
  TimedMachine m = machine_of(second, second, second, 100 * second);
  m.memory = budgets;
  const std::vector<TimedOp> ops(1);
  EXPECT_DOUBLE_EQ(timed_run(table, m, decided.with(ops)).ends.back(), 4 + 4);  // one hop after the other
  m.piece_bytes = kSegment;
  EXPECT_DOUBLE_EQ(timed_run(table, m, decided.with(ops)).ends.back(), 4 + 1);  // the last piece follows
  m.links[kToDevice].latency = 0.25;
  EXPECT_DOUBLE_EQ(timed_run(table, m, decided.with(ops)).ends.back(), 5.25);
}

TEST(TimedRun, CopiesSlowAnUpdateThatSharesTheMemory) {
  const TensorTable table = test::equal_table(1, 2, kSegment);
  Program program("update");
  program.add_op(std::vector<AccessStep>{{0, Tier::kHost, Access::kRead}});
  program.add_op(std::vector<AccessStep>{{1, Tier::kHost, Access::kRead}});
  program.finish(2);
  const Budgets budgets{4 * kSegment, 4 * kSegment};
  const Decided decided(table, budgets, program, 1);
  const double second = static_cast<double>(kSegment);
  // Memory gives a segment a second. The drive could, too, and so could the first operation: each has a half
  // while both are under way.
  TimedMachine m = machine_of(second, second, second, second);
  m.memory = budgets;
  std::vector<TimedOp> ops(2);
  ops[0].flow = {1, {{3, second}}};
  const TimedResult r = timed_run(table, m, decided.with(ops));
  EXPECT_DOUBLE_EQ(r.ends.back(), 1 + 2);
  EXPECT_DOUBLE_EQ(r.used[3], 3 * second);
}

// Operations that read or write segments at the host.
struct HostOp {
  std::vector<SegmentId> segments;
  Access access = Access::kRead;
  double seconds = 1;
};
double end_of(const std::vector<HostOp>& host_ops, int in_memory, const TimedMachine& like) {
  const TensorTable table = test::equal_table(1, 5, kSegment);
  Program program("host");
  std::vector<TimedOp> ops;
  for (const HostOp& op : host_ops) {
    std::vector<AccessStep> accesses;
    for (const SegmentId id : op.segments) accesses.push_back({id, Tier::kHost, op.access});
    program.add_op(accesses);
    ops.push_back({0, {op.seconds, {}}});
  }
  program.finish(5);
  TimedMachine m = like;
  m.memory = {kSegment, in_memory * kSegment};
  const Decided decided(table, m.memory, program, 1);
  return timed_run(table, m, decided.with(ops)).ends.back();
}

TEST(TimedRun, ReadsAndWritesOfDrivesTakeTurns) {
  const double second = static_cast<double>(kSegment);
  TimedMachine m = machine_of(second, second, second, 100 * second);
  // Segment 0, which operation 0 has written, makes room for segment 2 while segment 1 is read.
  const std::vector<HostOp> ops = {
      {{0}, Access::kOverwrite, 0}, {{1}, Access::kRead, 2}, {{2}}, {{1}}, {{0}}};
  // At the same time both take 2 s, and operation 1 begins then. The last operation reads segment 0 anew.
  EXPECT_DOUBLE_EQ(end_of(ops, 2, m), 2 + 2 + 1 + 1 + (1 + 1));
  // In turns the read is first, and takes 1 s.
  m.drives_take_turns = true;
  EXPECT_DOUBLE_EQ(end_of(ops, 2, m), 1 + 2 + 1 + 1 + (1 + 1));
}

TEST(TimedRun, ReadsThatTheThreadWaitsForComeFirst) {
  const double second = static_cast<double>(kSegment);
  TimedMachine m = machine_of(second, second, second, 100 * second);
  m.drives_take_turns = true, m.drive_window = 1;
  // Operation 1 waits for its three reads, of 1 s each. The write of segment 0 comes after them, although
  // reads and writes of equal urgency take turns.
  const std::vector<HostOp> ops = {
      {{0}, Access::kOverwrite, 0}, {{1, 2, 3}, Access::kRead, 2}, {{4}}, {{1, 2, 3}}, {{0}}};
  EXPECT_DOUBLE_EQ(end_of(ops, 4, m), 3 + 2 + 1 + 1 + (1 + 1));
}

TEST(TimedRun, SomeStreamsGoOnBehindTheEndOfAProgram) {
  const TensorTable table = test::equal_table(1, 1, kSegment);
  const Program program = reads_in_turn(table);
  const Budgets budgets{kSegment, kSegment};
  const Decided decided(table, budgets, program, 1);
  const double second = static_cast<double>(kSegment);
  TimedMachine m = machine_of(second, second, second, 100 * second);
  m.memory = budgets;
  std::vector<TimedOp> ops(1);
  ops[0].flow.own_seconds = 5;
  const TimedResult waits = timed_run(table, m, decided.with(ops));
  EXPECT_DOUBLE_EQ(waits.ends.back(), 1 + 1 + 5);
  ops[0].stream = 1;
  const TimedResult goes_on = timed_run(table, m, decided.with(ops));
  EXPECT_DOUBLE_EQ(goes_on.ends.back(), 1 + 1);
  EXPECT_DOUBLE_EQ(goes_on.drained, 1 + 1 + 5);
}

// Work of random programs: on two streams, some of it in the host's memory.
std::vector<TimedOp> random_work(Random& random, std::int32_t ops, double scale) {
  std::vector<TimedOp> work(static_cast<std::size_t>(ops));
  for (TimedOp& op : work) {
    op.stream = below(random, 4) == 0 ? 1 : 0;
    op.flow.own_seconds = scale * below(random, 100) / 100;
    if (below(random, 3) == 0) op.flow.demands = {{3, 1000.0 * below(random, 20)}};
  }
  return work;
}

TEST(TimedRun, IsBetweenTheBoundAndTheSumOfPhases) {
  const std::uint64_t seed = test::test_seed(51);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  Random random(seed);
  int runs = 0, overlapped = 0, windows_matter = 0, helped = 0, hindered = 0;
  double worst = 0;
  for (int round = 0; round < 300; ++round) {
    const TensorTable table = test::random_table(random, 1, 6 + below(random, 30));
    std::vector<bool> given(static_cast<std::size_t>(table.segment_count()));
    for (SegmentId id = 0; id < table.segment_count(); ++id)
      given[static_cast<std::size_t>(id)] = table.segment(id).lowest == Tier::kNvme;
    const Program program =
        test::random_program(random, "random", table, given, {.ops = 20 + below(random, 40)});
    Budgets budgets{table.total_charge(Tier::kDevice), table.total_charge(Tier::kHost)};
    const int part = 2 + below(random, 8);
    budgets = {budgets.device * part / 9, budgets.host * part / 9};
    Residency residency(table, budgets);
    for (SegmentId id = 0; id < table.segment_count(); ++id) {
      if (given[static_cast<std::size_t>(id)]) residency.assume_content(id, Tier::kNvme);
    }
    std::vector<DecidedProgram> decided;
    try {
      for (int i = 0; i < 3; ++i) decided.emplace_back(residency, program);
    } catch (const Error&) {
      continue;  // too small
    }
    const double drive = 1e5 * (1 + below(random, 30));
    TimedMachine m = machine_of(drive, drive / 2, 1e6, 1.5e6);
    m.memory = budgets;
    m.piece_bytes = 4096;
    m.drives_take_turns = below(random, 2) == 0;
    m.drive_window = 4096 * below(random, 8);
    const std::vector<TimedOp> ops = random_work(random, program.op_count(), 0.02);
    std::vector<TimedProgram> timed;
    for (const DecidedProgram& one : decided) timed.push_back({&one, ops});
    const TimedResult r = timed_run(table, m, timed);
    ++runs;
    LinkBytes traffic;
    for (const DecidedProgram& one : decided) traffic += one.traffic();
    EXPECT_EQ(r.traffic.of, traffic.of) << "every move that was decided is carried out";
    EXPECT_LE(r.peak[0], budgets.device);
    EXPECT_LE(r.peak[1], budgets.host);
    double sum = 0, bound = 0;
    for (std::size_t i = 0; i < r.used.size(); ++i) bound = std::max(bound, r.used[i] / m.capacities[i]);
    std::array<double, 2> of_stream{};
    for (const TimedOp& op : ops)
      of_stream[static_cast<std::size_t>(op.stream)] += 3 * seconds_alone(op.flow, m.capacities);
    bound = std::max({bound, of_stream[0], of_stream[1]});
    sum = of_stream[0] + of_stream[1];
    for (int l = 0; l < kLinks; ++l) {
      Flow flow{0, m.links[static_cast<std::size_t>(l)].per_byte};
      if (traffic[static_cast<Link>(l)] > 0)
        sum += static_cast<double>(traffic[static_cast<Link>(l)]) * seconds_alone(flow, m.capacities);
    }
    EXPECT_GE(r.drained, bound * (1 - 1e-9));
    EXPECT_LE(r.drained, sum * (1 + 1e-9));
    overlapped += r.drained < 0.95 * sum ? 1 : 0;
    TimedMachine deep = m, shallow = m;
    deep.drives_take_turns = shallow.drives_take_turns = true;
    deep.drive_window = 0, shallow.drive_window = 1;
    windows_matter +=
        timed_run(table, deep, timed).drained != timed_run(table, shallow, timed).drained ? 1 : 0;
    // One more drive of the same kind.
    TimedMachine more = m;
    for (const Link link : {kNvmeRead, kNvmeWrite}) more.links[link].per_byte.front().amount /= 2;
    const double gain = 1 - timed_run(table, more, timed).drained / r.drained;
    helped += gain > 0.01 ? 1 : 0, hindered += gain < -0.01 ? 1 : 0;
    worst = std::min(worst, gain);
    // The same machine, but everything in it is faster by a power of two: the time is exactly that much less.
    TimedMachine faster = m;
    for (std::size_t i = 1; i < m.capacities.size(); ++i) faster.capacities[i] *= 4;
    for (const Link link : {kNvmeRead, kNvmeWrite}) faster.links[link].per_byte.front().amount /= 4;
    std::vector<TimedOp> quick = ops;
    for (TimedOp& op : quick) op.flow.own_seconds /= 4;
    for (TimedProgram& one : timed) one.ops = quick;
    const TimedResult q = timed_run(table, faster, timed);
    EXPECT_EQ(4 * q.drained, r.drained);
    for (std::size_t i = 0; i < r.ends.size(); ++i) EXPECT_EQ(4 * q.ends[i], r.ends[i]);
  }
  EXPECT_GT(runs, 100);
  EXPECT_GT(overlapped, runs / 2);
  EXPECT_GT(windows_matter, runs / 20);
  // A faster drive changes what is moved first, and may so make a program of a fixed order slower (Graham's
  // anomalies): seldom, and by little.
  EXPECT_GT(helped, runs / 3);
  EXPECT_LE(hindered, runs / 20) << "worst " << worst;
  EXPECT_GT(worst, -0.15);
}

// Jobs of random urgency join the queue and leave it, and some become urgent, as in the engine's own queue.
TEST(DriveQueue, ChoosesAsTheEngineDoes) {
  const std::uint64_t seed = test::test_seed(53);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  Random random(seed);
  struct Both {
    ActionNode node;
    io::QueueEntry entry;
    std::int64_t bytes = 0;
  };
  std::deque<Both> all;
  io::FairQueue engine;
  DriveQueue queue;
  std::vector<Both*> waiting;
  int served = 0, hurried = 0;
  for (int round = 0; round < 20'000; ++round) {
    const int what = below(random, 5);
    if (what < 2) {
      Both& one = all.emplace_back();
      const bool writes = below(random, 2) == 0;
      one.node.action.kind = Action::Kind::kCopy;
      one.node.action.from = writes ? Tier::kHost : Tier::kNvme;
      one.node.action.tier = writes ? Tier::kNvme : Tier::kHost;
      one.bytes = 4096 * (1 + below(random, 4));
      constexpr Urgency kUrgencies[] = {Urgency::kDemand, Urgency::kPrefetch, Urgency::kWriteBack};
      const int urgency = below(random, 3);
      one.entry.op = writes ? io::Op::kWrite : io::Op::kRead;
      one.entry.priority = static_cast<io::Priority>(urgency);
      engine.push(one.entry);
      queue.push({&one.node, 0, one.bytes, true, 0}, kUrgencies[urgency]);
      waiting.push_back(&one);
    } else if (what == 2 && !waiting.empty()) {
      Both& one = *waiting[static_cast<std::size_t>(below(random, static_cast<int>(waiting.size())))];
      hurried += one.entry.priority == io::Priority::kDemand ? 0 : 1;
      engine.promote(one.entry, io::Priority::kDemand);
      queue.hurry(one.node);
    } else if (io::QueueEntry* const next = engine.choose(true); next != nullptr) {
      const auto job = queue.next(1);
      ASSERT_TRUE(job);
      const auto found =
          std::find_if(waiting.begin(), waiting.end(), [&](const Both* one) { return &one->entry == next; });
      ASSERT_EQ(job->copy, &(*found)->node) << "after " << served;
      engine.began(*next, (*found)->bytes);
      engine.remove(*next);
      queue.done(*job);
      waiting.erase(found), ++served;
    } else {
      EXPECT_FALSE(queue.next(1));
    }
  }
  EXPECT_GT(served, 5000);
  EXPECT_GT(hurried, 500);
}

TEST(DriveQueue, WhatIsInFlightIsNotOvertaken) {
  ActionNode slow, urgent;
  for (ActionNode* node : {&slow, &urgent})
    node->action.kind = Action::Kind::kCopy, node->action.from = Tier::kNvme, node->action.tier = Tier::kHost;
  const auto order = [&](std::int64_t window) {
    DriveQueue queue;
    for (int i = 0; i < 4; ++i) queue.push({&slow, i, 100, false, 0}, Urgency::kPrefetch);
    queue.done(*queue.next(window));
    queue.push({&urgent, 9, 100, false, 0}, Urgency::kDemand);
    std::vector<std::int64_t> firsts;
    while (const auto job = queue.next(window)) firsts.push_back(job->first), queue.done(*job);
    return firsts;
  };
  using Firsts = std::vector<std::int64_t>;
  EXPECT_EQ(order(100), (Firsts{9, 1, 2, 3}));
  EXPECT_EQ(order(200), (Firsts{1, 9, 2, 3}));
  EXPECT_EQ(order(0), (Firsts{1, 2, 3, 9})) << "without a bound all are in flight at once";
}

TEST(Flows, SharesAreFair) {
  const std::uint64_t seed = test::test_seed(52);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  Random random(seed);
  for (int round = 0; round < 2000; ++round) {
    const int resources = 1 + below(random, 5), count = 1 + below(random, 8);
    std::vector<double> capacities;
    for (int i = 0; i < resources; ++i) capacities.push_back(1 + below(random, 50));
    std::vector<Flow> flows(static_cast<std::size_t>(count));
    std::vector<const Flow*> all;
    for (Flow& flow : flows) {
      flow.own_seconds = 0.1 * (1 + below(random, 10));
      for (int r = 0; r < resources; ++r) {
        if (below(random, 2) == 0) flow.demands.push_back({r, 1.0 + below(random, 40)});
      }
      all.push_back(&flow);
    }
    const std::vector<double> shares = fair_shares(all, capacities);
    std::vector<double> taken(capacities.size());
    for (std::size_t f = 0; f < flows.size(); ++f) {
      for (const FlowDemand& d : flows[f].demands)
        taken[static_cast<std::size_t>(d.resource)] +=
            shares[f] * d.amount / seconds_alone(flows[f], capacities);
    }
    for (std::size_t r = 0; r < capacities.size(); ++r) EXPECT_LE(taken[r], capacities[r] * (1 + 1e-9));
    // Max-min fair: who is not at full speed uses a resource that is used up, on which nobody has a larger
    // share.
    for (std::size_t f = 0; f < flows.size(); ++f) {
      EXPECT_GT(shares[f], 0);
      EXPECT_LE(shares[f], 1);
      if (shares[f] == 1) continue;
      bool held = false;
      for (const FlowDemand& d : flows[f].demands) {
        const auto r = static_cast<std::size_t>(d.resource);
        double most = 0;
        for (std::size_t g = 0; g < flows.size(); ++g) {
          for (const FlowDemand& e : flows[g].demands) {
            if (e.resource == d.resource) most = std::max(most, shares[g]);
          }
        }
        held = held || (taken[r] > capacities[r] * (1 - 1e-9) && shares[f] >= most * (1 - 1e-9));
      }
      EXPECT_TRUE(held) << "flow " << f << " could be faster";
    }
  }
}

}  // namespace
}  // namespace zg
