// The pass that all optimizers share: per block of kQuantBlock elements it decodes gradient, master and
// moments, applies a rule, encodes them again and makes the weight. Included once per instruction set, after
// simd.hpp's fashion (the guard flips). Runs of whole blocks; nothing outside of them is touched.
//
// A Rule has the element type S, kMoments, a constructor (d, UpdateConstants<S>) and
//   apply(g, master, m, v)   vectors; g is scaled already; changes the last three in place.
#if defined(ZG_KERNELS_HOST_UPDATE_PASS_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_UPDATE_PASS_HPP
#undef ZG_KERNELS_HOST_UPDATE_PASS_HPP
#else
#define ZG_KERNELS_HOST_UPDATE_PASS_HPP
#endif

#include <hwy/highway.h>

#include <cstring>

#include "kernels/host/simd.hpp"
#include "kernels/host/update_int8.hpp"
#include "kernels/host/update_kernels.hpp"
#include "kernels/host/update_random.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {

template <class D>
using Bits = hn::RebindToUnsigned<D>;

// NaN in one form, so that an update's bits do not depend on which operand's NaN an instruction takes.
template <class D>
HWY_INLINE hn::Vec<D> one_nan(D d, hn::Vec<D> v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::NaN(d), v);
}

// ------------------------------------------------------------------------------------------ random bits

// The 16 bits of the first moment of every element of a block (update_random.hpp). `counter`: that of its
// first element.
HWY_INLINE void random_block(RandomKey key, std::uint64_t step, std::uint64_t counter, std::uint16_t* out) {
#if HWY_TARGET == HWY_SCALAR  // has no vectors of two
  for (std::uint64_t j = 0; j < 32; ++j) {
    const Philox4 words =
        philox4x32_10({static_cast<std::uint32_t>(counter + j), static_cast<std::uint32_t>(counter >> 32),
                       static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32)},
                      {key.key[0], key.key[1]});
    for (std::uint64_t k = 0; k < 8; ++k) {
      out[k / 4 * 128 + 4 * j + k % 4] = static_cast<std::uint16_t>(words[k / 2] >> (k % 2 * 16));
    }
  }
#else
  const hn::ScalableTag<std::uint64_t> d;
  const hn::RepartitionToNarrow<decltype(d)> d32;
  using V = hn::Vec<decltype(d)>;
  constexpr std::uint64_t kLow = 0xffffffffu;
  const V m0 = hn::Set(d, std::uint64_t{0xD2511F53u}), m1 = hn::Set(d, std::uint64_t{0xCD9E8D57u});
  std::uint64_t* const words = reinterpret_cast<std::uint64_t*>(out);
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t j = 0; j < 32; j += lanes) {
    // Only the low halves of the 64-bit lanes count; what is in the high halves is never looked at.
    V c0 = hn::Add(hn::Set(d, counter & kLow), hn::Iota(d, j)), c1 = hn::Set(d, counter >> 32);
    V c2 = hn::Set(d, step & kLow), c3 = hn::Set(d, step >> 32);
    std::uint32_t k0 = key.key[0], k1 = key.key[1];
    for (int round = 0; round < 10; ++round) {
      const V p0 = hn::MulEven(hn::BitCast(d32, m0), hn::BitCast(d32, c0));
      const V p1 = hn::MulEven(hn::BitCast(d32, m1), hn::BitCast(d32, c2));
      c0 = hn::Xor3(hn::ShiftRight<32>(p1), c1, hn::Set(d, std::uint64_t{k0}));
      c2 = hn::Xor3(hn::ShiftRight<32>(p0), c3, hn::Set(d, std::uint64_t{k1}));
      c1 = p1;
      c3 = p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const auto pair = [&](V low, V high) HWY_ATTR {
      return hn::BitCast(d, hn::OddEven(hn::BitCast(d32, hn::ShiftLeft<32>(high)), hn::BitCast(d32, low)));
    };
    hn::StoreU(pair(c0, c1), d, words + j);
    hn::StoreU(pair(c2, c3), d, words + 32 + j);
  }
#endif
}

// Random bits as integers of the width of D's lanes. moment: 0 or 1; i: within the block.
template <class D>
HWY_INLINE hn::Vec<Bits<D>> random_at([[maybe_unused]] D d, const std::uint16_t* random, int moment,
                                      std::int64_t i) {
  const hn::Rebind<std::uint16_t, D> d16;
  return hn::PromoteTo(Bits<D>(), hn::LoadU(d16, random + (moment == 1 ? i ^ 128 : i)));
}

