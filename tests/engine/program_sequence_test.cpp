// Which program follows which, for each timing of the updates. Names alone: nothing runs.
#include "ziggurat/step/program_sequence.hpp"

#include <string>

#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

class Sequence {
 public:
  explicit Sequence(UpdateTiming timing)
      : model_(tiny_gpt2(), DType::kF32, host_ops()),
        layout_(model_, {.micro_batch = {1, 8}}),
        programs_(layout_, timing),
        sequence_(programs_) {}

  // "first step > step": what runs, and what is announced to follow; one a program.
  std::vector<std::string> run(Activity activity) {
    std::vector<std::string> names;
    sequence_.begin(activity);
    while (const auto start = sequence_.next()) {
      names.push_back(start->program->program.name());
      if (start->next != nullptr) names.back() += " > " + start->next->program.name();
    }
    EXPECT_EQ(sequence_.next(), std::nullopt);
    return names;
  }
  const ProgramSequence& now() const { return sequence_; }

 private:
  Model model_;
  Layout layout_;
  StepPrograms programs_;
  ProgramSequence sequence_;
};

using Names = std::vector<std::string>;

TEST(ProgramSequence, DeferredUpdatesRideWithTheNextStep) {
  Sequence s(UpdateTiming::kDeferred);
  EXPECT_EQ(s.run(Activity::kInitialize), Names{"initialize"});
  EXPECT_EQ(s.run(Activity::kFlush), Names{});
  EXPECT_EQ(s.run(Activity::kStep), Names{"first step > step"});
  EXPECT_TRUE(s.now().pending());
  EXPECT_EQ(s.run(Activity::kStep), Names{"step > step"});
  EXPECT_EQ(s.run(Activity::kStepThenPause), Names{"step > flush"});
  EXPECT_EQ(s.run(Activity::kEvaluateMore), (Names{"flush", "evaluate > evaluate"}));
  EXPECT_FALSE(s.now().pending());
  EXPECT_EQ(s.run(Activity::kEvaluate), Names{"evaluate"});
  EXPECT_EQ(s.run(Activity::kStepThenPause), Names{"first step > flush"});
  // What was announced runs, even if a step comes all the same.
  EXPECT_EQ(s.run(Activity::kStep), (Names{"flush > first step", "first step > step"}));
  EXPECT_EQ(s.run(Activity::kStepThenPause), Names{"step > flush"});
  EXPECT_EQ(s.run(Activity::kFlush), Names{"flush"});
  EXPECT_EQ(s.run(Activity::kFlush), Names{});
}

TEST(ProgramSequence, EarlyUpdatesAreInEveryStep) {
  Sequence s(UpdateTiming::kEarly);
  EXPECT_EQ(s.run(Activity::kInitialize), Names{"initialize"});
  EXPECT_EQ(s.run(Activity::kStep), Names{"step > step"});
  EXPECT_FALSE(s.now().pending());
  EXPECT_EQ(s.run(Activity::kStepThenPause), Names{"step"});
  EXPECT_EQ(s.run(Activity::kFlush), Names{});
  EXPECT_EQ(s.run(Activity::kEvaluate), Names{"evaluate"});
}

TEST(ProgramSequence, SeparateUpdatesEndTheirStep) {
  Sequence s(UpdateTiming::kSeparate);
  EXPECT_EQ(s.run(Activity::kInitialize), Names{"initialize"});
  EXPECT_EQ(s.run(Activity::kStep), (Names{"first step > flush", "flush > first step"}));
  EXPECT_FALSE(s.now().pending());
  EXPECT_EQ(s.run(Activity::kStepThenPause), (Names{"first step > flush", "flush"}));
  EXPECT_EQ(s.run(Activity::kFlush), Names{});
  EXPECT_EQ(s.run(Activity::kEvaluate), Names{"evaluate"});
}

// A step that was left before its updates ran, since it diverged, still has them to run.
TEST(ProgramSequence, WhatALeftActivityOwesIsStillOwed) {
  Sequence s(UpdateTiming::kSeparate);
  ProgramSequence left = s.now();
  left.begin(Activity::kStep);
  EXPECT_EQ(left.next()->program->program.name(), "first step");
  EXPECT_TRUE(left.pending());
  left.begin(Activity::kFlush);
  EXPECT_EQ(left.next()->program->program.name(), "flush");
  EXPECT_EQ(left.next(), std::nullopt);
}

TEST(ProgramSequence, WhatIsAnnouncedAloneMayFollow) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
    Sequence s(timing);
    const auto evaluation_may_follow = [&] {
      const std::vector<Activity> all = s.now().followers();
      return std::find(all.begin(), all.end(), Activity::kEvaluate) != all.end();
    };
    (void)s.run(Activity::kInitialize);
    EXPECT_TRUE(evaluation_may_follow());
    (void)s.run(Activity::kStep);
    EXPECT_FALSE(evaluation_may_follow());
    (void)s.run(Activity::kStepThenPause);
    EXPECT_TRUE(evaluation_may_follow());
  }
}

