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
// Codes of 4 bits, two to a byte: their 16 levels, and which half of a byte comes first.
struct Pairs {
  const float* levels;
  bool high_first;
};
// These decode n consecutive codes of one block, of which the first begins a byte.
template <class T>
using DecodePairs = void (*)(std::int64_t n, const std::uint8_t* codes, const Pairs& pairs, float scale,
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

// The 16 products are rounded once, and codes then look up their bytes: 32 elements at a time.
template <class T>
void decode_pairs(std::int64_t n, const std::uint8_t* codes, const Pairs& pairs, float scale, T* out) {
  alignas(32) T table[16];
  const hn::CappedTag<float, 16> d;
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d))
    save(d, hn::Mul(hn::LoadU(d, pairs.levels + i), hn::Set(d, scale)), table + i, FullVector{});
  const bool high_first = pairs.high_first;
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 2) {
    const hn::FixedTag<std::uint8_t, 16> bytes;
    const hn::FixedTag<std::uint16_t, 8> words;
    const auto* const at = reinterpret_cast<const std::uint8_t*>(table);
    const auto first_half = hn::Load(bytes, at), second_half = hn::Load(bytes, at + 16);
    const auto low_bytes = hn::ConcatEven(bytes, second_half, first_half),
               high_bytes = hn::ConcatOdd(bytes, second_half, first_half);
    const auto half = hn::Set(bytes, 15);
    const auto put = [&](auto index, T* to) HWY_ATTR {
      const auto l = hn::TableLookupBytes(low_bytes, index), h = hn::TableLookupBytes(high_bytes, index);
      auto* const bytes_out = reinterpret_cast<std::uint8_t*>(to);
      hn::StoreU(hn::InterleaveLower(bytes, l, h), bytes, bytes_out);
      hn::StoreU(hn::InterleaveUpper(bytes, l, h), bytes, bytes_out + 16);
    };
    for (; i + 32 <= n; i += 32) {
      const auto both = hn::LoadU(bytes, codes + i / 2);
      const auto lower = hn::And(both, half);
      const auto upper = hn::And(hn::BitCast(bytes, hn::ShiftRight<4>(hn::BitCast(words, both))), half);
      const auto first = high_first ? upper : lower, second = high_first ? lower : upper;
      put(hn::InterleaveLower(bytes, first, second), out + i);
      put(hn::InterleaveUpper(bytes, first, second), out + i + 16);
    }
  }
#endif
  const int first = high_first ? 4 : 0, second = 4 - first;
  for (; i + 2 <= n; i += 2) {
    const unsigned byte = codes[i / 2];
    out[i] = table[(byte >> first) & 15u];
    out[i + 1] = table[(byte >> second) & 15u];
  }
  if (i < n) out[i] = table[(codes[i / 2] >> first) & 15u];
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

// The 16 levels of the codes of a block; `own` is room for those that depend on its zero point.
const float* levels_of(const CodedMatrix& m, std::int64_t block, float* own) {
  if (m.format.code == WeightCode::kNf4) return kNf4Levels.data();
  if (m.format.code == WeightCode::kMxfp4) return kE2m1Levels.data();
  const int zero = m.zeros == nullptr ? kInt4Middle : m.zeros[block];
  for (int i = 0; i < 16; ++i) own[i] = static_cast<float>(i - zero);
  return own;
}

// A row whose columns are in groups: the products of each of its blocks, of which each column takes one.
template <class T>
void decode_grouped(const CodedMatrix& m, std::int64_t row, std::vector<float>& values, T* out) {
  const std::int64_t blocks = m.format.row_blocks(m.rows, m.cols);
  values.resize(static_cast<std::size_t>(16 * blocks));
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t block = row / m.format.block_rows * blocks + b;
    float own[16];
    const float* const levels = levels_of(m, block, own);
    for (std::int64_t i = 0; i < 16; ++i)
      values[static_cast<std::size_t>(16 * b + i)] = levels[i] * scale_at(m, block);
  }
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

