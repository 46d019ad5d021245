// Step programs as lists: every access finds content, every content is used, every unit is updated once, from
// the gradients of all micro-batches. No byte moves here.
#include <algorithm>

#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

struct Case {
  Arch arch;
  UpdateTiming timing;
  Accumulation accumulation;
  bool recompute;
  Tier update_at;
  std::int64_t micro_batches;
};
std::string text(const Case& c) {
  return fmt::format("{}_{}_{}_{}_{}_{}", c.arch == Arch::kGpt2 ? "gpt2" : "llama",
                     c.timing == UpdateTiming::kEarly ? "early" : "deferred",
                     c.accumulation == Accumulation::kLayerMajor ? "layers" : "micro_batches",
                     c.recompute ? "recompute" : "keep", name_of(c.update_at), c.micro_batches);
}

class Programs : public testing::TestWithParam<Case> {
 protected:
  Programs()
      : model(config(), DType::kF32, host_ops()),
        layout(model, options()),
        programs(layout, GetParam().timing) {}

  static ModelConfig config() { return GetParam().arch == Arch::kGpt2 ? tiny_gpt2() : tiny_llama(); }
  static LayoutOptions options() {
    LayoutOptions o = {.micro_batch = {2, 13}, .state_segment_bytes = 48 << 10};
    o.gradient = DType::kF32;
    o.micro_batches = GetParam().micro_batches;
    o.accumulation = GetParam().accumulation;
    o.recompute = GetParam().recompute;
    o.device_updates = GetParam().update_at == Tier::kDevice ? kAllUnits : 0;
    return o;
  }
  bool deferred() const { return GetParam().timing == UpdateTiming::kDeferred; }

  Model model;
  Layout layout;
  StepPrograms programs;
};

// Follows the content of every segment.
class Contents {
 public:
  explicit Contents(const Layout& layout)
      : layout_(layout), states_(static_cast<std::size_t>(layout.table.segment_count())) {
    for (const auto& u : layout.units) {
      for (const TensorId t : {u.weight, u.state}) {
        for (std::int32_t i = 0; i < layout.table.tensor(t).segments; ++i)
          at(layout.table.tensor(t).first_segment + i) = {true, true};
      }
    }
  }
  void run(const StepProgram& p) {
    for (std::int32_t op = 0; op < p.program.op_count(); ++op) {
      for (const AccessStep& a : p.program.op(op)) {
        const std::string where = fmt::format("{}, operation {} ({}), {}", p.program.name(), op,
                                              name_of(p.ops[static_cast<std::size_t>(op)].kind),
                                              layout_.table.segment_name(a.segment));
        State& s = at(a.segment);
        if (a.access == Access::kOverwrite) {
          EXPECT_TRUE(!s.present || s.seen) << where << ": lost before anybody read it";
          s = {true, false};
        } else {
          EXPECT_TRUE(s.present) << where << ": read before it was written";
          s.seen = a.access == Access::kRead;
        }
        if (a.last) {
          EXPECT_TRUE(s.seen) << where << ": dropped before anybody read it";
          s = {false, false};
        }
      }
    }
  }
  bool present(SegmentId id) const { return states_[static_cast<std::size_t>(id)].present; }

 private:
  struct State {
    bool present = false, seen = false;
  };
  State& at(SegmentId id) { return states_[static_cast<std::size_t>(id)]; }
  const Layout& layout_;
  std::vector<State> states_;
};

TEST_P(Programs, EveryAccessFindsContentAndEveryContentIsUsed) {
  Contents contents(layout);
  const StepProgram &first = programs.first, &step = programs.step;
  // Weights, masters and moments are read by every step; gradients of activations and sums by their own step.
  const auto nothing_else_is_left = [&](bool gradients) {
    for (std::int32_t id = 0; id < layout.table.segment_count(); ++id) {
      const Role role = layout.table.tensor(layout.table.segment(id).tensor).spec.role;
      if (role != Role::kActivation) continue;
      EXPECT_FALSE(contents.present(id)) << layout.table.segment_name(id);
    }
    for (const auto& u : layout.units) {
      EXPECT_FALSE(contents.present(layout.whole(u.accumulator)));
      EXPECT_EQ(contents.present(layout.whole(u.gradient)), gradients);
      // A weight that the next update overwrites need not be kept.
      EXPECT_EQ(contents.present(layout.whole(u.weight)), !gradients);
    }
  };
  for (int round = 0; round < 2; ++round) {
    contents.run(deferred() ? first : step);
    nothing_else_is_left(deferred());
    contents.run(step);
    contents.run(step);
    nothing_else_is_left(deferred());
    if (deferred()) contents.run(programs.flush);
    nothing_else_is_left(false);
    contents.run(programs.evaluate);
    contents.run(programs.evaluate);
    nothing_else_is_left(false);
  }
}

