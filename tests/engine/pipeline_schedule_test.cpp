// The schedules of a pipeline as values. A validator carries them out stage by stage, where a send ends only
// when it is received and nothing runs beside anything, and watches what each stage holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <set>
#include <tuple>

#include "support/errors.hpp"
#include "ziggurat/step/pipeline.hpp"

namespace zg::test {
namespace {

using Kind = PipelineStep::Kind;
using Event = PipelineEvent;
using Passed = PipelineEvent::Kind;
using enum PipelineSchedule;

std::string text_of(const PipelineShape& s) {
  return fmt::format("{} of {} stages, {} chunks, {} micro-batches in groups of {}", name_of(s.schedule),
                     s.stages, s.chunks, s.micro_batches, s.group);
}

void for_each_shape(int most_stages, const std::function<void(const PipelineShape&)>& visit) {
  for (const auto schedule : {kBreadthFirst, kDepthFirst, kOneForwardOneBackward, kGPipe, kZeroBubble}) {
    for (int p = 2; p <= most_stages; ++p) {
      for (int v = 1; v <= 4; ++v) {
        for (int m = 1; m <= 16; ++m) {
          const bool groups = schedule == kDepthFirst && v > 1;
          for (int n = 0; n <= (groups ? m : 0); ++n) {
            const PipelineShape shape{p, v, m, schedule, n};
            if (problem_of(shape).empty()) visit(shape);
          }
        }
      }
    }
  }
}

// What a stage does, in order.
std::vector<std::vector<const Event*>> by_stage(const PipelineShape& shape,
                                                const std::vector<Event>& events) {
  std::vector<std::vector<const Event*>> all(static_cast<std::size_t>(shape.stages));
  for (const Event& e : events) {
    for (int s = 0; s < shape.stages; ++s) {
      if (e.is_at(s)) all[static_cast<std::size_t>(s)].push_back(&e);
    }
  }
  return all;
}

// Carries out each stage's list from its front: a step when it is first, a pass when it is first at both
// ends. Calls done(event) for each. False: something is left that nobody can do.
bool carry_out(std::vector<std::vector<const Event*>> left, const std::function<void(const Event&)>& done) {
  std::vector<std::size_t> at(left.size());
  const auto front = [&](int s) -> const Event* {
    const auto i = static_cast<std::size_t>(s);
    return at[i] < left[i].size() ? left[i][at[i]] : nullptr;
  };
  for (bool any = true; any;) {
    any = false;
    for (int s = static_cast<int>(left.size()) - 1; s >= 0; --s) {
      const Event* const e = front(s);
      if (e == nullptr || e->stage != s || (e->to >= 0 && front(e->to) != e)) continue;
      done(*e);
      ++at[static_cast<std::size_t>(s)];
      if (e->to >= 0) ++at[static_cast<std::size_t>(e->to)];
      any = true;
    }
  }
  for (std::size_t s = 0; s < left.size(); ++s) {
    if (at[s] < left[s].size()) return false;
  }
  return true;
}

// The tensors of a chunk's micro-batches, as they share them; and what each holds.
class Holder {
 public:
  Holder(const PipelineShape& shape, const std::vector<Event>& events, bool training, int fewer = 0)
      : shape_(shape), training_(training) {
    for (int part = 0; part < shape.parts(); ++part) {
      for (const auto which : kBuffers) {
        const int n = which != kActivation && !training
                          ? 1
                          : pipeline_buffers(events, shape, part % shape.stages, part / shape.stages, which);
        buffers_.push_back(std::vector<int>(static_cast<std::size_t>(std::max(1, n - fewer)), kEmpty));
        outputs_.push_back(buffers_.back());
      }
    }
  }
  void operator()(const Event& e) {
    const int part = shape_.part(e.stage, e.step.chunk), m = e.step.micro_batch, last = shape_.parts() - 1;
    switch (e.kind) {
      case Passed::kStep:
        if (e.step.kind == Kind::kForward) {
          if (part == 0) fill(buffers_, part, kActivation, m);
          check(buffers_, part, kActivation, m);
          if (part < last) fill(outputs_, part, kActivation, m);
          if (!training_) take(buffers_, part, kActivation, m);
        } else if (e.step.kind == Kind::kWeightGradient) {
          take(buffers_, part, kActivation, m);
          take(buffers_, part, kKept, m);
        } else {
          if (part == last) fill(buffers_, part, kGradient, m);
          check(buffers_, part, kGradient, m);
          if (e.step.kind == Kind::kInputGradient) {
            check(buffers_, part, kActivation, m);
            fill(buffers_, part, kKept, m);
          } else {
            take(buffers_, part, kActivation, m);
          }
          if (part == 0 && table_) take(buffers_, part, kGradient, m);
          if (part == 0 && !table_) waiting_.push_back(m);
        }
        return;
      case Passed::kActivation:
        take(outputs_, part, kActivation, m);
        return fill(buffers_, part + 1, kActivation, m);
      case Passed::kGradient:
        take(buffers_, part, kGradient, m);
        return fill(buffers_, part - 1, kGradient, m);
      case Passed::kTable:
        return;
      case Passed::kTableGradient:
        table_ = true;
        for (const int waiting : waiting_) take(buffers_, 0, kGradient, waiting);
        waiting_.clear();
    }
  }
  void table_is_there() { table_ = true; }
  int wrong() const { return wrong_; }
  bool is_empty() const {
    for (const auto& all : {buffers_, outputs_}) {
      for (const auto& ring : all) {
        if (std::any_of(ring.begin(), ring.end(), [](int m) { return m != kEmpty; })) return false;
      }
    }
    return true;
  }

