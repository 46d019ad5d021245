// The pass that all optimizers share. For each block of kQuantBlock elements it decodes gradient, master
// and moments, applies the update rule, encodes master and moments again, and writes the weight. It takes
// runs of whole blocks, and accesses nothing outside of them. Included once for each instruction set, as
// simd.hpp is.
//
// A Rule is the update rule: it has the element type S, the number of moments kMoments, a constructor from
// (d, UpdateConstants<S>), and
//   apply(g, master, m, v)   on vectors; g is scaled already; master, m and v are updated in place.
#if defined(ZG_KERNELS_HOST_UPDATE_PASS_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_UPDATE_PASS_HPP
#undef ZG_KERNELS_HOST_UPDATE_PASS_HPP
#else
#define ZG_KERNELS_HOST_UPDATE_PASS_HPP
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstring>
#include <type_traits>

#include "kernels/host/simd.hpp"
#include "kernels/host/update_int8.hpp"
#include "kernels/host/update_kernels.hpp"
#include "kernels/host/update_pairs.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {

// ------------------------------------------------------------------------------- the arrays of one block

// How many elements ahead of their use the cache lines of all arrays are prefetched. The hardware prefetcher
// stops at each page, and restarts slowly where four arrays are read at the same time: without this a core
// moves 10% fewer bytes.
constexpr std::int64_t kAhead = 2 * kQuantBlock;

// Prefetches the cache lines of `count` elements, kAhead after p[i]. They may lie beyond the array's end,
// since a prefetch does not fault.
template <class T>
HWY_INLINE void ask_ahead(const T* p, std::int64_t i, std::int64_t count) {
  constexpr std::int64_t kLine = 64, kSize = sizeof(T);
  const auto begin = reinterpret_cast<std::uintptr_t>(p) + static_cast<std::uintptr_t>((i + kAhead) * kSize);
  for (std::int64_t at = 0; at < count * kSize; at += kLine)
    hwy::Prefetch(reinterpret_cast<const char*>(begin + static_cast<std::uintptr_t>(at)));  // NOLINT
}

template <Order kOrder, class S>
class Gradient {
 public:
  // buffer: room for a block, used for fp16 gradients.
  Gradient(const UpdateArrays& a, std::int64_t begin, S* buffer) {
    if constexpr (sizeof(S) == 8) {
      whole_ = static_cast<const S*>(a.grad) + begin;
    } else if (a.grad_type == DType::kBF16) {
      narrow_ = static_cast<const std::uint16_t*>(a.grad) + begin;
    } else if (a.grad_type == DType::kF32) {
      whole_ = static_cast<const S*>(a.grad) + begin;
    } else {
      const hn::ScalableTag<float> d;
      const fp16* const from = static_cast<const fp16*>(a.grad) + begin;
      for (std::int64_t i = 0; i < kQuantBlock; i += static_cast<std::int64_t>(hn::Lanes(d))) {
        hn::Store(load_f32(d, from + i), d, buffer + i);
      }
      whole_ = buffer;
    }
  }
  template <class D>
  HWY_INLINE Floats<D> load(D d, std::int64_t i) const {
    if constexpr (sizeof(S) == 4) {
      if (narrow_ != nullptr) return as_floats(d, load_high<kOrder>(d, narrow_ + i));
    }
    return load_whole<kOrder>(d, whole_ + i);
  }
  HWY_INLINE void ask(std::int64_t i, std::int64_t count) const {
    if (narrow_ != nullptr) return ask_ahead(narrow_, i, count);
    ask_ahead(whole_, i, count);
  }

 private:
  const S* whole_ = nullptr;
  const std::uint16_t* narrow_ = nullptr;
};

template <Order kOrder, MasterFormat kFormat, class S>
class Master;

