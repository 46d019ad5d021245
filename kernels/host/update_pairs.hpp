// Data movement of the optimizers' pass: loads and stores of pairs of vectors (32-bit words, 16-bit halves,
// bytes), and the random bits of a block. Included once for each instruction set, as simd.hpp is.
#if defined(ZG_KERNELS_HOST_UPDATE_PAIRS_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_UPDATE_PAIRS_HPP
#undef ZG_KERNELS_HOST_UPDATE_PAIRS_HPP
#else
#define ZG_KERNELS_HOST_UPDATE_PAIRS_HPP
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/host/simd.hpp"
#include "kernels/host/update_random.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {

template <class D>
using Bits = hn::RebindToUnsigned<D>;

// The pass works on two vectors a and b at a time. With moments of format kFull they are consecutive in
// memory. With narrower moments a has the even elements of a run and b the odd ones: these are the low and
// high halves of 32-bit words, which a shift separates, while consecutive elements would need a shuffle.
enum class Order { kNeighbours, kEvenOdd };

template <class V>
struct Pair {
  V a, b;
};
template <class D>
using Floats = Pair<hn::Vec<D>>;
template <class D>
using Words = Pair<hn::Vec<Bits<D>>>;

template <class D>
HWY_INLINE Floats<D> as_floats(D d, Words<D> w) {
  return {hn::BitCast(d, w.a), hn::BitCast(d, w.b)};
}
template <class D>
HWY_INLINE Words<D> as_words(D /*d*/, Floats<D> f) {
  return {hn::BitCast(Bits<D>(), f.a), hn::BitCast(Bits<D>(), f.b)};
}

// The standard quiet NaN. The bits of Highway's own NaN would overflow when they are rounded up.
template <class D>
HWY_INLINE hn::Vec<D> quiet_nan(D d) {
  return hn::Set(d, std::numeric_limits<hn::TFromD<D>>::quiet_NaN());
}

// Makes all NaNs the same, so that the bits of an update do not depend on which operand's NaN an
// instruction keeps.
template <class D>
HWY_INLINE hn::Vec<D> one_nan(D d, hn::Vec<D> v) {
  return hn::IfThenElse(hn::IsNaN(v), quiet_nan(d), v);
}

// ------------------------------------------------------------------------------ pairs from and to memory

template <Order kOrder, class D>
HWY_INLINE Floats<D> load_whole(D d, const hn::TFromD<D>* from) {
  Floats<D> f;
  if constexpr (kOrder == Order::kEvenOdd) {
    hn::LoadInterleaved2(d, from, f.a, f.b);
  } else {
    f.a = hn::LoadU(d, from), f.b = hn::LoadU(d, from + hn::Lanes(d));
  }
  return f;
}
template <Order kOrder, class D>
HWY_INLINE void store_whole(D d, Floats<D> f, hn::TFromD<D>* to) {
  if constexpr (kOrder == Order::kEvenOdd) {
    hn::StoreInterleaved2(f.a, f.b, d, to);
  } else {
    hn::StoreU(f.a, d, to), hn::StoreU(f.b, d, to + hn::Lanes(d));
  }
}

template <class D>
HWY_INLINE hn::Vec<Bits<D>> load_words(D /*d*/, const std::uint16_t* from) {
  return hn::LoadU(Bits<D>(), reinterpret_cast<const std::uint32_t*>(from));
}
template <class D>
HWY_INLINE void store_words(D /*d*/, hn::Vec<Bits<D>> words, std::uint16_t* to) {
  hn::StoreU(words, Bits<D>(), reinterpret_cast<std::uint32_t*>(to));
}

