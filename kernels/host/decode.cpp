// Decodes coded matrices; ziggurat/kernels/coded.hpp defines the formats.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/decode.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/lanes.hpp"
#include "ziggurat/base/parallel.hpp"

#ifndef ZG_DECODE_KERNELS
#define ZG_DECODE_KERNELS
namespace zg::host {
// Decodes n consecutive codes of one block, of which the first begins a byte. kPairs: 4-bit codes, which are
// looked up among `values`, the 16 products of level and scale.
template <class T>
using DecodePairs = void (*)(std::int64_t n, const std::uint8_t* codes, bool high_first, const float* values,
                             T* out);
template <class T>
using DecodeBytes = void (*)(std::int64_t n, const std::uint8_t* codes, float scale, T* out);
// The kernels of one instruction set.
using DecodeKernels = std::tuple<DecodePairs<float>, DecodePairs<bf16>, DecodePairs<fp16>, DecodeBytes<float>,
                                 DecodeBytes<bf16>, DecodeBytes<fp16>>;
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

HWY_INLINE int code_at(const std::uint8_t* codes, std::int64_t i, bool high_first) {
  const unsigned byte = codes[i / 2];
  return static_cast<int>((i % 2 == 0) == high_first ? byte >> 4 : byte & 15);
}

// The 16 values are rounded once, and codes then look up their bytes: 32 elements at a time.
template <class T>
void decode_pairs(std::int64_t n, const std::uint8_t* codes, bool high_first, const float* values, T* out) {
  T table[16];
  const hn::CappedTag<float, 16> d;
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d))
    save(d, hn::LoadU(d, values + i), table + i, FullVector{});
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 2) {
    alignas(16) std::uint8_t low[16], high[16];
    for (int j = 0; j < 16; ++j) {
      low[j] = static_cast<std::uint8_t>(table[j].bits);
      high[j] = static_cast<std::uint8_t>(table[j].bits >> 8);
    }
    const hn::FixedTag<std::uint8_t, 16> bytes;
    const hn::FixedTag<std::uint16_t, 8> words;
    const auto low_bytes = hn::Load(bytes, low), high_bytes = hn::Load(bytes, high);
    const auto half = hn::Set(bytes, 15);
    const auto put = [&](auto index, T* to) HWY_ATTR {
      const auto l = hn::TableLookupBytes(low_bytes, index), h = hn::TableLookupBytes(high_bytes, index);
      auto* const at = reinterpret_cast<std::uint8_t*>(to);
      hn::StoreU(hn::InterleaveLower(bytes, l, h), bytes, at);
      hn::StoreU(hn::InterleaveUpper(bytes, l, h), bytes, at + 16);
    };
    for (; i + 32 <= n; i += 32) {
      const auto pairs = hn::LoadU(bytes, codes + i / 2);
      const auto lower = hn::And(pairs, half);
      const auto upper = hn::And(hn::BitCast(bytes, hn::ShiftRight<4>(hn::BitCast(words, pairs))), half);
      const auto first = high_first ? upper : lower, second = high_first ? lower : upper;
      put(hn::InterleaveLower(bytes, first, second), out + i);
      put(hn::InterleaveUpper(bytes, first, second), out + i + 16);
    }
  }
#endif
  for (; i < n; ++i) out[i] = table[code_at(codes, i, high_first)];
}

// e4m3 and fp32 have the same order of sign, exponent and mantissa, so seven bits that are shifted into their
// place are the number times 2^-120, subnormal ones too.
template <class T>
void decode_bytes(std::int64_t n, const std::uint8_t* codes, float scale, T* out) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  const hn::Rebind<std::uint8_t, decltype(d)> d8;
  const auto bias = hn::Set(d, 0x1p120f), factor = hn::Set(d, scale);
  const auto quiet = hn::Set(d32, 0x7fc00000u);
  const auto decode = [&](const std::uint8_t* from) HWY_ATTR {
    const auto code = hn::PromoteTo(d32, hn::LoadU(d8, from));
    const auto size = hn::And(code, hn::Set(d32, 0x7fu));
    const auto number = hn::BitCast(d32, hn::Mul(hn::BitCast(d, hn::ShiftLeft<20>(size)), bias));
    const auto finite = hn::IfThenElse(hn::Eq(size, hn::Set(d32, 0x7fu)), quiet, number);
    const auto level = hn::Or(finite, hn::ShiftLeft<24>(hn::AndNot(hn::Set(d32, 0x7fu), code)));
    return hn::Mul(hn::BitCast(d, level), factor);
  };
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    if constexpr (std::is_same_v<decltype(w), FullVector>) {
      save(d, decode(codes + i), out + i, w);
    } else {
      std::uint8_t rest[hn::MaxLanes(hn::ScalableTag<float>())] = {};
      std::copy_n(codes + i, w.n, rest);
      save(d, decode(rest), out + i, w);
    }
  });
}