template <Order kOrder, class S>
class Master<kOrder, MasterFormat::kFull, S> {
 public:
  Master(const UpdateArrays& a, std::int64_t begin) : master_(static_cast<S*>(a.master) + begin) {}
  template <class D>
  HWY_INLINE Floats<D> load(D d, std::int64_t i) const {
    return load_whole<kOrder>(d, master_ + i);
  }
  template <class D>
  HWY_INLINE void store(D d, Floats<D> f, std::int64_t i) const {
    store_whole<kOrder>(d, Floats<D>{one_nan(d, f.a), one_nan(d, f.b)}, master_ + i);
  }
  HWY_INLINE void ask(std::int64_t i, std::int64_t count) const { ask_ahead(master_, i, count); }

 private:
  S* master_;
};

template <Order kOrder, class S>
class Master<kOrder, MasterFormat::kSplit, S> {
 public:
  Master(const UpdateArrays& a, std::int64_t begin)
      : weight_(static_cast<std::uint16_t*>(a.weight) + begin),
        low_(static_cast<std::uint16_t*>(a.master) + begin) {}
  // The weight was rounded up if the low half is 0x8000 or more. Then the low half is negative as a signed
  // number, and adding it subtracts one from the high half.
  template <class D>
  HWY_INLINE Floats<D> load(D d, std::int64_t i) const {
    const auto high = load_high<kOrder>(d, weight_ + i);
    const auto low = load_signed<kOrder>(d, low_ + i);
    return as_floats(d, Words<D>{hn::Add(high.a, low.a), hn::Add(high.b, low.b)});
  }
  template <class D>
  HWY_INLINE void store(D d, Floats<D> f, std::int64_t i) const {
    const auto half = hn::Set(Bits<D>(), 0x8000u);
    const auto bits = as_words(d, Floats<D>{one_nan(d, f.a), one_nan(d, f.b)});
    store_low<kOrder>(d, bits, low_ + i);
    store_high<kOrder>(d, Words<D>{hn::Add(bits.a, half), hn::Add(bits.b, half)}, weight_ + i);
  }
  HWY_INLINE void ask(std::int64_t i, std::int64_t count) const {
    ask_ahead(weight_, i, count);
    ask_ahead(low_, i, count);
  }

 private:
  std::uint16_t* weight_;
  std::uint16_t* low_;
};

// The arguments from which the moments of a block are constructed.
template <class S>
struct MomentPlace {
  const UpdateArrays& arrays;
  std::int64_t begin;
  const RandomBlocks& random;
  std::int64_t block;  // the block's index in the parameter
  S* values;           // kInt8: room for the new values of a block, for each moment
};

// The first (kMoment = 0) or second moment of a block.
template <int kMoment, MomentFormat kFormat, class S>
class Moment;

template <int kMoment, class S>
class Moment<kMoment, MomentFormat::kFull, S> {
 public:
  explicit Moment(const MomentPlace<S>& p) : data_(static_cast<S*>(p.arrays.moment[kMoment]) + p.begin) {}
  template <class D>
  HWY_INLINE Floats<D> load(D d, std::int64_t i) const {
    return load_whole<Order::kNeighbours>(d, data_ + i);
  }
  template <class D>
  HWY_INLINE void store(D d, Floats<D> f, std::int64_t i) {
    store_whole<Order::kNeighbours>(d, f, data_ + i);
  }
  HWY_INLINE void ask(std::int64_t i, std::int64_t count) const { ask_ahead(data_, i, count); }

 private:
  S* data_;
};

template <int kMoment, class S>
class Moment<kMoment, MomentFormat::kBf16, S> {
 public:
  explicit Moment(const MomentPlace<S>& p)
      : data_(static_cast<std::uint16_t*>(p.arrays.moment[kMoment]) + p.begin),
        random_(p.random),
        block_(p.block) {}
  template <class D>
  HWY_INLINE Floats<D> load(D d, std::int64_t i) const {
    return as_floats(d, load_high<Order::kEvenOdd>(d, data_ + i));
  }
  template <class D>
  HWY_INLINE void store(D d, Floats<D> f, std::int64_t i) {
    const auto random = random_.at(d, block_, kMoment, i);
    store_high<Order::kEvenOdd>(d, Words<D>{round(d, f.a, random.a), round(d, f.b, random.b)}, data_ + i);
  }
  HWY_INLINE void ask(std::int64_t i, std::int64_t count) const { ask_ahead(data_, i, count); }

