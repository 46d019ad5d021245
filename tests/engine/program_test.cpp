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
  std::int32_t device_updates;
  std::int64_t micro_batches;
  MasterFormat master;
  bool frozen;  // a parameter of block 0, and all of block 1
};
std::string text(const Case& c) {
  const std::string where = c.device_updates == 0           ? "host"
                            : c.device_updates == kAllUnits ? "device"
                                                            : fmt::format("device_{}", c.device_updates);
  return fmt::format("{}_{}_{}_{}_{}_{}_{}{}", c.arch == Arch::kGpt2 ? "gpt2" : "llama", name_of(c.timing),
                     c.accumulation == Accumulation::kLayerMajor ? "layers" : "micro_batches",
                     c.recompute ? "recompute" : "keep", where, c.micro_batches,
                     c.master == MasterFormat::kSplit ? "split" : "full", c.frozen ? "_frozen" : "");
}

class Programs : public testing::TestWithParam<Case> {
 protected:
  Programs()
      : model(config(), GetParam().master == MasterFormat::kSplit ? DType::kBF16 : DType::kF32, host_ops()),
        layout(model, options(model)),
        programs(layout, GetParam().timing) {}

  static ModelConfig config() { return GetParam().arch == Arch::kGpt2 ? tiny_gpt2() : tiny_llama(); }
  static LayoutOptions options(const Model& model) {
    LayoutOptions o = {.micro_batch = {2, 13}, .state_segment_bytes = 48 << 10};
    o.gradient = model.dtype();
    o.state.master = GetParam().master;
    o.micro_batches = GetParam().micro_batches;
    o.accumulation = GetParam().accumulation;
    o.recompute = GetParam().recompute;
    o.device_updates = GetParam().device_updates;
    if (GetParam().frozen) {
      for (const Unit& unit : model.units()) o.groups.emplace_back(unit.params.size(), 0);
      o.groups[1][1] = kFrozen;
      std::ranges::fill(o.groups[2], kFrozen);
    }
    return o;
  }
  bool deferred() const { return GetParam().timing == UpdateTiming::kDeferred; }
  bool separate() const { return GetParam().timing == UpdateTiming::kSeparate; }
  bool early() const { return GetParam().timing == UpdateTiming::kEarly; }
  Tier tier_of(std::int32_t unit) const {
    return unit < GetParam().device_updates ? Tier::kDevice : Tier::kHost;
  }

  Model model;
  Layout layout;
  StepPrograms programs;
};

// Follows the content of every segment through programs.
class Contents {
 public:
  explicit Contents(const Layout& layout)
      : layout_(layout), states_(static_cast<std::size_t>(layout.table.segment_count())) {}
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
    std::int32_t unit = 0;
    for (std::int32_t id = 0; id < layout.table.segment_count(); ++id) {
      const Role role = layout.table.tensor(layout.table.segment(id).tensor).spec.role;
      if (role != Role::kActivation) continue;
      EXPECT_FALSE(contents.present(id)) << layout.table.segment_name(id);
    }
    for (const auto& u : layout.tiles) {
      if (u.accumulator != Layout::kNone) {
        EXPECT_FALSE(contents.present(layout.whole(u.accumulator)));
      }
      if (u.gradient != Layout::kNone) {
        EXPECT_EQ(contents.present(layout.whole(u.gradient)), gradients);
      }
      // A weight that the next update overwrites need not be kept; one that holds half of its master, or that
      // is not trained, must be.
      const bool rebuilt =
          GetParam().master == MasterFormat::kFull && (!GetParam().frozen || (unit != 1 && unit != 2));
      EXPECT_EQ(layout.update_rebuilds_weight(unit), rebuilt);
      EXPECT_EQ(contents.present(layout.whole(u.weight)), !gradients || !rebuilt);
      ++unit;
    }
  };
  contents.run(programs.initialize);
  nothing_else_is_left(false);
  for (int round = 0; round < 2; ++round) {
    if (separate()) {
      for (int i = 0; i < 3; ++i) {
        contents.run(first);
        nothing_else_is_left(true);
        contents.run(programs.flush);
        nothing_else_is_left(false);
      }
    } else {
      contents.run(deferred() ? first : step);
      nothing_else_is_left(deferred());
      contents.run(step);
      contents.run(step);
      nothing_else_is_left(deferred());
      if (deferred()) contents.run(programs.flush);
      nothing_else_is_left(false);
    }
    contents.run(programs.evaluate);
    contents.run(programs.evaluate);
    nothing_else_is_left(false);
  }
}