// -------------------------------------------------------------------------------------------- the master

template <MasterFormat kFormat, class S>
class Master;

template <class S>
class Master<MasterFormat::kFull, S> {
 public:
  Master(const UpdateArrays& a, std::int64_t begin) : master_(static_cast<S*>(a.master) + begin) {}
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, std::int64_t i) const {
    return hn::LoadU(d, master_ + i);
  }
  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, std::int64_t i) const {
    hn::StoreU(one_nan(d, v), d, master_ + i);
  }

 private:
  S* master_;
};

template <class S>
class Master<MasterFormat::kSplit, S> {
 public:
  Master(const UpdateArrays& a, std::int64_t begin)
      : weight_(static_cast<std::uint16_t*>(a.weight) + begin),
        low_(static_cast<std::uint16_t*>(a.master) + begin) {}
  // The weight was rounded up where the low half is 0x8000 or more, that is, negative as a signed number.
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, std::int64_t i) const {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToSigned<decltype(d16)> i16;
    const hn::RebindToSigned<D> i32;
    const auto high = hn::ShiftLeft<16>(hn::PromoteTo(i32, hn::LoadU(d16, weight_ + i)));
    const auto low = hn::PromoteTo(i32, hn::BitCast(i16, hn::LoadU(d16, low_ + i)));
    return hn::BitCast(d, hn::Add(high, low));
  }
  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, std::int64_t i) const {
    const hn::Rebind<std::uint16_t, D> d16;
    const Bits<D> d32;
    const auto bits = hn::BitCast(d32, one_nan(d, v));
    const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d32, 0x8000u)));
    hn::StoreU(hn::TruncateTo(d16, high), d16, weight_ + i);
    hn::StoreU(hn::TruncateTo(d16, bits), d16, low_ + i);
  }

 private:
  std::uint16_t* weight_;
  std::uint16_t* low_;
};

// ------------------------------------------------------------------------------------------- the moments

// One moment of one block. finish() after all of its elements were stored.
template <MomentFormat kFormat, class S>
class Moment;

template <class S>
class Moment<MomentFormat::kFull, S> {
 public:
  Moment(const UpdateArrays& a, int which, std::int64_t begin, const std::uint16_t* /*random*/)
      : data_(static_cast<S*>(a.moment[which]) + begin) {}
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, std::int64_t i) const {
    return hn::LoadU(d, data_ + i);
  }
  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, std::int64_t i) {
    hn::StoreU(v, d, data_ + i);
  }
  HWY_INLINE void finish() {}

 private:
  S* data_;
};

template <class S>
class Moment<MomentFormat::kBf16, S> {
 public:
  Moment(const UpdateArrays& a, int which, std::int64_t begin, const std::uint16_t* random)
      : data_(static_cast<bf16*>(a.moment[which]) + begin), random_(random), which_(which) {}
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, std::int64_t i) const {
    return load_f32(d, static_cast<const bf16*>(data_) + i);
  }
  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, std::int64_t i) {
    const hn::Rebind<std::uint16_t, D> d16;
    const Bits<D> d32;
    const auto sum = hn::Add(hn::BitCast(d32, v), random_at(d, random_, which_, i));
    const auto bits =
        hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), hn::Set(d32, int8::kNan), sum));
    hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<std::uint16_t*>(data_) + i);
  }
  HWY_INLINE void finish() {}

 private:
  bf16* data_;
  const std::uint16_t* random_;
  int which_;
};

template <class S>
class Moment<MomentFormat::kInt8, S> {
  using Tag = hn::ScalableTag<S>;
  using Unsigned = Bits<Tag>;