 private:
  template <class D>
  HWY_INLINE hn::Vec<Bits<D>> round(D d, hn::Vec<D> v, hn::Vec<Bits<D>> random) const {
    const Bits<D> d32;
    const auto sum = hn::Add(hn::BitCast(d32, v), hn::And(random, hn::Set(d32, 0xffffu)));
    return hn::BitCast(d32, hn::IfThenElse(hn::IsNaN(v), quiet_nan(d), hn::BitCast(d, sum)));
  }

  std::uint16_t* data_;
  const RandomBlocks& random_;
  std::int64_t block_;
};

// A moment in the codes of update_int8.hpp. In a word, a code is at the position of the fp32 bits that it
// represents. A block can be encoded only when all its new values are known: store() keeps them, settle()
// computes the scale, encode() writes the codes, finish() completes the block.
template <int kMoment, class S>
class Moment<kMoment, MomentFormat::kInt8, S> {
  using Tag = hn::ScalableTag<S>;
  using Unsigned = Bits<Tag>;
  using Vector = hn::Vec<Unsigned>;

 public:
  explicit Moment(const MomentPlace<S>& p)
      : codes_(static_cast<std::uint8_t*>(p.arrays.moment[kMoment]) + p.begin),
        scale_(p.arrays.scale[kMoment] + p.begin / kQuantBlock),
        values_(p.values + kMoment * kQuantBlock),
        random_(p.random),
        block_(p.block) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(*scale_);
    base_ = hn::Set(Unsigned(), bits >> int8::kShift << int8::kShift);
    zero_ = hn::Set(Unsigned(), *scale_ == *scale_ ? 0u : int8::kNan);
    offset_ = hn::Set(Tag(), *scale_);
    largest_ = hn::Zero(Unsigned());
  }
  HWY_INLINE void ask(std::int64_t i, std::int64_t count) const { ask_ahead(codes_, i, count); }
  template <class D>
  HWY_INLINE Floats<D> load(D d, std::int64_t i) const {
    if constexpr (kMoment == 0) {
      const auto words = load_bytes<std::int8_t>(d, codes_ + i);
      return {first(d, hn::ShiftLeft<int8::kShift>(words)),
              first(d, hn::ShiftLeft<int8::kShift - 16>(words))};
    } else {
      const auto words = load_bytes<std::uint8_t>(d, codes_ + i);
      return {second(d, hn::ShiftLeft<int8::kShift>(words)),
              second(d, hn::ShiftLeft<int8::kShift - 16>(words))};
    }
  }
  template <class D>
  HWY_INLINE void store(D d, Floats<D> f, std::int64_t i) {
    auto bits = as_words(d, f);
    if constexpr (kMoment == 0) {
      const auto magnitude = hn::Set(Unsigned(), 0x7fffffffu);
      bits = {hn::And(bits.a, magnitude), hn::And(bits.b, magnitude)};
    }
    largest_ = hn::Max(largest_, hn::Max(bits.a, bits.b));
    hn::Store(f.a, d, values_ + i);
    hn::Store(f.b, d, values_ + i + hn::Lanes(d));
  }
  // Computes the scale, after the last store() and before the first encode().
  HWY_INLINE void settle() {
    const Tag d;
    const Unsigned d32;
    const std::uint32_t largest = hn::GetLane(hn::MaxOfLanes(d32, largest_));
    const float scale = int8::scale_of(kMoment, largest);
    *scale_ = scale;
    lost_ = largest >= int8::kInfinity;
    base_ = hn::Set(d32, 0u - (int8::base_of(kMoment, largest) << int8::kShift));
    offset_ = hn::Set(d, scale);
  }
  HWY_INLINE void encode(std::int64_t i) const {
    const Tag d;
    const Floats<Tag> f{hn::Load(d, values_ + i), hn::Load(d, values_ + i + hn::Lanes(d))};
    const auto random = random_.at(d, block_, kMoment, i);
    const Words<Tag> rounded{round(f.a, random.a), round(f.b, random.b)};
    store_bytes(d, codes(high_halves(d, rounded), high_halves(d, as_words(d, f))), codes_ + i);
  }
  HWY_INLINE void finish() const {
    if (HWY_UNLIKELY(lost_)) std::memset(codes_, 0, kQuantBlock);
  }

 private:
  // Decode codes of the first or the second moment. shifted: the code at its position, with garbage below and
  // above it.
  template <class D>
  HWY_INLINE hn::Vec<D> first(D d, Vector shifted) const {
    // The sign, which the extension has copied to the top bit, and the code.
    const auto kept = hn::And(shifted, hn::Set(Unsigned(), 0x87f00000u));
    const auto value = hn::BitCast(d, hn::Add(kept, base_));
    return hn::Sub(value, hn::CopySign(offset_, value));
  }
  template <class D>
  HWY_INLINE hn::Vec<D> second(D d, Vector shifted) const {
    const Unsigned d32;
    const auto code = hn::And(shifted, hn::Set(d32, 0x0ff00000u));
    return hn::BitCast(d, hn::IfThenElse(hn::Eq(code, hn::Zero(d32)), zero_, hn::Add(code, base_)));
  }
  // The rounded code at its position, with garbage below it.
  HWY_INLINE Vector round(hn::Vec<Tag> value, Vector random) const {
    const Unsigned d32;
    const auto below = hn::OrAnd(base_, random, hn::Set(d32, 0xfffffu));
    if constexpr (kMoment == 0) value = hn::Add(value, hn::CopySign(offset_, value));
    return hn::Add(hn::BitCast(d32, value), below);
  }
  // The codes of two elements in the halves of each word. Arguments: high halves of round() and of the
  // values.
  HWY_INLINE Vector codes(Vector rounded, Vector value) const {
#if HWY_TARGET == HWY_SCALAR
    const std::uint32_t r = hn::GetLane(rounded), v = hn::GetLane(value);
    return hn::Set(Unsigned(), std::uint32_t{code(r & 0xffffu, v & 0xffffu)} |
                                   std::uint32_t{code(r >> 16, v >> 16)} << 16);
#else
    const hn::Repartition<std::uint16_t, Tag> d16;
    const hn::Repartition<std::int16_t, Tag> i16;
    const auto halves = hn::BitCast(d16, rounded);
    if constexpr (kMoment == 0) {
      const auto magnitude = hn::And(hn::ShiftRight<4>(halves), hn::Set(d16, std::uint16_t{0x7f}));
      return hn::BitCast(Unsigned(),
                         hn::OrAnd(magnitude, hn::ShiftRight<8>(halves), hn::Set(d16, std::uint16_t{0x80})));
    } else {
      // The code must be at least 1, unless the value's high half is 0. The value's high half is never less
      // than the code, so the minimum with it changes nothing else.
      const auto above = hn::Max(hn::ShiftRight<4>(hn::BitCast(i16, halves)), hn::Set(i16, std::int16_t{1}));
      return hn::BitCast(Unsigned(), hn::Min(above, hn::BitCast(i16, value)));
    }
#endif
  }
  static std::uint16_t code(std::uint32_t rounded, std::uint32_t value) {
    if (kMoment == 0) return static_cast<std::uint16_t>((rounded >> 4 & 0x7fu) | (rounded >> 8 & 0x80u));
    const std::int32_t top = static_cast<std::int16_t>(rounded) >> 4, above = top < 1 ? 1 : top;
    const std::int32_t most = static_cast<std::int32_t>(value);
    return static_cast<std::uint16_t>(above < most ? above : most);
  }

  std::uint8_t* codes_;
  float* scale_;
  S* values_;
  const RandomBlocks& random_;
  std::int64_t block_;
  Vector base_;  // base of the codes read; from settle() on the negated base of the codes to be written
  Vector zero_, largest_;
  hn::Vec<Tag> offset_;
  bool lost_ = false;
};