DecodeKernels decoders() {
  return {decode_pairs<float>, decode_pairs<bf16>, decode_pairs<fp16>,
          decode_bytes<float>, decode_bytes<bf16>, decode_bytes<fp16>};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(decoders);

constexpr std::int64_t kElements = 16 * 1024;  // of a task, at least

float scale_at(const CodedMatrix& m, std::int64_t block) {
  switch (m.format.scale) {
    case CodeScale::kF32:
      return static_cast<const float*>(m.scales)[block];
    case CodeScale::kBF16:
      return static_cast<float>(static_cast<const bf16*>(m.scales)[block]);
    case CodeScale::kF16:
      return static_cast<float>(static_cast<const fp16*>(m.scales)[block]);
    case CodeScale::kPower: {
      const std::uint32_t power = static_cast<const std::uint8_t*>(m.scales)[block];
      return power == 255 ? std::numeric_limits<float>::quiet_NaN()
                          : std::bit_cast<float>(power == 0 ? 0x00400000u : power << 23);
    }
    case CodeScale::kNested: {
      const float level = m.nested_levels[static_cast<const std::uint8_t*>(m.scales)[block]];
      return level * m.nested_scales[block / m.format.nested_block] + m.nested_offset;
    }
  }
  return 0;
}

// The products of the 16 levels with the scale of a block.
void products(const CodedMatrix& m, std::int64_t block, float* values) {
  const float scale = scale_at(m, block);
  if (m.format.code == WeightCode::kInt4) {
    const int zero = m.zeros == nullptr ? kInt4Middle : m.zeros[block];
    for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(i - zero) * scale;
  } else {
    const auto& levels = m.format.code == WeightCode::kNf4 ? kNf4Levels : kE2m1Levels;
    for (std::size_t i = 0; i < 16; ++i) values[i] = levels[i] * scale;
  }
}

// A row whose columns are in groups: the products of each of its blocks, of which each column takes one.
template <class T>
void decode_grouped(const CodedMatrix& m, std::int64_t row, std::vector<float>& values, T* out) {
  const std::int64_t blocks = m.format.row_blocks(m.rows, m.cols);
  values.resize(static_cast<std::size_t>(16 * blocks));
  for (std::int64_t b = 0; b < blocks; ++b)
    products(m, row / m.format.block_rows * blocks + b, values.data() + 16 * b);
  const std::uint8_t* const codes = m.codes + row * m.format.row_bytes(m.cols);
  for (std::int64_t c = 0; c < m.cols; ++c) {
    const unsigned code = (codes[c / 2] >> (c % 2 * 4)) & 15u;
    out[c] = static_cast<T>(values[static_cast<std::size_t>(16 * m.groups[c] + code)]);
  }
}

// The elements of a block that lie in one row, or all of it where codes have no rows.
struct Run {
  std::int64_t element = 0, length = 0;  // in the matrix
  std::int64_t block = 0;
  std::int64_t byte = 0;  // of its first code
};

class Runs {
 public:
  explicit Runs(const CodedMatrix& m)
      : longest(std::min(m.format.block_cols, m.format.is_flat() ? m.rows * m.cols : m.cols)),
        format_(m.format),
        cols_(m.format.is_flat() ? m.rows * m.cols : m.cols),
        per_row_(m.format.row_blocks(m.rows, m.cols)) {
    count = per_row_ * (m.format.is_flat() ? 1 : m.rows);
  }
  Run at(std::int64_t run) const {
    const std::int64_t row = run / per_row_, b = run % per_row_, first = b * format_.block_cols;
    const std::int64_t start = format_.is_flat() ? 0 : row * format_.row_bytes(cols_);
    return {row * cols_ + first, std::min(format_.block_cols, cols_ - first),
            row / format_.block_rows * per_row_ + b,
            start + (format_.code == WeightCode::kFp8 ? first : first / 2)};
  }
  std::int64_t grain() const { return std::max<std::int64_t>(1, kElements / longest); }

  std::int64_t count = 0, longest = 0;

 private:
  const CodeFormat& format_;
  std::int64_t cols_, per_row_;
};

template <class T>
void decode_run(const DecodeKernels& kernels, const CodedMatrix& m, const Run& run, T* out) {
  const std::uint8_t* const codes = m.codes + run.byte;
  if (m.format.code == WeightCode::kFp8) {
    return std::get<DecodeBytes<T>>(kernels)(run.length, codes, scale_at(m, run.block), out);
  }
  float values[16];
  products(m, run.block, values);
  std::get<DecodePairs<T>>(kernels)(run.length, codes, m.format.is_flat(), values, out);
}

}  // namespace

template <class T>
void decode(const CodedMatrix& m, T* out) {
  if (m.groups != nullptr) {
    parallel_for(m.rows, std::max<std::int64_t>(1, kElements / m.cols),
                 [&](std::int64_t begin, std::int64_t end) {
                   std::vector<float> values;
                   for (std::int64_t r = begin; r < end; ++r) decode_grouped(m, r, values, out + r * m.cols);
                 });
    return;
  }
  const DecodeKernels kernels = HWY_DYNAMIC_DISPATCH(decoders)();
  const Runs runs(m);
  parallel_for(runs.count, runs.grain(), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> floats;  // double has no kernels of its own
    for (std::int64_t i = begin; i < end; ++i) {
      const Run run = runs.at(i);
      if constexpr (std::is_same_v<T, double>) {
        floats.resize(static_cast<std::size_t>(run.length));
        decode_run(kernels, m, run, floats.data());
        std::copy_n(floats.data(), run.length, out + run.element);
      } else {
        decode_run(kernels, m, run, out + run.element);
      }
    }
  });
}

#define ZG_INSTANTIATE(T) template void decode(const CodedMatrix&, T*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