 private:
  using enum PipelineBuffer;
  static constexpr PipelineBuffer kBuffers[] = {kActivation, kGradient, kKept};
  static constexpr int kEmpty = -1;
  using Rings = std::vector<std::vector<int>>;
  static int& at(Rings& rings, int part, PipelineBuffer which, int m) {
    auto& ring =
        rings[std::size(kBuffers) * static_cast<std::size_t>(part) + static_cast<std::size_t>(which)];
    return ring[static_cast<std::size_t>(m) % ring.size()];
  }
  void fill(Rings& rings, int part, PipelineBuffer which, int m) {
    int& slot = at(rings, part, which, m);
    wrong_ += slot != kEmpty;
    slot = m;
  }
  void check(Rings& rings, int part, PipelineBuffer which, int m) {
    wrong_ += at(rings, part, which, m) != m;
  }
  void take(Rings& rings, int part, PipelineBuffer which, int m) {
    check(rings, part, which, m);
    at(rings, part, which, m) = kEmpty;
  }

  const PipelineShape& shape_;
  const bool training_;
  bool table_ = false;
  Rings buffers_, outputs_;
  std::vector<int> waiting_;
  int wrong_ = 0;
};

// Each micro-batch once forward and once backward through each chunk, ascending, and each after what it
// needs.
void expect_complete(const PipelineShape& shape, const std::vector<PipelineStep>& steps, bool training) {
  const bool split = training && shape.schedule == kZeroBubble;
  std::set<std::tuple<Kind, int, int>> done;
  for (const PipelineStep& step : steps) {
    const auto has = [&](Kind kind) { return done.count({kind, step.chunk, step.micro_batch}) > 0; };
    EXPECT_TRUE(done.insert({step.kind, step.chunk, step.micro_batch}).second);
    EXPECT_TRUE(step.micro_batch == 0 || done.count({step.kind, step.chunk, step.micro_batch - 1}) > 0)
        << "not ascending";
    EXPECT_TRUE(step.kind == Kind::kForward || has(Kind::kForward));
    EXPECT_TRUE(step.kind != Kind::kWeightGradient || has(Kind::kInputGradient));
  }
  const int each = shape.chunks * shape.micro_batches;
  EXPECT_EQ(done.size(), static_cast<std::size_t>(each * (!training ? 1 : split ? 3 : 2)));
}

TEST(PipelineSchedules, EndWithoutDeadlockWhereSendsEndWhenReceived) {
  int shapes = 0, needed = 0;
  for_each_shape(8, [&](const PipelineShape& shape) {
    if (testing::Test::HasFailure()) return;
    SCOPED_TRACE(text_of(shape));
    ++shapes;
    for (const auto pass : {PipelinePass::kTraining, PipelinePass::kEvaluation}) {
      const bool training = pass == PipelinePass::kTraining;
      for (int s = 0; s < shape.stages; ++s) expect_complete(shape, pipeline_steps(shape, s, pass), training);
      for (const bool tied : {false, true}) {
        const std::vector<Event> events = pipeline_events(shape, pass, tied);
        std::vector<std::vector<PipelineStep>> steps(static_cast<std::size_t>(shape.stages));
        for (const Event& e : events) {
          if (e.kind == Passed::kStep) steps[static_cast<std::size_t>(e.stage)].push_back(e.step);
        }
        for (int s = 0; s < shape.stages; ++s)
          EXPECT_EQ(steps[static_cast<std::size_t>(s)], pipeline_steps(shape, s, pass));
        const auto lists = by_stage(shape, events);
        for (const int fewer : {0, 1}) {
          Holder holder(shape, events, training, fewer);
          if (!tied) holder.table_is_there();
          ASSERT_TRUE(carry_out(lists, [&](const Event& e) { holder(e); })) << "deadlock";
          if (fewer == 0) {
            EXPECT_EQ(holder.wrong(), 0) << "a micro-batch in another's tensor";
            EXPECT_TRUE(holder.is_empty());
          } else {
            needed += holder.wrong() > 0;
          }
        }
      }
    }
  });
  EXPECT_GT(shapes, 1900);
  EXPECT_GT(needed, shapes) << "with a tensor fewer most would not be right";
}

// The same for lists in which each stage receives just before it needs something, and sends at once: stages
// that both send wait for each other. So the validator knows a deadlock when it sees one.
TEST(PipelineSchedules, TheValidatorSeesADeadlock) {
  const PipelineShape shape{4, 1, 8, kOneForwardOneBackward};
  const std::vector<Event> events = pipeline_events(shape, PipelinePass::kTraining, false);
  auto lists = by_stage(shape, events);
  for (int s = 0; s < shape.stages; ++s) {
    auto& list = lists[static_cast<std::size_t>(s)];
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i]->to != s) continue;  // a receive moves to the step that needs it
      std::size_t j = i;
      const auto needs = [&](const Event& e) {
        return e.kind == Passed::kStep && e.step.micro_batch == list[j]->step.micro_batch &&
               (e.step.kind == Kind::kForward) == (list[j]->kind == Passed::kActivation);
      };
      while (j + 1 < list.size() && !needs(*list[j + 1])) std::swap(list[j], list[j + 1]), ++j;
    }
  }
  EXPECT_FALSE(carry_out(lists, [](const Event&) {}));
}

