// The optimizers' fused pass on the device, with the same bits as kernels/host/update.hpp: the same
// additions, products, quotients and square roots, each rounded once (this file is compiled with
// -fmad=false), and the same random bits.
//
// A warp updates a block of kQuantBlock elements. A lane has the quads that begin at elements 4 lane and
// 128 + 4 lane, so that accesses to arrays of any type are coalesced, and both quads use the same three
// random words of a moment (kernels/host/update_random.hpp).
#include <limits>
#include <type_traits>

#include "kernels/cuda/philox.hpp"
#include "kernels/cuda/quads.hpp"
#include "kernels/host/update.hpp"
#include "kernels/host/update_constants.hpp"

namespace zg::cuda {
namespace {

using host::UpdateConstants;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kQuads = 2;
constexpr int kEach = 4 * kQuads;  // elements of a lane
static_assert(kQuantBlock == 32 * kEach);
constexpr unsigned kAll = 0xffffffffu;
constexpr unsigned kInfinity = 0x7f800000u, kNan = 0x7fc00000u;

template <class S>
struct Job {
  UpdateArrays arrays;
  std::int64_t n;
  UpdateConstants<S> constants;
  uint2 key;
  std::int64_t step, first_block;  // first_block: block of the parameter at which the arrays begin
  bool aligned;                    // every array can be accessed in quads
};

__device__ __forceinline__ bool is_nan(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) > kInfinity;
}
// Makes all NaNs the same. It uses integers, because compilers do not specify the bits of their NaN.
__device__ __forceinline__ float one_nan(float x) {
  return is_nan(x) ? __uint_as_float(kNan) : x;
}
__device__ __forceinline__ double one_nan(double x) {
  const long long bits = __double_as_longlong(x), magnitude = bits & 0x7fffffffffffffffll;
  return __longlong_as_double(magnitude > 0x7ff0000000000000ll ? 0x7ff8000000000000ll : bits);
}

// ---- update rules: the formulae of kernels/host/update.hpp. g is scaled already.

__device__ __forceinline__ float root(float x) {
  return __fsqrt_rn(x);
}
__device__ __forceinline__ double root(double x) {
  return __dsqrt_rn(x);
}
__device__ __forceinline__ float with_sign(float magnitude, float sign) {
  return __uint_as_float((__float_as_uint(magnitude) & 0x7fffffffu) | (__float_as_uint(sign) & 0x80000000u));
}
__device__ __forceinline__ double with_sign(double magnitude, double sign) {
  return copysign(magnitude, sign);
}

template <class T, bool kDecoupled>
struct Adam {
  using S = T;
  static constexpr int kMoments = 2;
  static __device__ __forceinline__ void apply(const UpdateConstants<S>& c, S g, S& master, S& m, S& v) {
    if constexpr (!kDecoupled) g = g + c.l2 * master;
    m = c.beta1 * m + c.one_minus_beta1 * g;
    v = c.beta2 * v + (c.one_minus_beta2 * g) * g;
    if constexpr (kDecoupled) master = c.decay * master;
    master = master - (c.step_size * m) / (root(v) * c.inv_sqrt_correction2 + c.eps);
  }
};

enum class Momentum { kNone, kPlain, kNesterov };

template <class T, Momentum kMomentum>
struct Sgd {
  using S = T;
  static constexpr int kMoments = kMomentum == Momentum::kNone ? 0 : 1;
  static __device__ __forceinline__ void apply(const UpdateConstants<S>& c, S g, S& master, S& m, S& /*v*/) {
    g = g + c.l2 * master;
    if constexpr (kMomentum != Momentum::kNone) {
      m = c.momentum * m + c.one_minus_dampening * g;
      g = kMomentum == Momentum::kNesterov ? g + c.momentum * m : m;
    }
    master = master - c.step_size * g;
  }
};

template <class T>
struct Lion {
  using S = T;
  static constexpr int kMoments = 1;
  static __device__ __forceinline__ void apply(const UpdateConstants<S>& c, S g, S& master, S& m, S& /*v*/) {
    const S u = c.beta1 * m + c.one_minus_beta1 * g;
    m = c.beta2 * m + c.one_minus_beta2 * g;
    const S change = u > 0 || u < 0 ? with_sign(c.step_size, u) : u;
    master = c.decay * master - change;
  }
};

// ---- the arrays of one block, in memory and in the lanes of a warp

// Loads and stores this lane's elements of a block. kWhole: all elements of the block exist and are aligned.
template <bool kWhole>
struct Place {
  std::int64_t first, n;
  bool aligned;

