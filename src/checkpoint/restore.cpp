// Brings a checkpoint's tensors into the state of a run, whatever parts and formats either has.
#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/host/update_int8.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/checkpoint/rank_file.hpp"
#include "ziggurat/checkpoint/restore.hpp"
#include "ziggurat/optim/state.hpp"

namespace zg {
namespace {

using host::int8::decode;

// A part of a tile, of which the checkpoint has every element that the model has. The rest, lines with which
// uneven parts are filled up, stays zero.
class Filling {
 public:
  Filling(const Checkpoint& checkpoint, const CheckpointPart& part, const StateTile& tile)
      : checkpoint_(checkpoint), part_(part), tile_(tile), to_(part.of(tile)) {}

  void run() const {
    const bool same = checkpoint_.dtype_of(part_.name) == part_.dtype;
    if (part_.in_codes) {
      same ? take_codes() : encode(values());
    } else if (same) {
      const auto width = static_cast<std::int64_t>(size_of(to_.dtype));
      boxes([&](std::int64_t at, const CheckpointBox& box) {
        checkpoint_.read(part_.name, box, static_cast<char*>(to_.data) + at * width);
      });
    } else {
      write_weights(to_, values().data());
    }
  }

 private:
  // Calls f(at, box), at: behind the tile's first element.
  template <class F>
  void boxes(const F& f) const {
    for_boxes(*tile_.param, tile_.first, tile_.first + tile_.count,
              [&](const Band&, std::int64_t at, const CheckpointBox& box) { f(at - tile_.first, box); });
  }

  std::vector<float> values() const {
    std::vector<float> out(static_cast<std::size_t>(tile_.count));
    boxes([&](std::int64_t at, const CheckpointBox& box) {
      read_values(checkpoint_, part_.name, part_.which, box, out.data() + at);
    });
    return out;
  }

  // Codes stay as they are in a block whose elements have had one scale; others are encoded anew.
  void take_codes() const {
    constexpr float kNone = -1;  // no scale is negative
    std::vector<std::uint8_t> stored(static_cast<std::size_t>(tile_.count));
    std::vector<float> scales(stored.size(), kNone), decoded(stored.size());
    boxes([&](std::int64_t at, const CheckpointBox& box) {
      checkpoint_.read_codes(part_.name, box, stored.data() + at, scales.data() + at);
    });
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (scales[i] != kNone) decoded[i] = decode(part_.which, stored[i], scales[i]);
    }
    blocks([&](std::size_t begin, std::size_t end) {
      float scale = kNone;
      for (std::size_t i = begin; i < end; ++i) {
        if (scales[i] == kNone) continue;
        if (scale == kNone) scale = scales[i];
        if (std::bit_cast<std::uint32_t>(scales[i]) != std::bit_cast<std::uint32_t>(scale))
          return encode_block(decoded, begin, end);
      }
      std::copy(stored.data() + begin, stored.data() + end, codes() + begin);
      scale_at(begin) = scale == kNone ? 0 : scale;
    });
  }

  void encode(const std::vector<float>& values) const {
    blocks([&](std::size_t begin, std::size_t end) { encode_block(values, begin, end); });
  }

  void encode_block(const std::vector<float>& values, std::size_t begin, std::size_t end) const {
    constexpr std::uint32_t kNearest = 1u << (host::int8::kShift - 1);
    std::uint32_t largest = 0;
    for (std::size_t i = begin; i < end; ++i)
      largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
    const float scale = scale_at(begin) = host::int8::scale_of(part_.which, largest);
    for (std::size_t i = begin; i < end; ++i)
      codes()[i] = host::int8::encode(part_.which, values[i], scale, kNearest);
  }

  template <class F>
  void blocks(const F& f) const {
    constexpr auto kBlock = static_cast<std::size_t>(kQuantBlock);
    const auto count = static_cast<std::size_t>(tile_.count);
    for (std::size_t at = 0; at < count; at += kBlock) f(at, std::min(count, at + kBlock));
  }
  std::uint8_t* codes() const { return static_cast<std::uint8_t*>(to_.data); }
  float& scale_at(std::size_t element) const {
    return tile_.scale[part_.which].as<float>()[element / static_cast<std::size_t>(kQuantBlock)];
  }

  const Checkpoint& checkpoint_;
  const CheckpointPart& part_;
  const StateTile& tile_;
  const View to_;
};

}  // namespace

void read_values(const Checkpoint& checkpoint, const std::string& tensor, int moment,
                 const CheckpointBox& box, float* out) {
  const std::string& dtype = checkpoint.dtype_of(tensor);
  const auto count = static_cast<std::size_t>(box.count());
  if (dtype == "F32") return checkpoint.read(tensor, box, out);
  if (dtype == "U8") {
    std::vector<std::uint8_t> codes(count);
    std::vector<float> scales(count);
    checkpoint.read_codes(tensor, box, codes.data(), scales.data());
    for (std::size_t i = 0; i < count; ++i) out[i] = decode(moment, codes[i], scales[i]);
    return;
  }
  const DType type = dtype == "F64" ? DType::kF64 : dtype == "F16" ? DType::kF16 : DType::kBF16;
  std::vector<char> stored(count * size_of(type));
  checkpoint.read(tensor, box, stored.data());
  read_weights(View(stored.data(), type, 1, box.count()), out);
}

TileVisitor tiles_of(const Checkpoint& checkpoint, const Layout& layout) {
  return [&](const StateTile& tile) {
    for (const CheckpointPart& part : parts_of(layout, tile.unit, *tile.param)) {
      if (part.kind != CheckpointPart::Kind::kScale) Filling(checkpoint, part, tile).run();
    }
  };
}

}  // namespace zg
