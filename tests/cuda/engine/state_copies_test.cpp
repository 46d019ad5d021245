// What initialising and reading state copies between a GPU and the host: each byte once or twice, and not the
// whole weight of a unit for each segment of its state.
#include "engine/frozen_setup.hpp"

namespace zg::test {
namespace {

TEST(StateCopies, GrowWithTheBytesAndNotWithTheSegments) {
  TinySetup s = tiny(tiny_gpt2(), {"bf16", DType::kBF16, {}});
  s.layout.device_updates = 1 << 10;  // all units
  s.layout.state_segment_bytes = 12 * 4 * kQuantBlock;
  TinyRun run(s);
  const Layout& layout = run.layout();
  std::int64_t bytes = 0, most_segments = 0;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.tiles.size()); ++t) {
    most_segments = std::max<std::int64_t>(most_segments, layout.state_segments(t));
    for (const TensorId id : {layout.tile(t).stored, layout.tile(t).state}) {
      const TensorSpec& spec = layout.table.tensor(id).spec;
      bytes += spec.count * static_cast<std::int64_t>(size_of(spec.dtype));
    }
  }
  ASSERT_GE(most_segments, 12);
  run.initialize();
  // Weights are cleared as wholes, then filled part by part, of which each is read and written back. At the
  // end the store may demote everything once.
  EXPECT_GE(run.copied(), bytes);
  EXPECT_LE(run.copied(), 3 * bytes);
}

}  // namespace
}  // namespace zg::test