  __device__ __forceinline__ Place(std::int64_t block, std::int64_t count, bool is_aligned)
      : first(block * kQuantBlock + 4 * (threadIdx.x % 32)), n(count), aligned(is_aligned) {}
  template <class T>
  __device__ __forceinline__ void load(const void* array, Quad<T> (&x)[kQuads]) const {
    ZG_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::int64_t i = first + 128 * q;
      x[q] = load_quad<kWhole>(static_cast<const T*>(array) + i, n - i, aligned);
    }
  }
  template <class T>
  __device__ __forceinline__ void store(void* array, const Quad<T> (&x)[kQuads]) const {
    ZG_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::int64_t i = first + 128 * q;
      store_quad<kWhole>(static_cast<T*>(array) + i, x[q], n - i, aligned);
    }
  }
};

template <bool kWhole, class S>
__device__ __forceinline__ void load_gradient(const UpdateArrays& a, const Place<kWhole>& place,
                                              S (&g)[kEach]) {
  const auto convert = [&](const auto& quads_of) {
    ZG_UNROLL
    for (int e = 0; e < kEach; ++e) g[e] = static_cast<S>(to_acc(quads_of[e / 4].at[e % 4]));
  };
  if (std::is_same_v<S, double> || a.grad_type == DType::kF32) {
    Quad<S> whole[kQuads];
    place.load(a.grad, whole);
    convert(whole);
  } else if (a.grad_type == DType::kBF16) {
    Quad<bf16> narrow[kQuads];
    place.load(a.grad, narrow);
    convert(narrow);
  } else {
    Quad<fp16> narrow[kQuads];
    place.load(a.grad, narrow);
    convert(narrow);
  }
}

// Rounds a master to bf16: to nearest, ties away from zero.
__device__ __forceinline__ bf16 rounded_up(float master) {
  bf16 weight;
  weight.bits = static_cast<std::uint16_t>((__float_as_uint(one_nan(master)) + 0x8000u) >> 16);
  return weight;
}
// Rounds a master to fp16. A NaN keeps its sign and the first bits of its payload, as in zg::fp16(float).
__device__ __forceinline__ fp16 half_of(float master) {
  const unsigned bits = __float_as_uint(master);
  fp16 weight = from_acc<fp16>(master);
  if (is_nan(master)) {
    weight.bits = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
  }
  return weight;
}

template <bool kWhole, class S>
__device__ __forceinline__ void store_weight(const UpdateArrays& a, const Place<kWhole>& place,
                                             const Quad<S> (&master)[kQuads]) {
  if (std::is_same_v<S, double> || a.weight_type == DType::kF32) {
    place.store(a.weight, master);
    return;
  }
  if constexpr (std::is_same_v<S, float>) {
    if (a.weight_type == DType::kBF16) {
      Quad<bf16> weight[kQuads];
      ZG_UNROLL
      for (int e = 0; e < kEach; ++e) weight[e / 4].at[e % 4] = rounded_up(master[e / 4].at[e % 4]);
      place.store(a.weight, weight);
    } else {
      Quad<fp16> weight[kQuads];
      ZG_UNROLL
      for (int e = 0; e < kEach; ++e) weight[e / 4].at[e % 4] = half_of(master[e / 4].at[e % 4]);
      place.store(a.weight, weight);
    }
  }
}

template <MasterFormat kFormat, class S>
struct Master;

template <class S>
struct Master<MasterFormat::kFull, S> {
  Quad<S> master[kQuads];

  template <bool kWhole>
  __device__ __forceinline__ void load(const UpdateArrays& a, const Place<kWhole>& place) {
    place.load(a.master, master);
  }
  __device__ __forceinline__ S get(int e) const { return master[e / 4].at[e % 4]; }
  __device__ __forceinline__ void set(int e, S value) { master[e / 4].at[e % 4] = one_nan(value); }
  template <bool kWhole>
  __device__ __forceinline__ void store(const UpdateArrays& a, const Place<kWhole>& place) const {
    place.store(a.master, master);
    store_weight(a, place, master);
  }
};

template <>
struct Master<MasterFormat::kSplit, float> {
  Quad<std::uint16_t> weight[kQuads], low[kQuads];