 public:
  Moment(const UpdateArrays& a, int which, std::int64_t begin, const std::uint16_t* random)
      : codes_(static_cast<std::uint8_t*>(a.moment[which]) + begin),
        scale_(a.scale[which] + begin / kQuantBlock),
        random_(random),
        which_(which),
        largest_(hn::Zero(Unsigned())) {
    const bool poisoned = !(*scale_ == *scale_);
    const std::uint32_t base = std::bit_cast<std::uint32_t>(*scale_) >> int8::kShift;
    base_ = hn::Set(Unsigned(), base);
    offset_ = hn::Set(Tag(), *scale_);
    poison_ = hn::Set(Unsigned(), poisoned ? int8::kNan : 0u);
  }
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, std::int64_t i) const {
    const Unsigned d32;
    const auto code = hn::PromoteTo(d32, hn::LoadU(hn::Rebind<std::uint8_t, D>(), codes_ + i));
    if (which_ == 0) {
      const auto magnitude = hn::Add(hn::And(code, hn::Set(d32, 0x7fu)), base_);
      const auto value = hn::Sub(hn::BitCast(d, hn::ShiftLeft<int8::kShift>(magnitude)), offset_);
      const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(d32, 0x80u)));
      return hn::Xor(value, hn::BitCast(d, sign));
    }
    const auto value = hn::ShiftLeft<int8::kShift>(hn::Add(code, base_));
    const auto or_zero = hn::IfThenZeroElse(hn::Eq(code, hn::Zero(d32)), value);
    return hn::BitCast(d, hn::Or(or_zero, poison_));
  }
  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, std::int64_t i) {
    auto bits = hn::BitCast(Unsigned(), v);
    if (which_ == 0) bits = hn::And(bits, hn::Set(Unsigned(), 0x7fffffffu));
    largest_ = hn::Max(largest_, bits);
    hn::Store(v, d, values_ + i);
  }
  HWY_INLINE void finish() {
    const Tag d;
    const Unsigned d32;
    const std::uint32_t largest = hn::GetLane(hn::MaxOfLanes(d32, largest_));
    *scale_ = int8::scale_of(which_, largest);
    if (largest >= int8::kInfinity) {
      std::memset(codes_, 0, kQuantBlock);
      return;
    }
    const auto base = hn::Set(d32, int8::base_of(which_, largest));
    const auto offset = hn::Set(d, *scale_);
    for (std::int64_t i = 0; i < kQuantBlock; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      const auto value = hn::Load(d, values_ + i);
      encode(value, base, offset, i);
    }
  }

 private:
  HWY_INLINE void encode(hn::Vec<Tag> value, hn::Vec<Unsigned> base, hn::Vec<Tag> offset, std::int64_t i) {
    const Tag d;
    const Unsigned d32;
    const hn::RebindToSigned<Tag> i32;
    const hn::Rebind<std::uint8_t, Tag> d8;
    const auto bits = hn::BitCast(d32, value);
    const auto below = hn::Or(hn::ShiftLeft<4>(random_at(d, random_, which_, i)), hn::Set(d32, 8u));
    if (which_ == 0) {
      const auto shifted = hn::BitCast(d32, hn::Add(hn::Abs(value), offset));
      const auto magnitude = hn::Sub(hn::ShiftRight<int8::kShift>(hn::Add(shifted, below)), base);
      const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(d32, 0x80u));
      hn::StoreU(hn::TruncateTo(d8, hn::Or(magnitude, sign)), d8, codes_ + i);
      return;
    }
    const auto top = hn::BitCast(i32, hn::Sub(hn::ShiftRight<int8::kShift>(hn::Add(bits, below)), base));
    const auto code = hn::BitCast(d32, hn::Max(top, hn::Set(i32, 1)));
    const auto or_zero = hn::IfThenZeroElse(hn::Eq(bits, hn::Zero(d32)), code);
    hn::StoreU(hn::TruncateTo(d8, or_zero), d8, codes_ + i);
  }

  std::uint8_t* codes_;
  float* scale_;
  const std::uint16_t* random_;
  int which_;
  hn::Vec<Unsigned> largest_, base_, poison_;
  hn::Vec<Tag> offset_;
  alignas(64) S values_[kQuantBlock];
};

// A moment that the optimizer does not keep.
template <class S>
struct NoMoment {
  NoMoment(const UpdateArrays& /*a*/, int /*which*/, std::int64_t /*begin*/,
           const std::uint16_t* /*random*/) {}
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, std::int64_t /*i*/) const {
    return hn::Zero(d);
  }
  template <class D>
  HWY_INLINE void store(D /*d*/, hn::Vec<D> /*v*/, std::int64_t /*i*/) {}
  HWY_INLINE void finish() {}
};

// --------------------------------------------------------------------------------- gradient and weight

template <class T>
HWY_INLINE void widen(const T* from, float* to) {
  const hn::ScalableTag<float> d;
  for (std::int64_t i = 0; i < kQuantBlock; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    hn::Store(load_f32(d, from + i), d, to + i);
  }
}