// Loads 16-bit elements into the high halves of words.
template <Order kOrder, class D>
HWY_INLINE Words<D> load_high(D d, const std::uint16_t* from) {
  const Bits<D> d32;
  if constexpr (kOrder == Order::kEvenOdd) {
    const auto words = load_words(d, from);
    return {hn::ShiftLeft<16>(words), hn::And(words, hn::Set(d32, 0xffff0000u))};
  } else {
    const hn::Rebind<std::uint16_t, D> d16;
    return {hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))),
            hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from + hn::Lanes(d16))))};
  }
}
// Loads 16-bit elements as signed numbers.
template <Order kOrder, class D>
HWY_INLINE Words<D> load_signed(D d, const std::uint16_t* from) {
  const Bits<D> d32;
  const hn::RebindToSigned<D> i32;
  if constexpr (kOrder == Order::kEvenOdd) {
    const auto words = hn::BitCast(i32, load_words(d, from));
    return {hn::BitCast(d32, hn::ShiftRight<16>(hn::ShiftLeft<16>(words))),
            hn::BitCast(d32, hn::ShiftRight<16>(words))};
  } else {
    const hn::Rebind<std::int16_t, D> d16;
    const std::int16_t* const halves = reinterpret_cast<const std::int16_t*>(from);
    return {hn::BitCast(d32, hn::PromoteTo(i32, hn::LoadU(d16, halves))),
            hn::BitCast(d32, hn::PromoteTo(i32, hn::LoadU(d16, halves + hn::Lanes(d16))))};
  }
}
// Merges the high halves of even (a) and odd (b) elements: the inverse of load_high() for kEvenOdd.
template <class D>
HWY_INLINE hn::Vec<Bits<D>> high_halves(D /*d*/, Words<D> w) {
  return hn::OrAnd(hn::ShiftRight<16>(w.a), w.b, hn::Set(Bits<D>(), 0xffff0000u));
}
template <Order kOrder, class D>
HWY_INLINE void store_high(D d, Words<D> w, std::uint16_t* to) {
  if constexpr (kOrder == Order::kEvenOdd) {
    store_words(d, high_halves(d, w), to);
  } else {
    const hn::Rebind<std::uint16_t, D> d16;
    hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(w.a)), d16, to);
    hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(w.b)), d16, to + hn::Lanes(d16));
  }
}
template <Order kOrder, class D>
HWY_INLINE void store_low(D d, Words<D> w, std::uint16_t* to) {
  if constexpr (kOrder == Order::kEvenOdd) {
    store_words(d, hn::OrAnd(hn::ShiftLeft<16>(w.b), w.a, hn::Set(Bits<D>(), 0xffffu)), to);
  } else {
    const hn::Rebind<std::uint16_t, D> d16;
    hn::StoreU(hn::TruncateTo(d16, w.a), d16, to);
    hn::StoreU(hn::TruncateTo(d16, w.b), d16, to + hn::Lanes(d16));
  }
}

// Loads two bytes into the two halves of each word, zero-extended or (Int signed) sign-extended.
template <class Int, class D>
HWY_INLINE hn::Vec<Bits<D>> load_bytes([[maybe_unused]] D d, const std::uint8_t* from) {
#if HWY_TARGET == HWY_SCALAR  // it has no vectors of two
  const auto half = [](std::uint8_t byte) {
    return std::uint32_t{static_cast<std::uint16_t>(static_cast<std::int16_t>(static_cast<Int>(byte)))};
  };
  return hn::Set(Bits<D>(), half(from[0]) | half(from[1]) << 16);
#else
  using Half = std::conditional_t<std::is_signed_v<Int>, std::int16_t, std::uint16_t>;
  const hn::Repartition<Half, D> d16;
  const hn::Rebind<Int, decltype(d16)> d8;
  return hn::BitCast(Bits<D>(), hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const Int*>(from))));
#endif
}
// Stores the low bytes of both halves of each word.
template <class D>
HWY_INLINE void store_bytes(D /*d*/, hn::Vec<Bits<D>> words, std::uint8_t* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = static_cast<std::uint8_t>(hn::GetLane(words));
  to[1] = static_cast<std::uint8_t>(hn::GetLane(words) >> 16);
#else
  const hn::Repartition<std::uint16_t, D> d16;
  const hn::Rebind<std::uint8_t, decltype(d16)> d8;
  hn::StoreU(hn::TruncateTo(d8, hn::BitCast(d16, words)), d8, to);
#endif
}

// ------------------------------------------------------------------------------------------ random bits

// The keys of Philox's ten rounds.
struct RoundKeys {
  std::uint64_t first[10], second[10];

  explicit RoundKeys(RandomKey key) {
    for (std::uint32_t round = 0; round < 10; ++round) {
      first[round] = key.key[0] + round * 0x9E3779B9u;
      second[round] = key.key[1] + round * 0xBB67AE85u;
    }
  }
};