  template <bool kWhole>
  __device__ __forceinline__ void load(const UpdateArrays& a, const Place<kWhole>& place) {
    place.load(a.weight, weight);
    place.load(a.master, low);
  }
  // The weight was rounded up if the low half is 0x8000 or more.
  __device__ __forceinline__ float get(int e) const {
    const unsigned below = low[e / 4].at[e % 4];
    return __uint_as_float(((weight[e / 4].at[e % 4] - (below >> 15)) << 16) | below);
  }
  __device__ __forceinline__ void set(int e, float value) {
    const unsigned bits = __float_as_uint(one_nan(value));
    low[e / 4].at[e % 4] = static_cast<std::uint16_t>(bits);
    weight[e / 4].at[e % 4] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
  }
  template <bool kWhole>
  __device__ __forceinline__ void store(const UpdateArrays& a, const Place<kWhole>& place) const {
    place.store(a.master, low);
    place.store(a.weight, weight);
  }
};

// The random words of a lane's elements: three consecutive words of the block's ring for each moment.
struct Random {
  unsigned words[2][3];

  __device__ __forceinline__ void fill(uint2 key, std::int64_t step, std::int64_t block) {
    const unsigned lane = threadIdx.x % 32;
    const std::uint64_t counter = 16 * static_cast<std::uint64_t>(block) + lane % 16;
    const std::uint64_t t = static_cast<std::uint64_t>(step);
    const uint4 four =
        philox4x32_10(make_uint4(static_cast<unsigned>(counter), static_cast<unsigned>(counter >> 32),
                                 static_cast<unsigned>(t), static_cast<unsigned>(t >> 32)),
                      key);
    // Words 2 lane and 2 lane + 1; the second moment's words are half the ring further on.
    words[0][0] = lane < 16 ? four.x : four.z, words[0][1] = lane < 16 ? four.y : four.w;
    words[1][0] = lane < 16 ? four.z : four.x, words[1][1] = lane < 16 ? four.w : four.y;
    ZG_UNROLL
    for (int k = 0; k < 2; ++k) words[k][2] = __shfl_sync(kAll, words[k][0], static_cast<int>(lane + 1) % 32);
  }
  // Random bits in the lowest 16 bits of the result, for kInt8 in the lowest 20.
  __device__ __forceinline__ unsigned at(int moment, int e) const {
    const int word = e % 4 / 2, shift = 16 * (e % 2) + 8 * (e / 4);
    const std::uint64_t two = words[moment][word] | static_cast<std::uint64_t>(words[moment][word + 1]) << 32;
    return static_cast<unsigned>(two >> shift);
  }
};

// The first or second moment of a block: load, get the old value, set the new one, store.
template <int kMoment, MomentFormat kFormat, class S>
struct Moment;

// A moment that is stored element by element, as a T.
template <int kMoment, class T>
struct StoredMoment {
  Quad<T> moment[kQuads];

  template <bool kWhole>
  __device__ __forceinline__ void load(const UpdateArrays& a, const Place<kWhole>& place,
                                       std::int64_t /*b*/) {
    place.load(a.moment[kMoment], moment);
  }
  template <bool kWhole>
  __device__ __forceinline__ void store(const UpdateArrays& a, const Place<kWhole>& place, std::int64_t /*b*/,
                                        const Random& /*random*/) const {
    place.store(a.moment[kMoment], moment);
  }
};

template <int kMoment, class S>
struct Moment<kMoment, MomentFormat::kFull, S> : StoredMoment<kMoment, S> {
  __device__ __forceinline__ S get(int e) const { return this->moment[e / 4].at[e % 4]; }
  __device__ __forceinline__ void set(int e, S value, const Random& /*random*/) {
    this->moment[e / 4].at[e % 4] = value;
  }
};

template <int kMoment>
struct Moment<kMoment, MomentFormat::kBf16, float> : StoredMoment<kMoment, bf16> {
  __device__ __forceinline__ float get(int e) const { return to_acc(this->moment[e / 4].at[e % 4]); }
  __device__ __forceinline__ void set(int e, float value, const Random& random) {
    const unsigned sum = __float_as_uint(value) + (random.at(kMoment, e) & 0xffffu);
    this->moment[e / 4].at[e % 4].bits = static_cast<std::uint16_t>((is_nan(value) ? kNan : sum) >> 16);
  }
};

// The codes of kernels/host/update_int8.hpp.
template <int kMoment>
struct Moment<kMoment, MomentFormat::kInt8, float> {
  static constexpr int kShift = 20;
  Quad<std::uint8_t> codes[kQuads];
  float scale;
  float values[kEach];

