// Units that are kept in codes: their tensors, their operations and their bytes. Runs of them:
// tests/train/lora_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/reference.hpp"
#include "ziggurat/step/communication.hpp"
#include "ziggurat/step/step_program.hpp"

namespace zg::test {
namespace {

// The blocks of every second layer are coded, but for one matrix; the others are kept as elements.
struct CodedUnits : testing::Test {
  CodedUnits() {
    options.micro_batch = {2, 8};
    options.micro_batches = 2;
    options.drives = 1;
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      const Unit& unit = model.units()[u];
      options.groups.emplace_back(), options.codes.emplace_back();
      for (const Param& p : unit.params) {
        options.groups.back().push_back(p.adapter ? 0 : kFrozen);
        const bool coded = u % 2 == 1 && u < model.units().size() - 1 && !p.vector && !p.adapter &&
                           p.name.find("o_proj") == p.name.npos;
        options.codes.back().push_back(coded ? std::optional(code) : std::nullopt);
      }
    }
  }

  const ParamCode code{.format = {WeightCode::kNf4, CodeScale::kNested, 1, 64}, .nested_offset = 0.5f};
  const Model model{with_adapters(reference_llama()), DType::kBF16, host_ops()};
  LayoutOptions options;
};

TEST_F(CodedUnits, HaveCodesThatMoveAndAWeightThatDoesNot) {
  const Layout layout(model, options);
  for (std::int32_t u = 0; u <= layout.head_unit(); ++u) {
    SCOPED_TRACE(u);
    const bool coded = u % 2 == 1 && u < layout.head_unit();
    const Layout::TileTensors& t = layout.unit(u);
    const Unit& unit = model.units()[static_cast<std::size_t>(u)];
    EXPECT_EQ(t.is_coded(), coded);
    EXPECT_EQ(layout.materialize(u), coded ? Materialize::kForEachPass : Materialize::kNo);
    if (!coded) continue;
    const TensorSpec &weight = layout.table.tensor(t.weight).spec,
                     &codes = layout.table.tensor(t.stored).spec;
    EXPECT_EQ(weight.lowest, Tier::kDevice);
    EXPECT_EQ(codes.lowest, Tier::kNvme);
    EXPECT_EQ(codes.dtype, DType::kU8);
    EXPECT_EQ(t.accumulator, Layout::kNone);
    // One array after the other, each at a multiple of 64 bytes, and no more than that.
    std::int64_t at = 0, least = 0;
    std::size_t params = 0;
    for (const Layout::CodedRun& p : t.coded) {
      const Param& param = unit.params[static_cast<std::size_t>(p.param)];
      EXPECT_FALSE(param.adapter);
      EXPECT_EQ(p.code.has_value(), !param.vector && param.name.find("o_proj") == param.name.npos);
      EXPECT_EQ(p.places.codes, at);
      const CodeFormat& f = code.format;
      least += p.code ? f.code_bytes(param.rows, param.cols) + f.blocks(param.rows, param.cols) + 4 * 256 +
                            4 * f.nested_blocks(param.rows, param.cols)
                      : 2 * param.count();
      at = p.places.end;
      EXPECT_EQ(at % CodePlaces::kAlign, 0);
      ++params;
    }
    EXPECT_EQ(params, static_cast<std::size_t>(std::count_if(unit.params.begin(), unit.params.end(),
                                                             [](const Param& p) { return !p.adapter; })));
    EXPECT_EQ(codes.count, at);
    EXPECT_GE(at, least);
    EXPECT_LE(at, least + static_cast<std::int64_t>(4 * params) * CodePlaces::kAlign);
  }
}

TEST_F(CodedUnits, AreDecodedForEachPassAndDroppedAfterIt) {
  const Layout layout(model, options);
  const StepPrograms programs(layout, UpdateTiming::kSeparate);
  const StepProgram& step = programs.first;
  for (std::int32_t u = 1; u < layout.head_unit(); ++u) {
    SCOPED_TRACE(u);
    const Layout::TileTensors& t = layout.unit(u);
    int decoded = 0, passes = 0;
    bool made = !t.is_coded();
    for (const StepOp& op : step.ops) {
      if (op.unit != u) continue;

      const auto accesses = step.program.op(static_cast<std::int32_t>(&op - step.ops.data()));
      const auto use = [&](Operand operand) {
        return accesses[static_cast<std::size_t>(op.access[static_cast<std::size_t>(operand)])];
      };
      if (op.kind == OpKind::kMaterialize) {
        ++decoded;
        EXPECT_FALSE(made) << "the decoded weight was kept since the pass before";
        EXPECT_EQ(use(Operand::kStored).segment, layout.whole(t.stored));
        EXPECT_EQ(use(Operand::kStored).access, Access::kRead);
        EXPECT_EQ(use(Operand::kWeight).access, Access::kOverwrite);
        EXPECT_TRUE(calls_of(layout, op).empty()) << "nothing is exchanged";
        made = true;
      } else if (op.kind == OpKind::kForward || op.kind == OpKind::kBackward) {
        ++passes;
        EXPECT_TRUE(made) << "used before it was decoded";
        EXPECT_EQ(use(Operand::kWeight).segment, layout.whole(t.weight));
        if (t.is_coded() && use(Operand::kWeight).last) made = false;
      }
    }
    EXPECT_EQ(passes, 4) << "two micro-batches, forward and backward";
    EXPECT_EQ(decoded, t.is_coded() ? 2 : 0) << "once for all micro-batches";
    EXPECT_TRUE(!t.is_coded() || !made) << "the decoded weight is kept";
  }
}

}  // namespace
}  // namespace zg::test
