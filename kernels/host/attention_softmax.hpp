// The softmax of attention's tiles, forward and backward, with masks for causality, windows and documents.
// Included once for each instruction set (see simd.hpp), by attention.cpp alone. Pure functions; any thread.
#if defined(ZG_KERNELS_HOST_ATTENTION_SOFTMAX_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_ATTENTION_SOFTMAX_HPP
#undef ZG_KERNELS_HOST_ATTENTION_SOFTMAX_HPP
#else
#define ZG_KERNELS_HOST_ATTENTION_SOFTMAX_HPP
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstdint>

#include "kernels/host/attention_scratch.hpp"
#include "kernels/host/attention_tiles.hpp"
#include "ziggurat/kernels/visible_keys.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {

// The keys that are hidden in a tile. diagonal: whether the causal diagonal crosses the tile. first: for each
// of the tile's queries the first of the tile's keys that it attends to, never decreasing; null: 0 for all.
struct TileMask {
  bool diagonal;
  const std::int32_t* first;
};

// The mask of the queries among c, c + 1, ... that attend to key k.
HWY_INLINE hn::Mask<Float> visible(const TileMask& mask, std::int64_t c, std::int64_t k) {
  const Int d;
  const auto key = static_cast<std::int32_t>(k);
  const auto query = mask.diagonal ? hn::Iota(d, static_cast<std::int32_t>(c)) : hn::Set(d, key);
  const auto first = mask.first == nullptr ? hn::Zero(d) : hn::LoadU(d, mask.first + c);
  return hn::RebindMask(Float(),
                        hn::And(hn::Lt(hn::Set(d, key - 1), query), hn::Lt(first, hn::Set(d, key + 1))));
}

// Which of a tile's keys [0, keys) the queries [c, c + lanes) see. Keys before `begin` are seen by none of
// these queries, from there to `clear` by some, to `clear_end` by all, and to `end` by some. `end` is rounded
// up to the keys that products will read.
struct KeyRanges {
  std::int64_t begin = 0, clear = 0, clear_end, end;
  HWY_INLINE KeyRanges(const TileMask& mask, std::int64_t c, std::int64_t keys) {
    end = mask.diagonal ? min_of(keys, rounded_up(c + lanes(), kRows)) : keys;
    if (mask.first != nullptr)
      begin = min_of(end, mask.first[c]), clear = min_of(end, mask.first[c + lanes() - 1]);
    clear_end = mask.diagonal ? min_of(c, end) : end;
    if (clear_end < clear) clear_end = clear;
  }
  // Calls some(k) for keys that some of the queries attend to, and all(k) for keys that all of them attend
  // to.
  template <class Some, class All>
  HWY_INLINE void each(const Some& some, const All& all) const {
    for (std::int64_t k = begin; k < clear; ++k) some(k);
    for (std::int64_t k = clear; k < clear_end; ++k) all(k);
    for (std::int64_t k = clear_end; k < end; ++k) some(k);
  }
};

HWY_INLINE void clear_rows(float* x, std::int64_t rows, std::int64_t c) {
  const Float d;
  for (std::int64_t k = 0; k < rows; ++k) hn::StoreU(hn::Zero(d), d, x + k * kTile + c);
}

// Fills `first` of a mask of `keys` keys from `key` on, for n queries from `query` on; null if, apart from
// causality, they attend to all of these keys.
inline const std::int32_t* first_in_tile(const VisibleBlockKeys& visible, std::int64_t query, std::int64_t n,
                                         std::int64_t key, std::int32_t (&first)[kTile]) {
  if (visible.all() || visible.first(query + n - 1) <= key) return nullptr;
  for (std::int64_t c = 0; c < kTile; ++c) {
    const std::int64_t at = visible.first(query + min_of(c, n - 1)) - key;
    first[c] = static_cast<std::int32_t>(at < 0 ? 0 : min_of(at, kTile));
  }
  return first;
}

// The keys and queries of a tile.
struct TileSize {
  std::int64_t keys, queries;
};