  template <bool kWhole>
  __device__ __forceinline__ void load(const UpdateArrays& a, const Place<kWhole>& place, std::int64_t b) {
    place.load(a.moment[kMoment], codes);
    scale = a.scale[kMoment][b];
  }
  __device__ __forceinline__ float get(int e) const {
    if (is_nan(scale)) return scale;
    const unsigned base = __float_as_uint(scale) >> kShift, code = codes[e / 4].at[e % 4];
    if constexpr (kMoment == 0) {
      const float magnitude = __uint_as_float((base + (code & 0x7fu)) << kShift) - scale;
      return (code & 0x80u) != 0 && magnitude > 0 ? -magnitude : magnitude;
    } else {
      return code == 0 ? 0.0f : __uint_as_float((base + code) << kShift);
    }
  }
  __device__ __forceinline__ void set(int e, float value, const Random& /*random*/) { values[e] = value; }
  template <bool kWhole>
  __device__ __forceinline__ void store(const UpdateArrays& a, const Place<kWhole>& place, std::int64_t b,
                                        const Random& random) {
    unsigned largest = 0;  // as integers: a NaN is the largest of all
    ZG_UNROLL
    for (int e = 0; e < kEach; ++e) {
      const unsigned bits = __float_as_uint(values[e]), size = kMoment == 0 ? bits & 0x7fffffffu : bits;
      largest = largest < size ? size : largest;
    }
    largest = warp_max(largest);
    const int above = static_cast<int>(largest >> kShift) + (kMoment == 0 ? 2 - 127 : 1 - 255);
    const unsigned base = above < 0 ? 0 : static_cast<unsigned>(above);
    const bool lost = largest >= kInfinity;
    scale = __uint_as_float(lost ? kNan : base << kShift);
    ZG_UNROLL
    for (int e = 0; e < kEach; ++e) {
      const unsigned code = encode(values[e], base, random.at(kMoment, e) & ((1u << kShift) - 1));
      codes[e / 4].at[e % 4] = static_cast<std::uint8_t>(lost ? 0 : code);
    }
    place.store(a.moment[kMoment], codes);
    if (threadIdx.x % 32 == 0) a.scale[kMoment][b] = scale;
  }

 private:
  __device__ __forceinline__ unsigned encode(float value, unsigned base, unsigned random) const {
    const unsigned bits = __float_as_uint(value);
    if constexpr (kMoment == 0) {
      const unsigned shifted = __float_as_uint(__uint_as_float(bits & 0x7fffffffu) + scale);
      return (bits >> 24 & 0x80u) | (((shifted + random) >> kShift) - base);
    } else {
      const int code = static_cast<int>((bits + random) >> kShift) - static_cast<int>(base);
      return bits >> 16 == 0 ? 0 : code < 1 ? 1 : static_cast<unsigned>(code);
    }
  }
};

// A moment that the optimizer does not keep.
template <class S>
struct NoMoment {
  template <bool kWhole>
  __device__ __forceinline__ void load(const UpdateArrays&, const Place<kWhole>&, std::int64_t) {}
  __device__ __forceinline__ S get(int /*e*/) const { return 0; }
  __device__ __forceinline__ void set(int /*e*/, S /*value*/, const Random& /*random*/) {}
  template <bool kWhole>
  __device__ __forceinline__ void store(const UpdateArrays&, const Place<kWhole>&, std::int64_t,
                                        const Random&) {}
};

template <bool kWhole, class Rule, MasterFormat kMaster, MomentFormat kMoments>
__device__ __forceinline__ void update_block(const Job<typename Rule::S>& job, std::int64_t b) {
  using S = typename Rule::S;
  const Place<kWhole> place(b, job.n, job.aligned);
  std::conditional_t<Rule::kMoments >= 1, Moment<0, kMoments, S>, NoMoment<S>> first;
  std::conditional_t<Rule::kMoments >= 2, Moment<1, kMoments, S>, NoMoment<S>> second;
  Master<kMaster, S> masters;
  masters.load(job.arrays, place);
  first.load(job.arrays, place, b);
  second.load(job.arrays, place, b);
  S g[kEach];
  load_gradient(job.arrays, place, g);
  Random random;
  if constexpr (kMoments != MomentFormat::kFull) random.fill(job.key, job.step, job.first_block + b);
  ZG_UNROLL
  for (int e = 0; e < kEach; ++e) {
    S master = masters.get(e), m = first.get(e), v = second.get(e);
    Rule::apply(job.constants, g[e] * job.constants.grad_scale, master, m, v);
    first.set(e, m, random);
    second.set(e, v, random);
    masters.set(e, master);
  }
  first.store(job.arrays, place, b, random);
  second.store(job.arrays, place, b, random);
  masters.store(job.arrays, place);
}

// The number of blocks that should be resident on a multiprocessor.
template <class S>
constexpr int kAtOnce = sizeof(S) == 4 ? 4 : 2;