// The random words (update_random.hpp) of an even block and the next. A block's first word is repeated after
// its last, since the words form a ring.
class RandomBlocks {
 public:
  // even: the index of the even block.
  HWY_INLINE void fill(const RoundKeys& keys, std::uint64_t step, std::uint64_t even);

  // Random bits for the elements of two vectors from element i of a block on, in the lowest 20 bits of each
  // word.
  template <class D>
  HWY_INLINE Words<D> at(D /*d*/, std::int64_t block, int moment, std::int64_t i) const {
    const std::int64_t word = (i / 2 + moment * kRandomWords / 2) % kRandomWords;
    const char* const from = reinterpret_cast<const char*>(words_[block % 2] + word) + i / (kQuantBlock / 2);
    return {hn::LoadU(Bits<D>(), reinterpret_cast<const std::uint32_t*>(from)),
            hn::LoadU(Bits<D>(), reinterpret_cast<const std::uint32_t*>(from + 2))};
  }

 private:
  static constexpr std::size_t kCounters = kRandomWords / 4;
  alignas(64) std::uint32_t words_[2][kRandomWords + 16];
};

HWY_INLINE void RandomBlocks::fill(const RoundKeys& keys, std::uint64_t step, std::uint64_t even) {
  const std::uint64_t counter = even * kCounters;
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t j = 0; j < 2 * kCounters; ++j) {
    const Philox4 random = philox4x32_10(
        {static_cast<std::uint32_t>(counter + j), static_cast<std::uint32_t>(counter >> 32),
         static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32)},
        {static_cast<std::uint32_t>(keys.first[0]), static_cast<std::uint32_t>(keys.second[0])});
    std::uint32_t* const to = words_[j / kCounters] + 2 * (j % kCounters);
    to[0] = random[0], to[1] = random[1];
    to[kRandomWords / 2] = random[2], to[kRandomWords / 2 + 1] = random[3];
  }
#else
  const hn::ScalableTag<std::uint64_t> d;
  const hn::RepartitionToNarrow<decltype(d)> d32;
  using V = hn::Vec<decltype(d)>;
  constexpr std::uint64_t kLow = 0xffffffffu;
  // Several vectors of counters at a time: each product waits for the previous one of its vector, and
  // independent products overlap.
  constexpr std::size_t kVectors = 4;
  const V m0 = hn::Set(d, std::uint64_t{0xD2511F53u}), m1 = hn::Set(d, std::uint64_t{0xCD9E8D57u});
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t j = 0; j < 2 * kCounters; j += kVectors * lanes) {
    // Only the low halves of the 64-bit lanes are used; the high halves contain garbage.
    V c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
    for (std::size_t u = 0; u < kVectors; ++u) {
      c0[u] = hn::Add(hn::Set(d, (counter & kLow) + j + u * lanes), hn::Iota(d, 0));
      c1[u] = hn::Set(d, counter >> 32);
      c2[u] = hn::Set(d, step & kLow);
      c3[u] = hn::Set(d, step >> 32);
    }
    for (int round = 0; round < 10; ++round) {
      const V k0 = hn::Set(d, keys.first[round]), k1 = hn::Set(d, keys.second[round]);
      for (std::size_t u = 0; u < kVectors; ++u) {
        const V p0 = hn::MulEven(hn::BitCast(d32, m0), hn::BitCast(d32, c0[u]));
        const V p1 = hn::MulEven(hn::BitCast(d32, m1), hn::BitCast(d32, c2[u]));
        c0[u] = hn::Xor3(hn::ShiftRight<32>(p1), c1[u], k0);
        c2[u] = hn::Xor3(hn::ShiftRight<32>(p0), c3[u], k1);
        c1[u] = p1;
        c3[u] = p0;
      }
    }
    for (std::size_t u = 0; u < kVectors; ++u) {
      const std::size_t first = j + u * lanes;
      std::uint32_t* const to = words_[first / kCounters] + 2 * (first % kCounters);
      const auto pair = [&](V low, V high) HWY_ATTR {
        return hn::OddEven(hn::BitCast(d32, hn::ShiftLeft<32>(high)), hn::BitCast(d32, low));
      };
      hn::StoreU(pair(c0[u], c1[u]), d32, to);
      hn::StoreU(pair(c2[u], c3[u]), d32, to + kRandomWords / 2);
    }
  }
#endif
  words_[0][kRandomWords] = words_[0][0];
  words_[1][kRandomWords] = words_[1][0];
}

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