TEST(PipelineSchedules, HoldAsManyActivationsAsStated) {
  for_each_shape(8, [](const PipelineShape& shape) {
    SCOPED_TRACE(text_of(shape));
    const int p = shape.stages, v = shape.chunks, all = shape.micro_batches;
    for (int s = 0; s < p; ++s) {
      const int n = shape.group > 0 ? shape.group : shape.schedule == kDepthFirst ? p : all;
      int expected = all * v;
      if (shape.schedule == kOneForwardOneBackward) expected = std::min(p - s, all);
      if (shape.schedule == kZeroBubble) expected = std::min(p, all);
      if (shape.schedule == kBreadthFirst || shape.schedule == kDepthFirst)
        expected = std::min(2 * (p - s - 1) + (v - 1) * n + 1, all * v);
      EXPECT_EQ(live_activations(pipeline_steps(shape, s, PipelinePass::kTraining)), expected)
          << "stage " << s;
    }
  });
}

// Stage s of a zero-bubble schedule makes the gradients of weights s micro-batches late.
TEST(PipelineSchedules, KeepAsManyMicroBatchesBetweenHalvesAsStated) {
  for_each_shape(8, [](const PipelineShape& shape) {
    if (shape.schedule != kZeroBubble) return;
    SCOPED_TRACE(text_of(shape));
    for (const bool tied : {false, true}) {
      const auto events = pipeline_events(shape, PipelinePass::kTraining, tied);
      for (int s = 0; s < shape.stages; ++s)
        EXPECT_EQ(pipeline_buffers(events, shape, s, 0, PipelineBuffer::kKept),
                  std::min(s + 1, shape.micro_batches));
    }
  });
}