template <class Rule, MasterFormat kMaster, MomentFormat kMoments>
__global__ void __launch_bounds__(kThreads, kAtOnce<typename Rule::S>)
    update_blocks(Job<typename Rule::S> job) {
  const std::int64_t b = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, rest = job.n - b * kQuantBlock;
  if (rest <= 0) return;
  if (job.aligned && rest >= kQuantBlock) {
    update_block<true, Rule, kMaster, kMoments>(job, b);
  } else {
    update_block<false, Rule, kMaster, kMoments>(job, b);
  }
}

// A skipped step: rewrites weights from their masters.
template <class S>
__global__ void __launch_bounds__(kThreads) copy_weights(UpdateArrays arrays, std::int64_t n, bool aligned) {
  const std::int64_t b = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const Place<false> place(b, n, aligned);
  Quad<S> master[kQuads];
  place.load(arrays.master, master);
  store_weight(arrays, place, master);
}

Shape warps_of_blocks(std::int64_t n) {
  constexpr std::int64_t kElements = kWarps * kQuantBlock;
  return {dim3(static_cast<unsigned>((n + kElements - 1) / kElements)), dim3(kThreads)};
}

// ---- the choice of the kernel

template <class S>
using Kernel = void (*)(Job<S>);

template <class Rule>
Kernel<typename Rule::S> kernel_of(MasterFormat master, MomentFormat moments) {
  constexpr auto kFull = MasterFormat::kFull, kSplit = MasterFormat::kSplit;
  if constexpr (std::is_same_v<typename Rule::S, double>) {
    return update_blocks<Rule, kFull, MomentFormat::kFull>;
  } else {
    const bool full = master == kFull;
    if constexpr (Rule::kMoments > 0) {
      if (moments == MomentFormat::kBf16) {
        return full ? update_blocks<Rule, kFull, MomentFormat::kBf16>
                    : update_blocks<Rule, kSplit, MomentFormat::kBf16>;
      }
      if (moments == MomentFormat::kInt8) {
        return full ? update_blocks<Rule, kFull, MomentFormat::kInt8>
                    : update_blocks<Rule, kSplit, MomentFormat::kInt8>;
      }
    }
    return full ? update_blocks<Rule, kFull, MomentFormat::kFull>
                : update_blocks<Rule, kSplit, MomentFormat::kFull>;
  }
}

template <class S>
Kernel<S> kernel_of(const StateFormat& f, const UpdateParams& p) {
  switch (f.kind) {
    case OptimizerKind::kAdam:
      return p.decoupled ? kernel_of<Adam<S, true>>(f.master, f.moments)
                         : kernel_of<Adam<S, false>>(f.master, f.moments);
    case OptimizerKind::kLion:
      return kernel_of<Lion<S>>(f.master, f.moments);
    case OptimizerKind::kSgd:
      break;
  }
  if (f.moment_count == 0) return kernel_of<Sgd<S, Momentum::kNone>>(f.master, f.moments);
  return p.nesterov ? kernel_of<Sgd<S, Momentum::kNesterov>>(f.master, f.moments)
                    : kernel_of<Sgd<S, Momentum::kPlain>>(f.master, f.moments);
}

// Whether an array of this type can be accessed in quads.
bool aligned(const void* array, DType type) {
  const std::size_t quad = 4 * size_of(type);
  return reinterpret_cast<std::uintptr_t>(array) % (quad < 16 ? quad : 16) == 0;
}

template <class S>
void run(const Launch& on, std::int64_t n, const UpdateArrays& a, const StateFormat& f,
         const UpdateParams& p) {
  const bool split = f.master == MasterFormat::kSplit;
  bool all = aligned(a.weight, a.weight_type) && aligned(a.master, stored_master_type(f));
  if (p.skip) {
    if (!split) launch("update", copy_weights<S>, on, warps_of_blocks(n), a, n, all);
    return;
  }
  all = all && aligned(a.grad, a.grad_type);
  for (int k = 0; k < f.moment_count; ++k) all = all && aligned(a.moment[k], stored_moment_type(f));
  const Job<S> job{a,
                   n,
                   UpdateConstants<S>(f.kind, p),
                   make_uint2(p.random.key[0], p.random.key[1]),
                   p.step,
                   p.first_element / kQuantBlock,
                   all};
  launch("update", kernel_of<S>(f, p), on, warps_of_blocks(n), job);
}

}  // namespace

void update(const Launch& on, std::int64_t n, const UpdateArrays& arrays, const StateFormat& format,
            const UpdateParams& p) {
  host::check_update(arrays, format, p);
  if (format.full == DType::kF64) {
    run<double>(on, n, arrays, format, p);
  } else {
    run<float>(on, n, arrays, format, p);
  }
}

}  // namespace zg::cuda
