// Decodes coded matrices; ziggurat/kernels/coded.hpp defines the formats.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/decode.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <hwy/cache_control.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
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
// 16 elements as vectors look them up: their first bytes, then their second bytes and so on.
template <class T>
struct Table {
  alignas(16) std::uint8_t bytes[sizeof(T)][16];
  T operator[](unsigned i) const {
    std::array<std::uint8_t, sizeof(T)> element;
    for (std::size_t b = 0; b < sizeof(T); ++b) element[b] = bytes[b][i];
    return std::bit_cast<T>(element);
  }
};
// Table b gets the elements (levels[i] - zeros[b]) * scales[b].
template <class T>
using MakeTables = void (*)(const float* levels, std::int64_t count, const float* zeros, const float* scales,
                            Table<T>* tables);
// Consecutive blocks of a row. Each begins with a whole byte.
template <class T>
struct Blocks {
  std::int64_t elements, size;  // elements of all blocks together, and of each block but the last
  const std::uint8_t* codes;
  const float* scales;           // used for codes of 8 bits
  const Table<T>* tables;        // used for codes of 4 bits; if kBytesInTables<T>, for codes of 8 bits, too
  const std::uint8_t* table_of;  // the table of each block; null: block b has table b
  bool high_first;               // codes of 4 bits: the first one of a byte is in its high half
  bool streams;                  // elements are stored past the caches
};
template <class T>
inline constexpr bool kBytesInTables = std::is_same_v<T, bf16>;
template <class T>
using DecodeBlocks = void (*)(Blocks<T> blocks, T* out);
template <class T>
struct Decoders {
  MakeTables<T> make_tables;
  DecodeBlocks<T> pairs, bytes;  // codes of 4 and of 8 bits
};
// The kernels of one instruction set.
using DecodeKernels = std::tuple<Decoders<float>, Decoders<bf16>, Decoders<fp16>>;
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// Normal numbers of e4m3 lie between 2^-6 and 448. This says whether all their products are normal in bf16.
bool has_normal_products(float scale) {
  return std::abs(scale) >= 0x1p-120f && std::abs(scale) < 0x1p119f;
}

template <class T>
void make_tables(const float* levels, std::int64_t count, const float* zeros, const float* scales,
                 Table<T>* tables) {
  const hn::CappedTag<float, 8> d;
  float even[8], odd[8];
  for (std::size_t i = 0; i < 8; ++i) even[i] = levels[2 * i], odd[i] = levels[2 * i + 1];
  for (std::int64_t b = 0; b < count; ++b) {
    const auto zero = hn::Set(d, zeros[b]), scale = hn::Set(d, scales[b]);
    const auto products = [&](const float* of)
                              HWY_ATTR { return hn::Mul(hn::Sub(hn::LoadU(d, of), zero), scale); };
    alignas(32) T elements[16];
    if constexpr (std::is_same_v<T, bf16>) {
      // store() would do twice the work: two products share 32 bits here, and NaNs are rounded like numbers,
      // since their low bits are all 0.
      const hn::RebindToUnsigned<decltype(d)> d32;
      const auto rounded = [&](const float* of) HWY_ATTR {
        const auto u = hn::BitCast(d32, products(of));
        const auto last = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 1u));
        return hn::Add(hn::Add(u, hn::Set(d32, 0x7fffu)), last);
      };
      for (std::size_t i = 0; i < 8; i += hn::Lanes(d)) {
        const auto high = hn::And(rounded(odd + i), hn::Set(d32, 0xffff0000u));
        hn::StoreU(hn::Or(hn::ShiftRight<16>(rounded(even + i)), high), d32,
                   reinterpret_cast<std::uint32_t*>(elements + 2 * i));
      }
    } else {
      for (std::size_t i = 0; i < 16; i += hn::Lanes(d)) store(d, products(levels + i), elements + i);
    }
    const auto* const from = reinterpret_cast<const std::uint8_t*>(elements);
    auto& to = tables[b].bytes;
#if HWY_TARGET == HWY_SCALAR
    for (std::size_t i = 0; i < sizeof(elements); ++i) to[i % sizeof(T)][i / sizeof(T)] = from[i];