TEST(PipelineSchedules, HaveTheBubbleOfTheFormula) {
  for_each_shape(8, [](const PipelineShape& shape) {
    SCOPED_TRACE(text_of(shape));
    double end = 0;
    for (const Event& e : pipeline_events(shape, PipelinePass::kTraining, false)) end = std::max(end, e.end);
    const double work = 3.0 * shape.micro_batches * shape.chunks;
    EXPECT_NEAR(end, work * (1 + bubble_formula(shape)), 1e-9);
  });
}

// Loads of chunks into a stage's memory, which has room for some and drops the one that was used longest ago.
int fetches(const std::vector<PipelineStep>& steps, std::size_t room) {
  std::deque<int> there;
  int count = 0;
  for (const PipelineStep& step : steps) {
    const auto it = std::find(there.begin(), there.end(), step.chunk);
    if (it != there.end()) {
      there.erase(it);
    } else {
      ++count;
      if (there.size() == room) there.pop_front();
    }
    there.push_back(step.chunk);
  }
  return count;
}

// The table by which schedules are chosen under tiers: bubble, the first stage's activations in units of all
// its layers for one micro-batch, and loads of its chunks with room for one and for two.
TEST(PipelineSchedules, FetchAsOftenAsTheTableSays) {
  struct Row {
    PipelineShape shape;
    double bubble, activations;
    int one, two;
  };
  for (const Row& row :
       {Row{{4, 4, 16, kDepthFirst}, 0.047, 4.75, 75, 20}, Row{{4, 4, 16, kBreadthFirst}, 0.047, 13.75, 7, 6},
        Row{{2, 8, 16, kDepthFirst}, 0.008, 2.12, 227, 100},
        Row{{2, 8, 16, kBreadthFirst}, 0.008, 14.38, 15, 14}}) {
    SCOPED_TRACE(text_of(row.shape));
    const auto steps = pipeline_steps(row.shape, 0, PipelinePass::kTraining);
    EXPECT_NEAR(bubble_formula(row.shape), row.bubble, 0.0005);
    EXPECT_NEAR(live_activations(steps) / static_cast<double>(row.shape.chunks), row.activations, 0.0051);
    EXPECT_EQ(fetches(steps, 1), row.one);
    EXPECT_EQ(fetches(steps, 2), row.two);
  }
}

TEST(PipelineSchedules, SayWhatCannotBe) {
  EXPECT_EQ(problem_of({4, 1, 1, kBreadthFirst}), "");
  EXPECT_EQ(problem_of({1, 2, 1, kDepthFirst}), "");
  EXPECT_EQ(problem_of({4, 2, 8, kOneForwardOneBackward}), "1f1b has one chunk a stage, not 2");
  EXPECT_HAS(problem_of({4, 2, 3, kGPipe}), "at least as many micro-batches as the 4 stages, not 3");
  EXPECT_HAS(problem_of({4, 2, 8, kDepthFirst, 3}), "groups of 3, some group has fewer than the 4 stages");
  EXPECT_HAS(problem_of({4, 2, 9, kDepthFirst, 6}), "groups of 6");
  EXPECT_EQ(problem_of({4, 2, 10, kDepthFirst, 6}), "");
  EXPECT_HAS(problem_of({2, 2, 4, kBreadthFirst, 5}), "or more than there are");
}