// The runs of a matrix, in the order of its elements.
class Runs {
 public:
  explicit Runs(const CodedMatrix& m)
      : format_(m.format),
        cols_(m.format.is_flat() ? m.rows * m.cols : m.cols),
        per_row_(m.format.row_blocks(m.rows, m.cols)),
        count_(per_row_ * (m.format.is_flat() ? 1 : m.rows)) {}
  std::int64_t count() const { return count_; }
  // Runs of a task.
  std::int64_t grain() const {
    return std::max<std::int64_t>(1, kElements / std::min(format_.block_cols, cols_));
  }
  // Calls f(run) for the runs [begin, end). Divides once a row at most, since a run may have 32 elements.
  template <class F>
  void each(std::int64_t begin, std::int64_t end, const F& f) const {
    std::int64_t row = begin / per_row_, b = begin % per_row_;
    const std::int64_t row_bytes = format_.is_flat() ? 0 : format_.row_bytes(cols_);
    const int halves = format_.code == WeightCode::kFp8 ? 0 : 1;
    while (begin < end) {
      const std::int64_t blocks = row / format_.block_rows * per_row_,
                         last = std::min(per_row_, b + end - begin);
      for (; b < last; ++b, ++begin) {
        const std::int64_t first = b * format_.block_cols;
        f(Run{row * cols_ + first, std::min(format_.block_cols, cols_ - first), blocks + b,
              row * row_bytes + (first >> halves)});
      }
      b = 0, ++row;
    }
  }

 private:
  const CodeFormat format_;
  std::int64_t cols_, per_row_, count_;
};

template <class T>
void decode_run(const DecodeKernels& kernels, const CodedMatrix& m, const Run& run, T* out) {
  const std::uint8_t* const codes = m.codes + run.byte;
  if (m.format.code == WeightCode::kFp8) {
    return std::get<DecodeBytes<T>>(kernels)(run.length, codes, scale_at(m, run.block), out);
  }
  float own[16];
  std::get<DecodePairs<T>>(kernels)(run.length, codes, {levels_of(m, run.block, own), m.format.is_flat()},
                                    scale_at(m, run.block), out);
}

// Large blocks of bytes: each looks its elements up among the 256 that there are.
template <class T>
void decode_large_blocks(const DecodeKernels& kernels, const CodedMatrix& m, T* out) {
  const CodeFormat& f = m.format;
  const std::int64_t across = f.row_blocks(m.rows, m.cols);
  std::uint8_t all[256];
  for (int i = 0; i < 256; ++i) all[i] = static_cast<std::uint8_t>(i);
  parallel_for(f.blocks(m.rows, m.cols), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      T table[256];
      std::get<DecodeBytes<T>>(kernels)(256, all, scale_at(m, block), table);
      const std::int64_t row = block / across * f.block_rows, col = block % across * f.block_cols;
      const std::int64_t last = std::min(m.rows, row + f.block_rows),
                         n = std::min(f.block_cols, m.cols - col);
      for (std::int64_t r = row; r < last; ++r) {
        const std::uint8_t* const codes = m.codes + r * m.cols + col;
        T* const to = out + r * m.cols + col;
        for (std::int64_t c = 0; c < n; ++c) to[c] = table[codes[c]];
      }
    }
  });
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
  if constexpr (sizeof(T) == 2) {
    constexpr std::int64_t kLarge = 4096;
    if (m.format.code == WeightCode::kFp8 && m.format.block_rows * m.format.block_cols >= kLarge &&
        m.format.block_rows > 1)
      return decode_large_blocks(kernels, m, out);
  }
  const Runs runs(m);
  parallel_for(runs.count(), runs.grain(), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> floats;  // double has no kernels of its own
    runs.each(begin, end, [&](const Run& run) {
      if constexpr (std::is_same_v<T, double>) {
        floats.resize(static_cast<std::size_t>(run.length));
        decode_run(kernels, m, run, floats.data());
        std::copy_n(floats.data(), run.length, out + run.element);
      } else {
        decode_run(kernels, m, run, out + run.element);
      }
    });
  });
}

#define ZG_INSTANTIATE(T) template void decode(const CodedMatrix&, T*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