TEST(Schedule, GroupsOfMicroBatches) {
  const auto text = [](const Schedule& schedule) {
    std::string all;
    for (const Slot& s : schedule) {
      static constexpr const char* kLetters[] = {"i", "s", "u", "e", "f", "h", "l",
                                                 "b", "n", "d", "x", "g", "w"};
      all += fmt::format("{}{}", kLetters[static_cast<std::size_t>(s.kind)], s.unit);
      const bool of_unit =
          s.kind == OpKind::kUpdate || s.kind == OpKind::kFinishGradient || s.kind == OpKind::kMaterialize;
      if (!of_unit) all += fmt::format(".{}", s.micro_batch);
      all += fmt::format("{}{} ", s.first ? "+" : "", s.last ? "!" : "");
    }
    return all;
  };
  ScheduleShape shape{2, 2, Accumulation::kLayerMajor, UpdateTiming::kDeferred};
  EXPECT_EQ(text(train_schedule(shape, true)),
            "u0 u1 e0.0 e0.1! u2 f1.0 f1.1 u3 f2.0 f2.1 h3.0+ h3.1! g3 b2.0+ b2.1! g2 b1.0+ b1.1! g1 "
            "x0.0+ x0.1 g0 ");
  shape.accumulation = Accumulation::kMicroBatchMajor;
  EXPECT_EQ(text(train_schedule(shape, true)),
            "u0 u1 e0.0 u2 f1.0 u3 f2.0 h3.0+ b2.0+ b1.0+ x0.0+ "
            "e0.1! f1.1 f2.1 h3.1! g3 b2.1! g2 b1.1! g1 x0.1 g0 ");
  shape.timing = UpdateTiming::kEarly;
  EXPECT_EQ(text(train_schedule(shape, true)),
            "e0.0 f1.0 f2.0 h3.0+ b2.0+ b1.0+ x0.0+ "
            "e0.1 f1.1 f2.1 h3.1 g3 b2.1 g2 u3 b1.1 g1 u2 x0.1 g0 u1 u0 ");
  shape.timing = UpdateTiming::kSeparate;
  EXPECT_EQ(train_schedule(shape, true), train_schedule(shape, false));
  EXPECT_EQ(text(flush_schedule(shape)), "u0 u1 u2 u3 ");
  EXPECT_EQ(text(evaluate_schedule(shape)), "e0.0 e0.1 f1.0! f1.1! f2.0! f2.1! l3.0 l3.1 ");
  // Weights that are made (w), once a step and for each pass.
  shape = {2, 1, Accumulation::kLayerMajor, UpdateTiming::kDeferred, true, {4, Materialize::kOnceAStep}};
  EXPECT_EQ(text(train_schedule(shape, true)),
            "u0 u1 w0! e0.0! u2 w1! f1.0 u3 w2! f2.0 w3! h3.0+! g3 b2.0+! g2 b1.0+! g1 x0.0+ g0 ");
  shape.materialize.assign(4, Materialize::kForEachPass);
  EXPECT_EQ(text(train_schedule(shape, true)),
            "u0 u1 w0 e0.0! u2 w1 f1.0 u3 w2 f2.0 w3! w0! h3.0+! g3 w2! b2.0+! g2 w1! b1.0+! g1 x0.0+ g0 ");
  shape.gather_ahead = 1;
  EXPECT_EQ(text(train_schedule(shape, true)),
            "u0 w0 u1 u2 w1 e0.0! u3 w2 f1.0 w3! w0! f2.0 w2! h3.0+! g3 w1! b2.0+! g2 b1.0+! g1 x0.0+ g0 ");
  EXPECT_EQ(text(evaluate_schedule(shape)), "w0 w1 e0.0 w2 f1.0! w3 w0 f2.0! l3.0 ");
  // Units of one model may differ: the first block alone is made, and dropped behind each pass.
  shape.gather_ahead = 0, shape.materialize.assign(4, Materialize::kNo);
  shape.materialize[1] = Materialize::kForEachPass;
  const Schedule mixed = train_schedule(shape, true);
  EXPECT_EQ(text(mixed), "u0 u1 e0.0! u2 w1 f1.0 u3 f2.0 h3.0+! g3 b2.0+! g2 w1! b1.0+! g1 x0.0+ g0 ");
  for (const Slot& slot : mixed) {
    const bool pass = slot.kind == OpKind::kForward || slot.kind == OpKind::kBackward;
    EXPECT_EQ(slot.drop, pass && slot.unit == 1);
  }
  EXPECT_EQ(text(evaluate_schedule(shape)), "e0.0 w1 f1.0! f2.0! l3.0 ");
}

}  // namespace
}  // namespace zg::test