// A moment that the optimizer does not keep.
template <class S>
struct NoMoment {
  explicit NoMoment(const MomentPlace<S>& /*p*/) {}
  template <class D>
  HWY_INLINE Floats<D> load(D d, std::int64_t /*i*/) const {
    return {hn::Zero(d), hn::Zero(d)};
  }
  template <class D>
  HWY_INLINE void store(D /*d*/, Floats<D> /*f*/, std::int64_t /*i*/) {}
  HWY_INLINE void ask(std::int64_t /*i*/, std::int64_t /*count*/) const {}
  HWY_INLINE void settle() {}
  HWY_INLINE void encode(std::int64_t /*i*/) const {}
  HWY_INLINE void finish() const {}
};

// A non-temporal store if the address is aligned: an ordinary store would first read the cache line, in vain.
// Needs hwy::FlushStream() before another thread reads the memory.
template <class D>
HWY_INLINE void store_streaming(D d, hn::Vec<D> v, hn::TFromD<D>* to) {
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(v) == 0) {
    hn::Stream(v, d, to);
  } else {
    hn::StoreU(v, d, to);
  }
}

// Writes the weights of a block from its masters (kFull), unless they are their own masters: then there is
// nothing to write, and a non-temporal store of a line that has just been written would send it to memory
// twice.
HWY_INLINE void weight_block(const UpdateArrays& a, std::int64_t begin, const double* master) {
  double* const weight = static_cast<double*>(a.weight) + begin;
  if (weight != master) std::memcpy(weight, master, kQuantBlock * sizeof(double));
}
HWY_INLINE void weight_block(const UpdateArrays& a, std::int64_t begin, const float* master) {
  const hn::ScalableTag<float> d;
  const Bits<decltype(d)> d32;
  [[maybe_unused]] const hn::Rebind<std::uint16_t, decltype(d)> d16;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (a.weight_type == DType::kF32) {
    float* const weight = static_cast<float*>(a.weight) + begin;
    if (weight == master) return;
    for (std::int64_t i = 0; i < kQuantBlock; i += lanes)
      store_streaming(d, hn::LoadU(d, master + i), weight + i);
  } else if (a.weight_type == DType::kBF16) {
    std::uint16_t* const weight = static_cast<std::uint16_t*>(a.weight) + begin;
    const auto round = [&](std::int64_t i) HWY_ATTR {  // round_master()
      return hn::Add(hn::BitCast(d32, one_nan(d, hn::LoadU(d, master + i))), hn::Set(d32, 0x8000u));
    };
#if HWY_TARGET == HWY_SCALAR
    for (std::int64_t i = 0; i < kQuantBlock; ++i) {
      hn::Store(hn::TruncateTo(d16, hn::ShiftRight<16>(round(i))), d16, weight + i);
    }
#else
    const hn::Repartition<std::uint16_t, decltype(d)> both;
    for (std::int64_t i = 0; i < kQuantBlock; i += 2 * lanes) {
      const auto low = hn::BitCast(both, round(i)), high = hn::BitCast(both, round(i + lanes));
      store_streaming(both, hn::ConcatOdd(both, high, low), weight + i);
    }
#endif
  } else {
    fp16* const weight = static_cast<fp16*>(a.weight) + begin;
    for (std::int64_t i = 0; i < kQuantBlock; i += lanes) store(d, hn::LoadU(d, master + i), weight + i);
  }
}