// Beside all splits that there are.
TEST(PipelineSplit, HasTheLeastMostExpensivePart) {
  const auto cost_of = [](const std::vector<std::int32_t>& first, double before, double after) {
    double most = 0;
    for (std::size_t i = 0; i + 1 < first.size(); ++i) {
      most = std::max(most,
                      first[i + 1] - first[i] + (i == 0 ? before : 0) + (i + 2 == first.size() ? after : 0));
    }
    return most;
  };
  for (std::int32_t layers = 1; layers <= 9; ++layers) {
    for (int parts = 1; parts <= layers; ++parts) {
      for (const double before : {0.0, 0.5}) {
        for (const double after : {0.0, 1.5, 4.0}) {
          const auto first =
              split_layers(std::vector<double>(static_cast<std::size_t>(layers), 1), before, after, parts);
          ASSERT_EQ(first.size(), static_cast<std::size_t>(parts) + 1);
          EXPECT_EQ(first.front(), 0);
          EXPECT_EQ(first.back(), layers);
          double best = 1e9;
          std::vector<std::int32_t> all{0};
          const std::function<void()> extend = [&] {
            if (all.size() == first.size()) {
              if (all.back() == layers) best = std::min(best, cost_of(all, before, after));
              return;
            }
            for (std::int32_t next = all.back() + 1; next <= layers; ++next) {
              all.push_back(next);
              extend();
              all.pop_back();
            }
          };
          extend();
          EXPECT_EQ(cost_of(first, before, after), best) << layers << " layers in " << parts;
        }
      }
    }
  }
  EXPECT_EQ(split_layers(std::vector<double>(8, 1), 0, 2, 4), (std::vector<std::int32_t>{0, 2, 4, 7, 8}));
  // Layers may cost differently: 6 | 1 1 1 2 | 5 and 1 before the head's 4.
  EXPECT_EQ(split_layers(std::vector<double>{6, 1, 1, 1, 2, 5, 1}, 0, 0, 3),
            (std::vector<std::int32_t>{0, 1, 5, 7}));
}

// Layers of one second each, two for the embedding and five for the head.
TEST(PipelineSplit, ByTimeIsEvenIfItIsWorthIt) {
  const auto by_time = [](int stages, int chunks, const std::vector<std::int32_t>& counts) {
    std::vector<std::int32_t> first{0};
    std::vector<double> seconds(static_cast<std::size_t>(stages));
    seconds.front() = stages > 2 ? 2 : 0, seconds.back() = 5;
    for (std::size_t part = 0; part < counts.size(); ++part) {
      first.push_back(first.back() + counts[part]);
      seconds[part % seconds.size()] += counts[part];
    }
    return layers_by_time({stages, chunks, 8, kBreadthFirst}, first, seconds);
  };
  using Counts = std::vector<std::int32_t>;
  EXPECT_EQ(by_time(4, 1, {6, 6, 6, 6}), (Counts{5, 8, 8, 3}));
  EXPECT_EQ(by_time(4, 1, {6, 8, 7, 3}), Counts{});
  EXPECT_EQ(by_time(4, 1, {6, 7, 8, 3}), Counts{});
  EXPECT_EQ(by_time(2, 1, {4, 4}), (Counts{6, 2}));
  EXPECT_EQ(by_time(2, 2, {4, 4, 4, 4}), (Counts{5, 5, 5, 1}));
  EXPECT_EQ(by_time(2, 1, {1, 1}), Counts{}) << "every part has a layer";
  // Layers that took less time on the last stage tell that a layer's cost is not known.
  const std::vector<std::int32_t> first{0, 2, 8};
  const std::vector<double> seconds{8, 6};
  EXPECT_EQ(layers_by_time({2, 1, 8, kBreadthFirst}, first, seconds), Counts{});
}

TEST(PipelineDrawing, IsARowAStage) {
  EXPECT_EQ(drawing_of({2, 1, 3, kOneForwardOneBackward}),
            "stage 0   a0 a1 .  .  A0 A0 a2 A1 A1 .  A2 A2\n"
            "stage 1   .  a0 A0 A0 a1 A1 A1 a2 A2 A2\n");
  EXPECT_EQ(drawing_of({2, 2, 2, kBreadthFirst}),
            "stage 0   a0 a1 b0 b1 .  .  B0 B0 .  B1 B1 A0 A0 A1 A1\n"
            "stage 1   .  a0 a1 b0 B0 B0 b1 B1 B1 A0 A0 A1 A1\n");
  EXPECT_EQ(drawing_of({2, 1, 3, kZeroBubble}),
            "stage 0   a0 a1 .  A0 W0 a2 A1 W1 A2 W2\n"
            "stage 1   .  a0 A0 a1 A1 W0 a2 A2 W1 W2\n");
  EXPECT_HAS(drawing_of({2, 1, 100, kGPipe}, 60), " ...\n");
}

}  // namespace
}  // namespace zg::test