#else
    const hn::FixedTag<std::uint8_t, 16> bytes;
    const auto part = [&](std::size_t i) HWY_ATTR { return hn::Load(bytes, from + 16 * i); };
    const auto evens = [&](auto low, auto high) HWY_ATTR { return hn::ConcatEven(bytes, high, low); };
    const auto odds = [&](auto low, auto high) HWY_ATTR { return hn::ConcatOdd(bytes, high, low); };
    if constexpr (sizeof(T) == 2) {
      hn::Store(evens(part(0), part(1)), bytes, to[0]);
      hn::Store(odds(part(0), part(1)), bytes, to[1]);
    } else {
      const auto even01 = evens(part(0), part(1)), even23 = evens(part(2), part(3));
      const auto odd01 = odds(part(0), part(1)), odd23 = odds(part(2), part(3));
      hn::Store(evens(even01, even23), bytes, to[0]);
      hn::Store(evens(odd01, odd23), bytes, to[1]);
      hn::Store(odds(even01, even23), bytes, to[2]);
      hn::Store(odds(odd01, odd23), bytes, to[3]);
    }
#endif
  }
}

#if HWY_TARGET == HWY_SCALAR
template <bool kHighFirst, class T>
std::int64_t look_up_pairs(const Table<T>&, std::int64_t, const std::uint8_t*, bool, T*) {
  return 0;
}
std::int64_t look_up_bytes(const Table<bf16>&, std::int64_t, const std::uint8_t*, bool, bf16*) {
  return 0;
}
#else
using Bytes = hn::CappedTag<std::uint8_t, 32>;
constexpr Bytes kBytes;
constexpr std::int64_t kLanes = hn::MaxLanes(kBytes);  // 16 or 32
constexpr std::int64_t kStep = 32;                     // codes of 4 bits that are decoded at once

HWY_INLINE bool fits_vectors(const void* to) {
  return reinterpret_cast<std::uintptr_t>(to) % kLanes == 0;
}
HWY_INLINE void put(hn::Vec<Bytes> v, bool streams, std::uint8_t* to) {
  if (streams) {
    hn::Stream(v, kBytes, to);
  } else {
    hn::StoreU(v, kBytes, to);
  }
}

// The byte of codes that each byte of a step's indices takes, or 0x80 for none. Elements are made within the
// halves of vectors, so halves take turns at the codes of 16 bytes of elements.
struct Order {
  alignas(32) std::uint8_t at[kStep];
};
template <class T, bool kHighFirst>
constexpr Order order_of_codes() {
  constexpr std::int64_t kTurn = 8 / sizeof(T), kHalves = kLanes / 16;
  Order order{};
  for (std::int64_t i = 0; i < kStep; ++i) {
    const std::int64_t vector = i / kLanes, half = i % kLanes / 16, code = i % 16 / 2;
    const std::int64_t from = 8 * vector + kTurn * (kHalves * (code / kTurn) + half) + code % kTurn;
    order.at[i] = static_cast<std::uint8_t>((i % 2 == 1) == kHighFirst ? from : 0x80);
  }
  return order;
}