// A block of the gradient in S: where it lies, or widened in `buffer`.
HWY_INLINE const double* gradient_block(const UpdateArrays& a, std::int64_t begin, double* /*buffer*/) {
  return static_cast<const double*>(a.grad) + begin;
}
HWY_INLINE const float* gradient_block(const UpdateArrays& a, std::int64_t begin, float* buffer) {
  if (a.grad_type == DType::kF32) return static_cast<const float*>(a.grad) + begin;
  if (a.grad_type == DType::kBF16) {
    widen(static_cast<const bf16*>(a.grad) + begin, buffer);
  } else {
    widen(static_cast<const fp16*>(a.grad) + begin, buffer);
  }
  return buffer;
}

// round_master() of each element.
HWY_INLINE void round_block(const float* master, bf16* weight) {
  const hn::ScalableTag<float> d;
  const Bits<decltype(d)> d32;
  const hn::Rebind<std::uint16_t, decltype(d)> d16;
  for (std::int64_t i = 0; i < kQuantBlock; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto bits = hn::BitCast(d32, one_nan(d, hn::LoadU(d, master + i)));
    const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d32, 0x8000u)));
    hn::StoreU(hn::TruncateTo(d16, high), d16, reinterpret_cast<std::uint16_t*>(weight) + i);
  }
}

// The weights of a block from its masters (kFull).
HWY_INLINE void weight_block(const UpdateArrays& a, std::int64_t begin, const double* master) {
  std::memcpy(static_cast<double*>(a.weight) + begin, master, kQuantBlock * sizeof(double));
}
HWY_INLINE void weight_block(const UpdateArrays& a, std::int64_t begin, const float* master) {
  if (a.weight_type == DType::kF32) {
    std::memcpy(static_cast<float*>(a.weight) + begin, master, kQuantBlock * sizeof(float));
  } else if (a.weight_type == DType::kBF16) {
    round_block(master, static_cast<bf16*>(a.weight) + begin);
  } else {
    const hn::ScalableTag<float> d;
    fp16* const weight = static_cast<fp16*>(a.weight) + begin;
    for (std::int64_t i = 0; i < kQuantBlock; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      store(d, hn::LoadU(d, master + i), weight + i);
    }
  }
}

// ------------------------------------------------------------------------------------------------ the pass

template <class Rule, MasterFormat kMaster, MomentFormat kMoments>
void update_pass(const UpdateJob<typename Rule::S>& job) {
  using S = typename Rule::S;
  using M = std::conditional_t<Rule::kMoments >= 1, Moment<kMoments, S>, NoMoment<S>>;
  using V = std::conditional_t<Rule::kMoments >= 2, Moment<kMoments, S>, NoMoment<S>>;
  const hn::ScalableTag<S> d;
  const std::int64_t step = static_cast<std::int64_t>(hn::Lanes(d));
  const UpdateArrays a = job.arrays;
  const Rule rule(d, *job.constants);
  const auto grad_scale = hn::Set(d, job.constants->grad_scale);
  alignas(64) S buffer[kQuantBlock];
  alignas(64) std::uint16_t random[kQuantBlock];
  for (std::int64_t b = 0; b < job.blocks; ++b) {
    const std::int64_t begin = b * kQuantBlock;
    if constexpr (kMoments != MomentFormat::kFull) {
      random_block(job.random, static_cast<std::uint64_t>(job.step),
                   static_cast<std::uint64_t>(job.first_block + b) * 32, random);
    }
    const S* const grad = gradient_block(a, begin, buffer);
    const Master<kMaster, S> masters(a, begin);
    M first(a, 0, begin, random);
    V second(a, 1, begin, random);
    for (std::int64_t i = 0; i < kQuantBlock; i += step) {
      auto master = masters.load(d, i);
      auto m = first.load(d, i);
      auto v = second.load(d, i);
      rule.apply(hn::Mul(hn::LoadU(d, grad + i), grad_scale), master, m, v);
      first.store(d, m, i);
      second.store(d, v, i);
      masters.store(d, master, i);
    }
    first.finish();
    second.finish();
    if constexpr (kMaster == MasterFormat::kFull) {
      weight_block(a, begin, static_cast<const S*>(a.master) + begin);
    }
  }
}

// Every way to keep the state that Rule::S allows.
template <class Rule>
UpdateKernels<typename Rule::S> update_passes() {
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

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
