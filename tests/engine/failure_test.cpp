// What goes wrong in the middle of training ends it with an error that says where, and never with a hang.
#include <cmath>
#include <limits>

#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

TinySetup demoting() {
  TinySetup s;
  s.layout.drives = 2;
  s.room = Room::kSmallest;
  return s;
}

// Trains until it fails; the error, if any. The run is destroyed here: it must not hang, nor abort.
struct Failure {
  std::optional<Errc> code;
  std::string where, what;
  std::int64_t step = -1;  // in which it was told; -1: before the first
  bool names_segment = false;
};
Failure train_until_it_fails(const TinySetup& setup, std::int64_t steps) {
  Failure f;
  TinyRun run(setup);
  try {
    run.initialize();
    for (std::int64_t i = 0; i < steps; ++i) {
      f.step = i;
      (void)run.step(i + 1 < steps ? Then::kTrain : Then::kPause);
    }
    run.settle();
  } catch (const Error& e) {
    f.code = e.code();
    f.where = e.where();
    f.what = e.message();
    for (std::int32_t id = 0; id < run.layout().table.segment_count(); ++id) {
      f.names_segment |= f.what.find(run.layout().table.segment_name(id)) != std::string::npos;
    }
    // A caller that goes on all the same gets the error again.
    EXPECT_THROW(run.store().drain(), Error) << f.what;
  }
  return f;
}

TEST(Diverged, NanInTheWeightsIsTold) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly}) {
    TinySetup s = demoting();
    s.timing = timing;
    s.clip = 0;
    TinyRun run(s);
    run.engine().initialize([](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
      for (std::int64_t i = begin; i < end; ++i) {
        out[i - begin] = static_cast<float>(reference_element(p, i));
        if (p.name == "h.1.mlp.c_fc.weight" && i == 5)
          out[i - begin] = std::numeric_limits<float>::quiet_NaN();
      }
    });
    const Error e = error_of([&] { (void)run.step(Then::kTrain); });
    EXPECT_EQ(e.code(), Errc::kNumeric);
    EXPECT_EQ(e.where(), "step 0");
  }
}

TEST(Diverged, TheStepIsTheOneWhoseLossIsNotFinite) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly}) {
    TinySetup s = demoting();
    s.timing = timing;
    s.clip = 0;
    s.lr = std::numeric_limits<double>::infinity();  // the first update ruins the weights
    TinyRun run(s);
    run.initialize();
    const StepResult first = run.step(Then::kTrain);
    EXPECT_TRUE(std::isfinite(first.loss) && std::isfinite(first.grad_norm));
    const Error e = error_of([&] { (void)run.step(Then::kTrain); });
    EXPECT_EQ(e.code(), Errc::kNumeric);
    EXPECT_EQ(e.where(), "step 1");
  }
}

TEST(Drives, ThatFailInTheMiddleEndTheRunAndNameTheSegment) {
  TinySetup s = demoting();
  std::int64_t blocks = 0, of_load = 0;
  {
    TinyRun run(s);
    const auto requests = [&] {
      const io::LinkCounters c = run.io()->counters(0);
      return c.read_requests + c.write_requests;
    };
    run.initialize();
    of_load = requests();
    for (int i = 0; i < 6; ++i) (void)run.step(i < 5 ? Then::kTrain : Then::kPause);
    run.settle();
    blocks = requests();
  }
  ASSERT_GT(of_load, 0);
  ASSERT_GT(blocks, of_load + 10);
  for (const Nvme kind : {Nvme::kRam, Nvme::kThreads, Nvme::kUring}) {
    for (const int prefetch : {0, 64}) {
      SCOPED_TRACE(static_cast<int>(kind) * 100 + prefetch);
      s.nvme = kind;
      s.prefetch = prefetch;
      s.faults.fail_after = of_load + (blocks - of_load) / 2;
      const Failure f = train_until_it_fails(s, 6);
      ASSERT_TRUE(f.code.has_value()) << "the run did not fail";
      EXPECT_EQ(*f.code, Errc::kIo);
      EXPECT_TRUE(f.names_segment) << f.what;
      EXPECT_HAS(f.what, "Input/output error");
      EXPECT_HAS(f.where, "drive ");
      EXPECT_GT(f.step, 0);
      // While weights are loaded.
      s.faults.fail_after = of_load / 2;
      const Failure early = train_until_it_fails(s, 6);
      ASSERT_TRUE(early.code.has_value());
      EXPECT_EQ(*early.code, Errc::kIo);
      EXPECT_EQ(early.step, -1);
    }
  }
}