TEST_P(Programs, EachUnitIsUpdatedOnceFromAllMicroBatches) {
  const auto units = layout.units.size();
  const auto micro_batches = static_cast<int>(GetParam().micro_batches);
  const bool tied = model.config().tied;
  for (const StepProgram* p : {&programs.first, &programs.step}) {
    std::vector<int> added(units), firsts(units), updates(units), finished(units);
    std::map<std::pair<std::int32_t, std::int32_t>, int> forwards, backwards;
    for (std::size_t i = 0; i < p->ops.size(); ++i) {
      const StepOp& op = p->ops[i];
      const auto u = static_cast<std::size_t>(op.unit);
      for (const AccessStep& a : p->program.op(static_cast<std::int32_t>(i))) {
        const bool update = op.kind == OpKind::kUpdate;
        EXPECT_EQ(a.tier, update ? GetParam().update_at : Tier::kDevice);
        for (std::size_t v = 0; v < units; ++v) {
          if (a.segment != layout.whole(layout.units[v].accumulator) || op.kind == OpKind::kFinishGradient)
            continue;
          ++added[v];
          firsts[v] += a.access == Access::kOverwrite ? 1 : 0;
          EXPECT_EQ(finished[v], 0) << "added to a sum that is already gone";
          // Who overwrites also zeroes: the flag and the access are one.
          EXPECT_EQ(a.access == Access::kOverwrite, op.first);
        }
      }
      if (op.kind == OpKind::kForward) ++forwards[{op.unit, op.micro_batch}];
      if (op.kind == OpKind::kBackward) ++backwards[{op.unit, op.micro_batch}];
      if (op.kind == OpKind::kFinishGradient) ++finished[u];
      if (op.kind == OpKind::kUpdate) {
        EXPECT_EQ(op.segment, updates[u]);
        EXPECT_EQ(op.first, updates[u] == 0);
        ++updates[u];
        // The step's own gradient early, that of the step before deferred.
        EXPECT_EQ(finished[u], deferred() ? 0 : 1);
      }
    }
    const bool has_updates = !deferred() || p == &programs.step;
    for (std::size_t u = 0; u < units; ++u) {
      SCOPED_TRACE(model.units()[u].name);
      EXPECT_EQ(added[u], micro_batches * (u == 0 && tied ? 2 : 1));
      EXPECT_EQ(firsts[u], 1);
      EXPECT_EQ(finished[u], 1);
      EXPECT_EQ(updates[u], has_updates ? layout.state_segments(static_cast<std::int32_t>(u)) : 0);
    }
    const auto each = static_cast<std::size_t>(layout.layers() * micro_batches);
    EXPECT_EQ(forwards.size(), each);
    EXPECT_EQ(backwards.size(), each);
    for (const auto& [key, times] : forwards) EXPECT_EQ(times, 1);
    for (const auto& [key, times] : backwards) EXPECT_EQ(times, 1);
  }
}

TEST_P(Programs, BuiltTwiceAreTheSame) {
  const Layout layout_again(model, options());
  const StepPrograms again(layout_again, GetParam().timing);
  std::vector<std::uint64_t> hashes;
  for (const auto part :
       {&StepPrograms::first, &StepPrograms::step, &StepPrograms::flush, &StepPrograms::evaluate}) {
    const StepProgram &a = programs.*part, &b = again.*part;
    EXPECT_EQ(a.program.hash(), b.program.hash());
    ASSERT_EQ(a.ops.size(), static_cast<std::size_t>(a.program.op_count()));
    ASSERT_EQ(a.ops.size(), b.ops.size());
    hashes.push_back(a.program.hash());
  }
  std::sort(hashes.begin(), hashes.end());
  const auto distinct = std::unique(hashes.begin(), hashes.end()) - hashes.begin();
  EXPECT_EQ(distinct, deferred() ? 4 : 3) << "early, the first step is one like others";
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Arch a : {Arch::kGpt2, Arch::kLlama}) {
    for (const UpdateTiming t : {UpdateTiming::kDeferred, UpdateTiming::kEarly}) {
      for (const Accumulation o : {Accumulation::kLayerMajor, Accumulation::kMicroBatchMajor}) {
        for (const bool recompute : {true, false}) {
          for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
            for (const std::int64_t m : {1, 3}) all.push_back({a, t, o, recompute, tier, m});
          }
        }
      }
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, Programs, testing::ValuesIn(cases()),
                         [](const auto& one) { return text(one.param); });

}  // namespace
}  // namespace zg::test