// Decodes the whole steps among n codes of 4 bits. Returns how many codes that are.
template <bool kHighFirst, class T>
HWY_INLINE std::int64_t look_up_pairs(const Table<T>& table, std::int64_t n, const std::uint8_t* codes,
                                      bool streams, T* out) {
  const hn::Repartition<std::uint16_t, Bytes> words;
  static constexpr Order kOrder = order_of_codes<T, kHighFirst>();
  hn::Vec<Bytes> bytes[sizeof(T)];
  for (std::size_t b = 0; b < sizeof(T); ++b) bytes[b] = hn::LoadDup128(kBytes, table.bytes[b]);
  const bool aside = streams && fits_vectors(out);
  auto* to = reinterpret_cast<std::uint8_t*>(out);
  const std::int64_t whole = n / kStep * kStep;
  for (std::int64_t i = 0; i < whole; i += kStep) {
    const auto all = hn::LoadDup128(kBytes, codes + i / 2);
    for (std::int64_t v = 0; v < kStep; v += kLanes) {
      // A word has two codes in one of its bytes; each of them gets a byte of its own.
      const auto both = hn::BitCast(words, hn::TableLookupBytesOr0(all, hn::Load(kBytes, kOrder.at + v)));
      const auto apart = hn::Or(both, kHighFirst ? hn::ShiftRight<12>(both) : hn::ShiftLeft<4>(both));
      const auto index = hn::BitCast(kBytes, hn::And(apart, hn::Set(words, 0x0f0f)));
      const auto b0 = hn::TableLookupBytes(bytes[0], index), b1 = hn::TableLookupBytes(bytes[1], index);
      const auto lower = hn::InterleaveLower(kBytes, b0, b1), upper = hn::InterleaveUpper(kBytes, b0, b1);
      if constexpr (sizeof(T) == 2) {
        put(lower, aside, to);
        put(upper, aside, to + kLanes);
      } else {
        const auto b2 = hn::TableLookupBytes(bytes[2], index), b3 = hn::TableLookupBytes(bytes[3], index);
        const auto put_words = [&](auto low, auto high, std::uint8_t* at) HWY_ATTR {
          const auto l = hn::BitCast(words, low), h = hn::BitCast(words, high);
          put(hn::BitCast(kBytes, hn::InterleaveLower(words, l, h)), aside, at);
          put(hn::BitCast(kBytes, hn::InterleaveUpper(words, l, h)), aside, at + kLanes);
        };
        put_words(lower, hn::InterleaveLower(kBytes, b2, b3), to);
        put_words(upper, hn::InterleaveUpper(kBytes, b2, b3), to + 2 * kLanes);
      }
      to += kLanes * static_cast<std::int64_t>(sizeof(T));
    }
  }
  return whole;
}

// Decodes the whole vectors among n codes of 8 bits. Returns how many codes that are. Seven bits of e4m3 are
// i + 8 * k for the number i * 2^-9 * 2^k, where i is below 16, and k is 0 if i is below 8. The table has the
// elements for k = 0. The others have exponents that are greater by k, if has_normal_products().
HWY_INLINE std::int64_t look_up_bytes(const Table<bf16>& table, std::int64_t n, const std::uint8_t* codes,
                                      bool streams, bf16* out) {
  const hn::Repartition<std::int16_t, Bytes> words;
  const hn::Repartition<std::uint32_t, Bytes> d32;
  // As in order_of_codes(), in units of four codes.
  alignas(32) static constexpr std::uint32_t kTurns[] = {0, 1, 4, 5, 2, 3, 6, 7}, kSame[] = {0, 1, 2, 3};
  const auto order = hn::SetTableIndices(d32, kLanes == 32 ? kTurns : kSame);
  const auto bytes0 = hn::LoadDup128(kBytes, table.bytes[0]), bytes1 = hn::LoadDup128(kBytes, table.bytes[1]);
  const auto zero = hn::Zero(kBytes), largest = hn::Set(kBytes, 0x7f);
  const auto quiet = hn::Set(words, 0x7fc0);
  const bool aside = streams && fits_vectors(out);
  auto* const to = reinterpret_cast<std::uint8_t*>(out);
  const std::int64_t whole = n / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    const auto all = hn::BitCast(d32, hn::LoadU(kBytes, codes + i));
    const auto code = hn::BitCast(kBytes, hn::TableLookupLanes(all, order));
    const auto size = hn::And(code, largest);
    const auto normal = hn::Or(hn::And(code, hn::Set(kBytes, 7)), hn::Set(kBytes, 8));
    const auto index = hn::Min(size, normal);
    const auto above = hn::Sub(code, index);  // 8 * k, and the sign
    const auto nan = hn::VecFromMask(kBytes, hn::Eq(size, largest));
    const auto b0 = hn::TableLookupBytes(bytes0, index), b1 = hn::TableLookupBytes(bytes1, index);
    const auto put_words = [&](auto least, auto high, auto is_nan, std::uint8_t* at) HWY_ATTR {
      const auto shifted = hn::ShiftRight<4>(hn::BitCast(words, high));
      const auto add = hn::And(shifted, hn::Set(words, static_cast<std::int16_t>(0x8780)));
      const auto number = hn::Add(hn::BitCast(words, least), add);
      put(hn::BitCast(kBytes, hn::IfVecThenElse(hn::BitCast(words, is_nan), quiet, number)), aside, at);
    };
    put_words(hn::InterleaveLower(kBytes, b0, b1), hn::InterleaveLower(kBytes, zero, above),
              hn::InterleaveLower(kBytes, nan, nan), to + 2 * i);
    put_words(hn::InterleaveUpper(kBytes, b0, b1), hn::InterleaveUpper(kBytes, zero, above),
              hn::InterleaveUpper(kBytes, nan, nan), to + 2 * i + kLanes);
  }
  return whole;
}
#endif

