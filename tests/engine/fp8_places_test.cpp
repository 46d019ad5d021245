// Layers that are kept in FP8: wherever weights and state lie, and wherever updates run, the codes are those
// of the masters, and no bit of a run changes.
#include "engine/ranks_run.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::test {
namespace {

const bool kEmulated = test_device() == TestDevice::kEmulated;  // a step takes a second there

TinySetup kept_in_fp8(bool llama, DType dtype = DType::kBF16) {
  TinySetup s;
  s.model = llama ? tiny_llama() : tiny_gpt2();
  s.dtype = dtype;
  s.layout.stored_weights = StoredWeights::kFp8;
  if (kEmulated) s.model.layers = 2, s.layout.micro_batches = 1, s.layout.micro_batch = {1, 9};
  return s;
}

RanksOutcome train(const TinySetup& setup) {
  return train_on_ranks(setup, {}, 3);
}

// Rounds values through FP8 and back, to the type that they are computed in.
std::vector<char> through_fp8(const std::vector<float>& masters, DType dtype) {
  const auto n = static_cast<std::int64_t>(masters.size());
  std::vector<float> in = masters, scales(static_cast<std::size_t>(kFp8Weights.blocks(1, n)));
  std::vector<std::uint8_t> codes(masters.size());
  std::vector<char> out(masters.size() * size_of(dtype));
  const View code(codes.data(), DType::kU8, 1, n),
      scale(scales.data(), DType::kF32, 1, static_cast<std::int64_t>(scales.size()));
  HostStream stream("through FP8", HostStream::Mode::kInline);
  host_ops().encode_fp8(stream, View(in.data(), DType::kF32, 1, n), code, scale);
  host_ops().decode(
      stream, {.format = kFp8Weights, .codes = code, .scales = scale, .out = View(out.data(), dtype, 1, n)});
  return out;
}

// Weights as they must be computed with: of matrices of blocks the codes of their masters, of all else the
// rounded masters.
void expect_weights_of_masters(const TinySetup& s, const RanksOutcome& outcome) {
  const Model model(s.model, s.dtype, host_ops());
  for (std::size_t u = 0; u < model.units().size(); ++u) {
    for (const Param& p : model.units()[u].params) {
      const std::vector<float>& masters = outcome.masters.at(p.name);
      std::vector<char> rounded(masters.size() * size_of(s.dtype));
      const View view(rounded.data(), s.dtype, 1, static_cast<std::int64_t>(masters.size()));
      write_weights(view, masters.data());
      const bool coded = u > 0 && u + 1 < model.units().size() && !p.vector;
      const std::vector<char> codes = through_fp8(masters, s.dtype);
      EXPECT_TRUE(outcome.weights.at(p.name) == (coded ? codes : rounded)) << p.name;
      if (coded) {
        EXPECT_FALSE(codes == rounded) << p.name;
      }
    }
  }
}

TEST(Fp8Places, WeightsAreTheCodesOfTheirMasters) {
  for (const bool llama : {false, true}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(testing::Message() << (llama ? "llama " : "gpt2 ") << name_of(dtype));
      TinySetup s = kept_in_fp8(llama, dtype);
      expect_weights_of_masters(s, train_on_ranks(s, {}, 0));
      expect_weights_of_masters(s, train(s));
      s.layout.device_updates = kAllUnits;
      expect_weights_of_masters(s, train(s));
    }
  }
}

TEST(Fp8Places, ChangeNoBit) {
  for (const bool llama : {false, true}) {
    if (kEmulated && llama) continue;
    const TinySetup base = kept_in_fp8(llama);
    const RanksOutcome plain = train(base);
    const auto expect_same_with = [&](const char* what, const auto& change) {
      SCOPED_TRACE(testing::Message() << (llama ? "llama, " : "gpt2, ") << what);
      TinySetup other = base;
      change(other);
      expect_same(train(other), plain);
    };
    expect_same_with("host", [](TinySetup& s) { s.room = Room::kSmallest; });
    expect_same_with("device", [](TinySetup& s) {
      s.layout.device_updates = kAllUnits;
      s.layout.weights = s.layout.optimizer = s.layout.activations = OffloadTarget::kDevice;
    });
    expect_same_with("some updates on the device, the rest on a drive", [](TinySetup& s) {
      s.layout.device_updates = 2, s.room = Room::kSmallest, s.layout.drives = 1;
    });
    expect_same_with("NVMe, updates on the device", [](TinySetup& s) {
      s.layout.device_updates = kAllUnits, s.room = Room::kSmallest, s.layout.drives = 1;
    });
    if (kEmulated) continue;
    expect_same_with("two drives, all is kept, no prefetching", [](TinySetup& s) {
      s.room = Room::kSmallest, s.layout.drives = 2, s.layout.recompute = false, s.prefetch = 0;
    });
    expect_same_with("updates by themselves", [](TinySetup& s) { s.timing = UpdateTiming::kSeparate; });
    expect_same_with("segments of another size",
                     [](TinySetup& s) { s.layout.state_segment_bytes = 7 << 10; });
    const int before = parallelism();
    set_parallelism(1);
    expect_same_with("one thread", [](TinySetup&) {});
    set_parallelism(before);
  }
}

// A step that is skipped makes the weights again that it has dropped.
TEST(Fp8Places, SkippedStepsChangeNoBit) {
  TinySetup s = kept_in_fp8(false, DType::kF16);
  s.rule = [](std::int64_t step, UpdateRule& rule) { rule.loss_scale = step == 1 ? 1e300 : 64; };
  const RanksOutcome plain = train(s);
  EXPECT_EQ(plain.skipped, (std::vector<bool>{false, true, false}));
  expect_weights_of_masters(s, plain);
  s.room = Room::kSmallest, s.layout.drives = 1;
  expect_same(train(s), plain);
}

}  // namespace
}  // namespace zg::test