TEST_P(Programs, EachUnitIsUpdatedOnceFromAllMicroBatches) {
  const auto units = layout.tiles.size();
  const auto micro_batches = static_cast<int>(GetParam().micro_batches);
  const bool tied = model.config().tied;
  const auto expected_updates = [&](std::size_t unit) {
    return GetParam().frozen && unit == 2 ? 0 : layout.state_segments(static_cast<std::int32_t>(unit));
  };
  for (const StepProgram* p : {&programs.first, &programs.step}) {
    if (separate() && p == &programs.step) continue;  // never runs
    std::vector<int> added(units), firsts(units), updates(units), finished(units);
    std::map<std::pair<std::int32_t, std::int32_t>, int> forwards, backwards;
    for (std::size_t i = 0; i < p->ops.size(); ++i) {
      const StepOp& op = p->ops[i];
      const auto u = static_cast<std::size_t>(op.unit);
      for (const AccessStep& a : p->program.op(static_cast<std::int32_t>(i))) {
        const bool update = op.kind == OpKind::kUpdate;
        EXPECT_EQ(a.tier, update ? tier_of(op.unit) : Tier::kDevice);
        for (std::size_t v = 0; v < units; ++v) {
          const TensorId sum = layout.tiles[v].accumulator;
          if (sum == Layout::kNone || a.segment != layout.whole(sum) || op.kind == OpKind::kFinishGradient)
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
    const bool has_updates = early() || (deferred() && p == &programs.step);
    for (std::size_t u = 0; u < units; ++u) {
      SCOPED_TRACE(model.units()[u].name);
      const int trained = GetParam().frozen && u == 2 ? 0 : 1;  // else there is no gradient
      EXPECT_EQ(added[u], trained * micro_batches * (u == 0 && tied ? 2 : 1));
      EXPECT_EQ(firsts[u], trained);
      EXPECT_EQ(finished[u], trained);
      EXPECT_EQ(updates[u], has_updates ? expected_updates(u) : 0);
    }
    const auto each = static_cast<std::size_t>(layout.layers() * micro_batches);
    EXPECT_EQ(forwards.size(), each);
    EXPECT_EQ(backwards.size(), each);
    for (const auto& [key, times] : forwards) EXPECT_EQ(times, 1);
    for (const auto& [key, times] : backwards) EXPECT_EQ(times, 1);
  }
  // The updates alone: each segment once, and nothing else.
  std::vector<std::int32_t> updates(units);
  for (const StepOp& op : programs.flush.ops) {
    EXPECT_EQ(op.kind, OpKind::kUpdate);
    EXPECT_EQ(op.segment, updates[static_cast<std::size_t>(op.unit)]++);
  }
  for (std::size_t u = 0; u < units; ++u) EXPECT_EQ(updates[u], expected_updates(u));
}

// Each operand of each operation is the tensor that its name says, and no access is without a name.
TEST_P(Programs, OperandsAreWhatTheirNamesSay) {
  for (const auto part : {&StepPrograms::initialize, &StepPrograms::first, &StepPrograms::step,
                          &StepPrograms::flush, &StepPrograms::evaluate}) {
    const StepProgram& p = programs.*part;
    for (std::size_t i = 0; i < p.ops.size(); ++i) {
      const StepOp& op = p.ops[i];
      const auto accesses = p.program.op(static_cast<std::int32_t>(i));
      SCOPED_TRACE(fmt::format("{}, operation {}: {}", p.program.name(), i, name_of(op.kind)));
      const Layout::TileTensors &unit = layout.unit(op.unit), &embedding = layout.unit(0);
      const auto m = static_cast<std::size_t>(op.micro_batch % layout.options.live_micro_batches());
      // The residual stream is numbered by what comes after it: block 0 reads 0 and makes 1.
      const auto reads = static_cast<std::size_t>(op.unit > 0 ? op.unit - 1 : 0);
      const auto makes = static_cast<std::size_t>(op.unit);
      std::size_t named = 0;
      const auto expect = [&](Operand operand, auto&& segment) {
        if (!op.has(operand)) return;
        const std::int8_t at = op.access[static_cast<std::size_t>(operand)];
        ASSERT_LT(static_cast<std::size_t>(at), accesses.size());
        EXPECT_EQ(accesses[static_cast<std::size_t>(at)].segment, segment())
            << "operand " << static_cast<int>(operand);
        ++named;
      };
      expect(Operand::kWeight, [&] { return layout.whole(unit.weight); });
      expect(Operand::kTable, [&] { return layout.whole(embedding.weight); });
      expect(Operand::kInput, [&] { return layout.whole(layout.activation[reads][m]); });
      expect(Operand::kOutput, [&] { return layout.whole(layout.activation[makes][m]); });
      expect(Operand::kSaved, [&] { return layout.whole(layout.saved[reads][m]); });
      expect(Operand::kActivationGradient, [&] { return layout.whole(layout.activation_gradient[m]); });
      expect(Operand::kAccumulator, [&] { return layout.whole(unit.accumulator); });
      expect(Operand::kTableAccumulator, [&] { return layout.whole(embedding.accumulator); });
      expect(Operand::kGradient, [&] { return layout.whole(unit.gradient); });
      expect(Operand::kState, [&] { return layout.state_segment(op.unit, op.segment); });
      EXPECT_EQ(named, accesses.size());
    }
  }
}

// A unit of which nothing is trained has neither state nor a gradient, and one of which a part is trained has
// state of that part alone.
TEST_P(Programs, WhatIsFrozenHasNoState) {
  for (std::size_t u = 0; u < layout.tiles.size(); ++u) {
    const Unit& unit = model.units()[u];
    const Layout::TileTensors& t = layout.tiles[u];
    SCOPED_TRACE(unit.name);
    const bool none = GetParam().frozen && u == 2, part = GetParam().frozen && u == 1;
    EXPECT_EQ(layout.table.find(unit.name + ".state") < 0, none);
    EXPECT_EQ(layout.table.find(unit.name + ".gradient") < 0, none);
    EXPECT_EQ(t.state == Layout::kNone, none);
    EXPECT_EQ(t.gradient == Layout::kNone, none);
    const std::int64_t frozen = none ? unit.count : part ? unit.params[2].offset - unit.params[1].offset : 0;
    EXPECT_EQ(t.state_elements, unit.count - frozen);
    std::int64_t elements = 0;
    for (std::int32_t i = 0; i < layout.state_segments(static_cast<std::int32_t>(u)); ++i) {
      const Layout::Elements e = layout.state_elements(static_cast<std::int32_t>(u), i);
      EXPECT_EQ(e.first, elements);
      EXPECT_EQ(layout.table.segment(layout.state_segment(static_cast<std::int32_t>(u), i)).bytes,
                layout.state().bytes(e.count));
      EXPECT_LE(layout.state().bytes(e.count), layout.options.state_segment_bytes);
      elements += e.count;
    }
    EXPECT_EQ(elements, t.state_elements);
    // Ranges: parameters in their order, each with its gap, next to each other in the state.
    std::int64_t at = 0;
    for (const Layout::StateRange& r : t.ranges) {
      EXPECT_EQ(r.state_first, at);
      EXPECT_EQ(r.unit_first, unit.params[static_cast<std::size_t>(r.param)].offset);
      EXPECT_EQ(r.unit_first % kQuantBlock, 0);
      EXPECT_EQ(r.count % kQuantBlock, 0);
      EXPECT_GE(r.count, unit.params[static_cast<std::size_t>(r.param)].count());
      at += r.count;
    }
    EXPECT_EQ(at, t.state_elements);
  }
}

TEST_P(Programs, BuiltTwiceAreTheSame) {
  const Layout layout_again(model, options(model));
  const StepPrograms again(layout_again, GetParam().timing);
  std::vector<std::uint64_t> hashes;
  for (const auto part : {&StepPrograms::initialize, &StepPrograms::first, &StepPrograms::step,
                          &StepPrograms::flush, &StepPrograms::evaluate}) {
    const StepProgram &a = programs.*part, &b = again.*part;
    EXPECT_EQ(a.program.hash(), b.program.hash());
    ASSERT_EQ(a.ops.size(), static_cast<std::size_t>(a.program.op_count()));
    ASSERT_EQ(a.ops.size(), b.ops.size());
    hashes.push_back(a.program.hash());
  }
  std::sort(hashes.begin(), hashes.end());
  const auto distinct = std::unique(hashes.begin(), hashes.end()) - hashes.begin();
  // Early, the first step is one like others; separate, no step has updates in it.
  EXPECT_EQ(distinct, deferred() ? 5 : 4);
}

// What a device that is not there would take; here a GPU with much scratch.
struct OtherSizes final : OpSizes {
  std::int64_t row_groups() const override { return host_ops().row_groups(); }
  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const override { return scratch; }
  std::int64_t logits_bytes() const override { return host_ops().logits_bytes(); }
  std::int64_t scratch = 0;
};

TEST(StepPrograms, NeedNoDeviceToBeMade) {
  OtherSizes sizes;
  const auto plan = [](const Model& model) {
    const Layout layout(model, {.micro_batch = {2, 13}});
    return std::pair(StepPrograms(layout, UpdateTiming::kDeferred).step.program.hash(),
                     layout.workspace_bytes());
  };
  const Model here(tiny_gpt2(), DType::kF32, host_ops()), planned(tiny_gpt2(), DType::kF32, sizes);
  EXPECT_EQ(plan(planned), plan(here));
  // More than what the head, the other large operation, works in.
  sizes.scratch = 16 << 20;
  EXPECT_EQ(plan(planned).first, plan(here).first);
  EXPECT_GT(plan(planned).second, plan(here).second);
  EXPECT_GE(plan(planned).second, sizes.scratch);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Arch a : {Arch::kGpt2, Arch::kLlama}) {
    for (const UpdateTiming t : {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
      for (const Accumulation o : {Accumulation::kLayerMajor, Accumulation::kMicroBatchMajor}) {
        for (const bool recompute : {true, false}) {
          for (const std::int32_t on_device : {0, 2, kAllUnits}) {
            for (const std::int64_t m : {1, 3}) {
              all.push_back({a, t, o, recompute, on_device, m, MasterFormat::kFull, false});
            }
            all.push_back({a, t, o, recompute, on_device, 2, MasterFormat::kSplit, false});
            all.push_back({a, t, o, recompute, on_device, 2, MasterFormat::kFull, true});
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