template <bool kHighFirst, class T>
HWY_INLINE void decode_pairs(Blocks<T> all, T* out) {
  for (std::int64_t b = 0; all.elements > 0; ++b) {
    const std::int64_t n = std::min(all.elements, all.size);
    const Table<T>& table = all.tables[all.table_of == nullptr ? b : all.table_of[b]];
    for (std::int64_t i = look_up_pairs<kHighFirst>(table, n, all.codes, all.streams, out); i < n; ++i)
      out[i] = table[(all.codes[i / 2] >> ((i % 2 == 0) == kHighFirst ? 4 : 0)) & 15u];
    all.codes += n / 2, out += n, all.elements -= n;
  }
}
template <class T>
void decode_pairs(Blocks<T> all, T* out) {
  all.high_first ? decode_pairs<true>(all, out) : decode_pairs<false>(all, out);
}

// e4m3 and fp16 have the same order of sign, exponent and mantissa, so seven bits that are shifted into their
// place are the number times 2^-8, subnormal ones too.
template <class T>
void decode_bytes(Blocks<T> all, T* out) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<std::int8_t, decltype(d)> d8;
  const hn::Rebind<std::int16_t, decltype(d)> d16;
  const hn::RebindToUnsigned<decltype(d16)> halves;
  const auto largest = hn::Set(d16, 0x7f << 7), quiet = hn::Set(d16, 0x7e00);
  for (std::int64_t b = 0; all.elements > 0; ++b) {
    const std::int64_t n = std::min(all.elements, all.size);
    std::int64_t done = 0;
    if constexpr (kBytesInTables<T>) {
      if (has_normal_products(all.scales[b]))
        done = look_up_bytes(all.tables[b], n, all.codes, all.streams, out);
    }
    const auto scale = hn::Set(d, all.scales[b]);
    const auto decode = [&](const std::uint8_t* from) HWY_ATTR {
      const auto code = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(from)));
      const auto number = hn::And(hn::ShiftLeft<7>(code), hn::Set(d16, static_cast<std::int16_t>(0xbf80)));
      const auto nan = hn::Eq(hn::And(number, largest), largest);
      const auto half = hn::BitCast(halves, hn::IfThenElse(nan, quiet, number));
      return hn::Mul(hn::Mul(to_f32(d, half), hn::Set(d, 0x1p8f)), scale);
    };
    for_lanes(d, n - done, [&, codes = all.codes + done, to = out + done](std::int64_t i, auto w) HWY_ATTR {
      if constexpr (std::is_same_v<decltype(w), FullVector>) {
        save(d, decode(codes + i), to + i, w);
      } else {
        std::uint8_t rest[hn::MaxLanes(hn::ScalableTag<float>())] = {};
        std::copy_n(codes + i, w.n, rest);
        save(d, decode(rest), to + i, w);
      }
    });
    all.codes += n, out += n, all.elements -= n;
  }
}