// Scores [keys, queries] become 2^(score - new maximum); factor = 2^(old maximum - new maximum). cap: the cap
// of scores; 0: none.
HWY_NOINLINE void running_softmax(float* scores, TileSize size, const TileMask& mask, float cap, float* max,
                                  float* sum, float* factor) {
  const Float d;
  const Vector lowest = hn::Set(d, -1e30f);
  for (std::int64_t c = 0; c < size.queries; c += lanes()) {
    const KeyRanges ranges(mask, c, size.keys);
    const auto at = [&](std::int64_t k) HWY_ATTR { return scores + k * kTile + c; };
    if (cap != 0) {
      for (std::int64_t k = ranges.begin; k < ranges.end; ++k)
        hn::StoreU(hn::Mul(hn::Set(d, cap), hn::Tanh(d, hn::LoadU(d, at(k)))), d, at(k));
    }
    const Vector old = hn::LoadU(d, max + c);
    Vector top = old;
    ranges.each(
        [&](std::int64_t k) HWY_ATTR {
          top = hn::Max(top, hn::IfThenElse(visible(mask, c, k), hn::LoadU(d, at(k)), lowest));
        },
        [&](std::int64_t k) HWY_ATTR { top = hn::Max(top, hn::LoadU(d, at(k))); });
    Vector total = hn::Zero(d);
    clear_rows(scores, ranges.begin, c);
    ranges.each(
        [&](std::int64_t k) HWY_ATTR {
          const Vector e =
              hn::IfThenElseZero(visible(mask, c, k), exp2_of(hn::Sub(hn::LoadU(d, at(k)), top)));
          total = hn::Add(total, e);
          hn::StoreU(e, d, at(k));
        },
        [&](std::int64_t k) HWY_ATTR {
          const Vector e = exp2_of(hn::Sub(hn::LoadU(d, at(k)), top));
          total = hn::Add(total, e);
          hn::StoreU(e, d, at(k));
        });
    const Vector shrink = exp2_of(hn::Sub(old, top));
    hn::StoreU(shrink, d, factor + c);
    hn::StoreU(top, d, max + c);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, sum + c), shrink, total), d, sum + c);
  }
}

// Scores in p become probabilities; dP in ds becomes dS = P * (dP - delta), times the derivative of the cap
// if scores are capped. Both are [keys, queries].
template <bool kCapped>
HWY_NOINLINE void softmax_backward(float* p, float* ds, TileSize size, const TileMask& mask,
                                   [[maybe_unused]] float cap, const float* lse, const float* delta) {
  const Float d;
  for (std::int64_t c = 0; c < size.queries; c += lanes()) {
    const KeyRanges ranges(mask, c, size.keys);
    const Vector l = hn::LoadU(d, lse + c), dot = hn::LoadU(d, delta + c);
    clear_rows(p, ranges.begin, c);
    clear_rows(ds, ranges.begin, c);
    const auto one = [&](std::int64_t k, bool masked) HWY_ATTR {
      float *at = p + k * kTile + c, *ds_at = ds + k * kTile + c;
      Vector exponent = hn::LoadU(d, at);
      [[maybe_unused]] Vector slope;
      if constexpr (kCapped) {
        const Vector t = hn::Tanh(d, exponent);
        exponent = hn::Mul(hn::Set(d, cap), t);
        slope = hn::NegMulAdd(t, t, hn::Set(d, 1.0f));
      }
      Vector e = exp2_of(hn::Sub(exponent, l));
      Vector g = hn::Mul(e, hn::Sub(hn::LoadU(d, ds_at), dot));
      if constexpr (kCapped) g = hn::Mul(g, slope);
      if (masked) {
        e = hn::IfThenElseZero(visible(mask, c, k), e);
        g = hn::IfThenElseZero(visible(mask, c, k), g);
      }
      hn::StoreU(e, d, at);
      hn::StoreU(g, d, ds_at);
    };
    ranges.each([&](std::int64_t k) HWY_ATTR { one(k, true); },
                [&](std::int64_t k) HWY_ATTR { one(k, false); });
  }
}

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