// ------------------------------------------------------------------------------------------------ the pass

template <class Rule, MasterFormat kMaster, MomentFormat kMoments>
void update_pass(const UpdateJob<typename Rule::S>& job) {
  using S = typename Rule::S;
  using First = std::conditional_t<Rule::kMoments >= 1, Moment<0, kMoments, S>, NoMoment<S>>;
  using Second = std::conditional_t<Rule::kMoments >= 2, Moment<1, kMoments, S>, NoMoment<S>>;
  constexpr Order kOrder = kMoments == MomentFormat::kFull ? Order::kNeighbours : Order::kEvenOdd;
  const hn::ScalableTag<S> d;
  const std::int64_t step = 2 * static_cast<std::int64_t>(hn::Lanes(d));
  const UpdateArrays a = job.arrays;
  const Rule rule(d, *job.constants);
  const auto grad_scale = hn::Set(d, job.constants->grad_scale);
  alignas(64) S buffer[kQuantBlock];
  alignas(64) S values[2 * kQuantBlock];
  RandomBlocks random;
  const RoundKeys keys(job.random);
  for (std::int64_t b = 0; b < job.blocks; ++b) {
    const std::int64_t begin = b * kQuantBlock, block = job.first_block + b;
    if (kMoments != MomentFormat::kFull && (b == 0 || block % 2 == 0)) {
      random.fill(keys, static_cast<std::uint64_t>(job.step), static_cast<std::uint64_t>(block / 2 * 2));
    }
    const Gradient<kOrder, S> gradient(a, begin, buffer);
    const Master<kOrder, kMaster, S> masters(a, begin);
    const MomentPlace<S> place{
        .arrays = a, .begin = begin, .random = random, .block = block, .values = values};
    First first(place);
    Second second(place);
    for (std::int64_t i = 0; i < kQuantBlock; i += step) {
      gradient.ask(i, step);
      masters.ask(i, step);
      first.ask(i, step);
      second.ask(i, step);
      auto g = gradient.load(d, i);
      auto master = masters.load(d, i);
      auto m = first.load(d, i);
      auto v = second.load(d, i);
      rule.apply(hn::Mul(g.a, grad_scale), master.a, m.a, v.a);
      rule.apply(hn::Mul(g.b, grad_scale), master.b, m.b, v.b);
      first.store(d, m, i);
      second.store(d, v, i);
      masters.store(d, master, i);
    }
    if constexpr (kMoments == MomentFormat::kInt8) {
      first.settle();
      second.settle();
      for (std::int64_t i = 0; i < kQuantBlock; i += step) {
        first.encode(i);
        second.encode(i);
      }
      first.finish();
      second.finish();
    }
    if constexpr (kMaster == MasterFormat::kFull) {
      weight_block(a, begin, static_cast<const S*>(a.master) + begin);
    }
  }
  if constexpr (kMaster == MasterFormat::kFull) hwy::FlushStream();
}