DecodeKernels decoders() {
  return {{make_tables<float>, decode_pairs<float>, decode_bytes<float>},
          {make_tables<bf16>, decode_pairs<bf16>, decode_bytes<bf16>},
          {make_tables<fp16>, decode_pairs<fp16>, decode_bytes<fp16>}};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(decoders);

constexpr std::int64_t kElements = 16 * 1024;  // of a task, at least
constexpr std::int64_t kRun = 128;             // blocks that a kernel decodes at once, at most
// Smaller matrices stay in caches until they are used. Ordinary stores of larger ones would first read their
// memory, in vain.
constexpr std::int64_t kStreamedBytes = 32 << 20;

float scale_of(std::uint8_t power) {
  return power == 255 ? std::numeric_limits<float>::quiet_NaN()
                      : std::bit_cast<float>(power == 0 ? 0x00400000u : std::uint32_t{power} << 23);
}

// The scales of blocks [first, first + count). Each NaN becomes the one whose low bits are all 0.
void read_scales(const CodedMatrix& m, std::int64_t first, std::int64_t count, float* out) {
  const auto read = [&](const auto* stored, const auto& value) {
    for (std::int64_t b = 0; b < count; ++b) {
      const float scale = value(stored[first + b], first + b);
      out[b] = std::isnan(scale) ? std::numeric_limits<float>::quiet_NaN() : scale;
    }
  };
  const auto number = [](auto stored, std::int64_t) { return static_cast<float>(stored); };
  switch (m.format.scale) {
    case CodeScale::kF32:
      return read(static_cast<const float*>(m.scales), number);
    case CodeScale::kBF16:
      return read(static_cast<const bf16*>(m.scales), number);
    case CodeScale::kF16:
      return read(static_cast<const fp16*>(m.scales), number);
    case CodeScale::kPower:
      return read(static_cast<const std::uint8_t*>(m.scales),
                  [](std::uint8_t power, std::int64_t) { return scale_of(power); });
    case CodeScale::kNested:
      return read(static_cast<const std::uint8_t*>(m.scales), [&](std::uint8_t code, std::int64_t b) {
        return m.nested_levels[code] * m.nested_scales[b / m.format.nested_block] + m.nested_offset;
      });
  }
}
// The numbers that are subtracted from the levels of blocks [first, first + count).
void read_zeros(const CodedMatrix& m, std::int64_t first, std::int64_t count, float* out) {
  if (m.zeros != nullptr) {
    std::copy_n(m.zeros + first, count, out);
  } else {
    std::fill_n(out, count, m.format.code == WeightCode::kInt4 ? static_cast<float>(kInt4Middle) : 0.0f);
  }
}

constexpr std::array<float, 16> multiples(float of) {
  std::array<float, 16> out{};
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(i) * of;
  return out;
}
constexpr std::array<float, 16> kInt4Levels = multiples(1), kLeastE4m3Levels = multiples(0x1p-9f);

// The 16 levels from which the tables of a code are made.
const float* levels_of(WeightCode code) {
  switch (code) {
    case WeightCode::kNf4:
      return kNf4Levels.data();
    case WeightCode::kFp8:
      return kLeastE4m3Levels.data();
    case WeightCode::kMxfp4:
      return kE2m1Levels.data();
    case WeightCode::kInt4:
      return kInt4Levels.data();
  }
  return nullptr;
}

// A row whose columns are in groups: the products of each of its blocks, of which each column takes one.
template <class T>
void decode_grouped(const CodedMatrix& m, std::int64_t row, std::vector<float>& values, T* out) {
  const std::int64_t blocks = m.format.row_blocks(m.rows, m.cols);
  values.resize(static_cast<std::size_t>(16 * blocks));
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t block = row / m.format.block_rows * blocks + b;
    float scale, zero;
    read_scales(m, block, 1, &scale), read_zeros(m, block, 1, &zero);
    for (std::int64_t i = 0; i < 16; ++i)
      values[static_cast<std::size_t>(16 * b + i)] = (levels_of(m.format.code)[i] - zero) * scale;
  }
  const std::uint8_t* const codes = m.codes + row * m.format.row_bytes(m.cols);
  for (std::int64_t c = 0; c < m.cols; ++c) {
    const unsigned code = (codes[c / 2] >> (c % 2 * 4)) & 15u;
    out[c] = static_cast<T>(values[static_cast<std::size_t>(16 * m.groups[c] + code)]);
  }
}

// The tables of all scales that there are.
template <class T>
std::vector<Table<T>> tables_of_powers(const Decoders<T>& kernels, WeightCode code) {
  std::vector<Table<T>> tables(256);
  float scales[256], zeros[256] = {};
  for (std::size_t i = 0; i < 256; ++i) scales[i] = scale_of(static_cast<std::uint8_t>(i));
  kernels.make_tables(levels_of(code), 256, zeros, scales, tables.data());
  return tables;
}

// Decodes runs of blocks of a matrix, on one thread.
template <class T>
class RunDecoder {
 public:
  // powers: tables_of_powers(), or null
  RunDecoder(const Decoders<T>& kernels, const CodedMatrix& m, const Table<T>* powers, bool streams)
      : kernels_(kernels), m_(m), powers_(powers), streams_(streams) {}