// A drive that fails while an update is applied: who asked for it is told, and nobody sees a state that
// claims the update, or half of it.
TEST(Drives, ThatFailDuringAnUpdateLeaveNoneThatClaimsIt) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kSeparate}) {
    TinySetup s = demoting();
    s.layout.drives = 1;
    s.timing = timing;
    s.nvme = Nvme::kRam;
    // Blocks moved when two steps are done, when the third is, and when its updates are.
    std::int64_t blocks[3] = {};
    {
      TinyRun run(s);
      run.initialize();
      const auto count = [&] {
        const io::LinkCounters c = run.io()->counters(0);
        return c.read_requests + c.write_requests;
      };
      (void)run.step(Then::kTrain);
      (void)run.step(Then::kPause);
      run.settle();
      blocks[0] = count();
      (void)run.step(Then::kPause);
      blocks[1] = count();
      run.settle();
      blocks[2] = count();
    }
    ASSERT_GT(blocks[2], blocks[0] + 20);
    int in_step = 0, in_flush = 0, behind = 0;
    for (int part = 0; part < 12; ++part) {
      s.faults.fail_after = blocks[0] + (blocks[2] - blocks[0]) * part / 12;
      SCOPED_TRACE(fmt::format("{}, failing after {} of {} to {}", name_of(timing), s.faults.fail_after,
                               blocks[0], blocks[2]));
      TinyRun run(s);
      run.initialize();
      (void)run.step(Then::kTrain);
      (void)run.step(Then::kPause);
      run.settle();
      const auto fails = [&](const auto& action) {
        const auto e = thrown_by(action);
        if (!e) return false;
        EXPECT_EQ(e->code(), Errc::kIo);
        EXPECT_HAS(e->message(), "Input/output error");
        return true;
      };
      if (fails([&] { (void)run.step(Then::kPause); })) {
        ++in_step;
      } else if (fails([&] { run.engine().flush(); })) {
        ++in_flush;
      } else {
        // The update was applied, but its results do not reach the drives. That must be reported before
        // anybody looks at it.
        EXPECT_TRUE(fails([&] { (void)run.engine().settled_traffic(); }));
        ++behind;
      }
      const Param& p = run.model().units()[1].params[0];
      std::vector<float> out(static_cast<std::size_t>(p.count()));
      EXPECT_TRUE(fails([&] { run.engine().read_master(1, p, 0, p.count(), out.data()); }));
      EXPECT_TRUE(fails([&] { run.engine().read_moment(0, 1, p, 0, p.count(), out.data()); }));
      EXPECT_TRUE(fails([&] { (void)run.step(Then::kPause); }));
      EXPECT_TRUE(fails([&] { (void)run.evaluate(); }));
      EXPECT_TRUE(fails([&] { run.settle(); }));
    }
    // Failures came in the steps and after them, as the name of the test promises.
    EXPECT_GT(timing == UpdateTiming::kDeferred ? in_flush : in_step, 0);
    EXPECT_EQ(in_step + in_flush + behind, 12);
  }
}

// The same of deferred updates in the step after: it fails as a whole.
TEST(Drives, ThatFailDuringADeferredUpdateFailItsStep) {
  TinySetup s = demoting();
  s.layout.drives = 1;
  s.nvme = Nvme::kRam;
  std::int64_t before = 0, after = 0;
  {
    TinyRun run(s);
    run.initialize();
    const auto count = [&] {
      const io::LinkCounters c = run.io()->counters(0);
      return c.read_requests + c.write_requests;
    };
    (void)run.step(Then::kTrain);
    before = count();
    (void)run.step(Then::kTrain);
    after = count();
    (void)run.step(Then::kPause);
  }
  for (int part = 0; part < 6; ++part) {
    s.faults.fail_after = before + (after - before) * part / 6;
    SCOPED_TRACE(s.faults.fail_after);
    TinyRun run(s);
    run.initialize();
    int done = 0;
    try {
      (void)run.step(Then::kTrain);
      ++done;
      (void)run.step(Then::kTrain);
      ++done;
      (void)run.step(Then::kPause);
      ++done;
      run.settle();
      ++done;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::kIo);
    }
    EXPECT_LE(done, 3);
    // A failed write-back may come to light after the update, when nothing is left to flush, but then it
    // does.
    EXPECT_THROW(run.settle(), Error);
    EXPECT_THROW((void)run.step(Then::kPause), Error);
  }
}

TEST(Drives, WhoseContentChangesAreFoundOut) {
  TinySetup s = demoting();
  s.nvme = Nvme::kMemory;
  int reads = 0;
  TinyResult expected;
  {
    TinyRun run(s);
    expected = run.train(4);
    reads = static_cast<MemoryIo*>(run.io())->reads();
  }
  ASSERT_GT(reads, 100);
  for (const int at : {0, reads / 3, reads / 2}) {
    s.memory_faults.flip_read = at;
    const Failure f = train_until_it_fails(s, 4);
    ASSERT_TRUE(f.code.has_value()) << "read " << at << " was changed and nobody saw it";
    EXPECT_EQ(*f.code, Errc::kIo);
    EXPECT_HAS(f.what, "checksum");
    EXPECT_TRUE(f.names_segment) << f.what;
  }
  // It is the checksums that find it: without them the run ends, with other bits. (Not after each such
  // change: the last bit of one number can be rounded away.)
  s.verify = Verify::kNo;
  int changed = 0;
  for (int at = reads / 3; at < reads / 3 + 12; ++at) {
    s.memory_faults.flip_read = at;
    TinyRun run(s);
    changed += run.train(4).tensors == expected.tensors ? 0 : 1;
  }
  EXPECT_GT(changed, 0);
}

}  // namespace
}  // namespace zg::test
