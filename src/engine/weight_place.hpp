// Where the weights of trained elements lie in a tile's stored form.
#pragma once
#include "ziggurat/step/tile_elements.hpp"

namespace zg {

// The byte in the stored form at which weights begin: numbers (`elements`), or kFp8Weights (`codes` and
// `scales`). -1: the form has no such array for them.
struct WeightOffsets {
  std::int64_t elements = -1, codes = -1, scales = -1;
};

// From element `first` of one of the tile's ranges on, counted from the range's first element. In a tile of
// codes it is a multiple of kQuantBlock.
inline WeightOffsets weight_offsets(const Layout& layout, std::int32_t t, const Layout::StateRange& range,
                                    std::int64_t first) {
  const Layout::TileTensors& tile = layout.tile(t);
  const auto size = static_cast<std::int64_t>(size_of(layout.model->dtype()));
  if (!tile.is_coded())
    return {.elements = (range.unit_first + first - shard_elements(layout, t).first) * size};
  const auto i = static_cast<std::size_t>(&range - tile.ranges.data());
  const Layout::CodedRun& run = tile.coded[tile.first_run + i];
  ZG_ASSERT_EQ(run.param, range.param);
  ZG_ASSERT_EQ(first % kQuantBlock, 0);
  const std::int64_t begin =
      run.places.codes - tile.sharding.shard() * layout.table.tensor(tile.stored).spec.count;
  if (!run.code) return {.elements = begin + first * size};
  const std::int64_t block = first / run.code->format.block_cols;
  return {.codes = begin + first,
          .scales = begin + run.places.scales - run.places.codes + block * std::int64_t{sizeof(float)}};
}

// Views of these weights; null: the form has no such array for them.
struct WeightPlace {
  View elements, codes, scales;
};

// The place of the range's elements [part.first, part.first + part.count). `stored`: the stored form's bytes.
inline WeightPlace weight_place(const Layout& layout, std::int32_t t, const Layout::StateRange& range,
                                Layout::Elements part, void* stored) {
  const WeightOffsets at = weight_offsets(layout, t, range, part.first);
  const auto view = [&](std::int64_t offset, DType type, std::int64_t count) {
    return offset < 0 ? View() : View(static_cast<std::byte*>(stored) + offset, type, 1, count);
  };
  return {.elements = view(at.elements, layout.model->dtype(), part.count),
          .codes = view(at.codes, DType::kU8, part.count),
          .scales = view(at.scales, DType::kF32, kFp8Weights.blocks(1, part.count))};
}

// The range of bytes in the stored form that has these elements, and perhaps others.
struct ByteRange {
  std::int64_t begin = 0, end = 0;
};
inline ByteRange weight_bytes(const Layout& layout, std::int32_t t, const Layout::StateRange& range,
                              Layout::Elements part) {
  const WeightOffsets at = weight_offsets(layout, t, range, part.first);
  if (at.elements >= 0) {
    const auto size = static_cast<std::int64_t>(size_of(layout.model->dtype()));
    return {at.elements, at.elements + part.count * size};
  }
  return {at.codes, at.scales + kFp8Weights.blocks(1, part.count) * std::int64_t{sizeof(float)}};
}

}  // namespace zg