  // `count` elements of a row from column `first` on: at most kRun blocks.
  void decode(std::int64_t row, std::int64_t first, std::int64_t count, T* out) {
    const CodeFormat& f = m_.format;
    const bool bytes = f.code == WeightCode::kFp8;
    const std::int64_t block = row / f.block_rows * f.row_blocks(m_.rows, m_.cols) + first / f.block_cols;
    // The rows of a block follow each other, and share its tables.
    if (powers_ == nullptr && block != block_) {
      const std::int64_t blocks = (count + f.block_cols - 1) / f.block_cols;
      read_scales(m_, block, blocks, scales_);
      if (!bytes || kBytesInTables<T>) {
        float zeros[kRun];
        read_zeros(m_, block, blocks, zeros);
        kernels_.make_tables(levels_of(f.code), blocks, zeros, scales_, tables_);
      }
      block_ = block;
    }
    const Blocks<T> blocks{
        .elements = count,
        .size = f.block_cols,
        .codes = m_.codes + row * f.row_bytes(m_.cols) + (bytes ? first : first / 2),
        .scales = scales_,
        .tables = powers_ != nullptr ? powers_ : tables_,
        .table_of = powers_ != nullptr ? static_cast<const std::uint8_t*>(m_.scales) + block : nullptr,
        .high_first = f.is_flat(),
        .streams = streams_};
    (bytes ? kernels_.bytes : kernels_.pairs)(blocks, out);
  }

 private:
  const Decoders<T>& kernels_;
  const CodedMatrix& m_;
  const Table<T>* const powers_;
  const bool streams_;
  std::int64_t block_ = -1;  // the first one in scales_ and tables_
  float scales_[kRun];
  Table<T> tables_[kRun];
};

}  // namespace

template <class T>
void decode(const CodedMatrix& matrix, T* out) {
  CodedMatrix m = matrix;
  if (m.groups != nullptr) {
    parallel_for(m.rows, std::max<std::int64_t>(1, kElements / m.cols),
                 [&](std::int64_t begin, std::int64_t end) {
                   std::vector<float> values;
                   for (std::int64_t r = begin; r < end; ++r) decode_grouped(m, r, values, out + r * m.cols);
                 });
    return;
  }
  if (m.format.is_flat()) m.cols *= m.rows, m.rows = 1;
  using Made = std::conditional_t<std::is_same_v<T, double>, float, T>;  // double has no kernels of its own
  const auto kernels = std::get<Decoders<Made>>(HWY_DYNAMIC_DISPATCH(decoders)());
  std::vector<Table<Made>> powers;
  if (m.format.code == WeightCode::kMxfp4 && m.format.scale == CodeScale::kPower)
    powers = tables_of_powers(kernels, m.format.code);
  const bool streams =
      std::is_same_v<T, Made> && m.rows * m.cols * static_cast<std::int64_t>(sizeof(T)) >= kStreamedBytes;
  const std::int64_t blocks = m.format.row_blocks(m.rows, m.cols);
  const std::int64_t runs = (blocks + kRun - 1) / kRun;                      // of a row
  const std::int64_t run = runs == 1 ? m.cols : kRun * m.format.block_cols;  // elements, at most
  parallel_for(m.rows * runs, std::max<std::int64_t>(1, kElements / run),
               [&](std::int64_t begin, std::int64_t end) {
                 RunDecoder<Made> decoder(kernels, m, powers.empty() ? nullptr : powers.data(), streams);
                 std::vector<Made> made;
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t row = i / runs, first = i % runs * run;
                   const std::int64_t count = std::min(run, m.cols - first);
                   T* const to = out + row * m.cols + first;
                   if constexpr (std::is_same_v<T, Made>) {
                     decoder.decode(row, first, count, to);
                   } else {
                     made.resize(static_cast<std::size_t>(count));
                     decoder.decode(row, first, count, made.data());
                     std::copy_n(made.data(), count, to);
                   }
                 }
                 if (streams) hwy::FlushStream();
               });
}

#define ZG_INSTANTIATE(T) template void decode(const CodedMatrix&, T*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