// The passes for all state formats that Rule::S supports.
template <class Rule>
UpdateKernels<typename Rule::S> passes_of() {
  UpdateKernels<typename Rule::S> kernels;
  const auto full = static_cast<int>(MasterFormat::kFull), split = static_cast<int>(MasterFormat::kSplit);
  const auto whole = static_cast<int>(MomentFormat::kFull);
  kernels.of[full][whole] = update_pass<Rule, MasterFormat::kFull, MomentFormat::kFull>;
  if constexpr (sizeof(typename Rule::S) == 4) {
    kernels.of[split][whole] = update_pass<Rule, MasterFormat::kSplit, MomentFormat::kFull>;
    if constexpr (Rule::kMoments > 0) {
      const auto narrow = static_cast<int>(MomentFormat::kBf16), byte = static_cast<int>(MomentFormat::kInt8);
      kernels.of[full][narrow] = update_pass<Rule, MasterFormat::kFull, MomentFormat::kBf16>;
      kernels.of[split][narrow] = update_pass<Rule, MasterFormat::kSplit, MomentFormat::kBf16>;
      kernels.of[full][byte] = update_pass<Rule, MasterFormat::kFull, MomentFormat::kInt8>;
      kernels.of[split][byte] = update_pass<Rule, MasterFormat::kSplit, MomentFormat::kInt8>;
    }
  }
  return kernels;
}
template <template <class> class Rule>
UpdatePasses update_passes() {
  return {passes_of<Rule<float>>(), passes_of<Rule<double>>()};
}

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
