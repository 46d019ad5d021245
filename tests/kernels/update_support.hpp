// For the tests of update(): states of any format in raw bytes with guards around them, and update.hpp's
// formulae one element at a time. (The tests are compiled without contraction, too.)
#pragma once
#include <algorithm>
#include <array>
#include <string>

#include "kernels/host/update.hpp"
#include "kernels/host/update_constants.hpp"
#include "kernels/host/update_int8.hpp"
#include "kernels/host/update_random.hpp"
#include "tests/kernels/support.hpp"

namespace zg::test {

// What is updated how: one of each optimizer's variants, with its format and types.
struct Case {
  const char* name = "";
  StateFormat format;
  DType grad = DType::kF32, weight = DType::kF32;
  UpdateParams params;
};

inline std::string describe(const Case& c) {
  const char* moments[] = {"full", "bf16", "int8"};
  return std::string(c.name) + ", master " + (c.format.master == MasterFormat::kFull ? "full" : "split") +
         ", moments " + moments[static_cast<int>(c.format.moments)] + ", gradient " + name_of(c.grad) +
         ", weight " + name_of(c.weight);
}
// The same as a part of a test's name.
inline std::string test_name(const testing::TestParamInfo<Case>& info) {
  std::string name;
  for (const char ch : describe(info.param)) {
    if (std::isalnum(static_cast<unsigned char>(ch))) name += ch;
  }
  return name;
}

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << describe(c);
}

// Every optimizer with its variants, kept whole in fp32.
inline std::vector<Case> optimizers() {
  const UpdateParams p{.lr = 3e-3,
                       .beta1 = 0.9,
                       .beta2 = 0.95,
                       .eps = 1e-8,
                       .weight_decay = 0.1,
                       .step = 3,
                       .grad_scale = 0.37,
                       .random = {{0x12345678u, 0x9abcdef0u}},
                       .first_element = 256 * 5};
  Case adamw{"AdamW", {.kind = OptimizerKind::kAdam, .moment_count = 2}, DType::kF32, DType::kF32, p};
  Case adam = adamw, sgd = adamw, lion = adamw;
  adam.name = "Adam", adam.params.decoupled = false, adam.params.bias_correction = false;
  lion.name = "Lion", lion.format.kind = OptimizerKind::kLion, lion.format.moment_count = 1;
  sgd.name = "SGD", sgd.format.kind = OptimizerKind::kSgd, sgd.format.moment_count = 0;
  Case momentum = sgd;
  momentum.name = "SGD with momentum", momentum.format.moment_count = 1;
  momentum.params.momentum = 0.9, momentum.params.dampening = 0.2;
  Case nesterov = momentum;
  nesterov.name = "SGD with Nesterov's momentum", nesterov.params.nesterov = true;
  nesterov.params.dampening = 0;
  return {adamw, adam, sgd, momentum, nesterov, lion};
}

// Every optimizer in every format and with all types that go with it.
inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (Case c : optimizers()) {
    for (const MasterFormat master : {MasterFormat::kFull, MasterFormat::kSplit}) {
      for (const MomentFormat moments : {MomentFormat::kFull, MomentFormat::kBf16, MomentFormat::kInt8}) {
        if (c.format.moment_count == 0 && moments != MomentFormat::kFull) continue;
        for (const DType grad : {DType::kF32, DType::kBF16, DType::kF16}) {
          for (const DType weight : {DType::kF32, DType::kBF16, DType::kF16}) {
            if (master == MasterFormat::kSplit && weight != DType::kBF16) continue;
            c.format.master = master, c.format.moments = moments, c.grad = grad, c.weight = weight;
            cases.push_back(c);
          }
        }
      }
    }
    c.format.master = MasterFormat::kFull, c.format.moments = MomentFormat::kFull;
    c.format.full = c.grad = c.weight = DType::kF64;
    cases.push_back(c);
  }
  return cases;
}

// `size` bytes per element of memory at any offset from alignment, with guards of some bytes on both sides.
class Guarded {
 public:
  Guarded() = default;
  Guarded(std::size_t count, std::size_t size, std::size_t offset)
      : begin_(kGuard + offset * size), bytes_(2 * kGuard + (offset + count) * size, std::byte{0xa5}) {
    std::fill_n(bytes_.begin() + static_cast<std::ptrdiff_t>(begin_), count * size, std::byte{0});
  }
  void* data() { return bytes_.data() + begin_; }
  std::vector<std::byte>& bytes() { return bytes_; }  // guards included
  template <class T>
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + begin_ + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void set(std::size_t i, T value) {
    std::memcpy(bytes_.data() + begin_ + i * sizeof(T), &value, sizeof(T));
  }
  bool operator==(const Guarded& other) const = default;

 private:
  static constexpr std::size_t kGuard = 192;
  std::size_t begin_ = 0;
  std::vector<std::byte> bytes_;
};

inline std::size_t bytes_of_moment(const StateFormat& format) {
  if (format.moments == MomentFormat::kFull) return size_of(format.full);
  return format.moments == MomentFormat::kBf16 ? 2 : 1;
}

// n elements of a case: their arrays, and the numbers in them.
class State {
 public:
  State(const Case& c, std::size_t n, std::size_t offset = 0) : case_(c), n_(n) {
    const std::size_t whole = size_of(c.format.full), moment = bytes_of_moment(c.format);
    grad_ = Guarded(n, size_of(c.grad), offset);
    weight_ = Guarded(n, size_of(c.weight), offset);
    master_ = Guarded(n, split() ? 2 : whole, offset);
    for (std::size_t k = 0; k < moments(); ++k) {
      moment_[k] = Guarded(n, moment, offset);
      if (c.format.moments == MomentFormat::kInt8) {
        scale_[k] = Guarded((n + 255) / 256, sizeof(float), offset);
      }
    }
  }

  std::size_t n() const { return n_; }
  std::size_t moments() const { return static_cast<std::size_t>(case_.format.moment_count); }
  bool split() const { return case_.format.master == MasterFormat::kSplit; }

  // From element `begin`, a multiple of 256.
  host::UpdateArrays arrays(std::size_t begin = 0) {
    const auto at = [&](Guarded& g, std::size_t bytes) { return static_cast<char*>(g.data()) + bytes; };
    host::UpdateArrays a{.grad = at(grad_, begin * size_of(case_.grad)),
                         .grad_type = case_.grad,
                         .weight = at(weight_, begin * size_of(case_.weight)),
                         .weight_type = case_.weight,
                         .master = at(master_, begin * (split() ? 2 : size_of(case_.format.full)))};
    for (std::size_t k = 0; k < moments(); ++k) {
      const bool full = case_.format.moments == MomentFormat::kFull,
                 byte = case_.format.moments == MomentFormat::kInt8;
      a.moment[k] = at(moment_[k], begin * (full ? size_of(case_.format.full) : byte ? 1 : 2));
      if (byte) a.scale[k] = reinterpret_cast<float*>(at(scale_[k], begin / 256 * sizeof(float)));
    }
    return a;
  }
  void update(const UpdateParams& p) {
    host::update(static_cast<std::int64_t>(n_), arrays(), case_.format, p);
  }
  // All memory that arrays() points into; and bytes of an element of each.
  std::vector<Guarded*> memory() {
    return {&grad_, &weight_, &master_, &moment_[0], &moment_[1], &scale_[0], &scale_[1]};
  }
  std::vector<std::size_t> element_bytes() const {
    const std::size_t whole = size_of(case_.format.full), moment = bytes_of_moment(case_.format);
    return {size_of(case_.grad), size_of(case_.weight), split() ? 2 : whole, moment, moment, 4, 4};
  }

  template <class S>
  S grad(std::size_t i) const {
    switch (case_.grad) {
      case DType::kF64:
        return static_cast<S>(grad_.get<double>(i));
      case DType::kF32:
        return static_cast<S>(grad_.get<float>(i));
      case DType::kBF16:
        return static_cast<S>(static_cast<float>(grad_.get<bf16>(i)));
      default:
        return static_cast<S>(static_cast<float>(grad_.get<fp16>(i)));
    }
  }
  void set_grad(std::size_t i, double value) {
    switch (case_.grad) {
      case DType::kF64:
        return grad_.set(i, value);
      case DType::kF32:
        return grad_.set(i, static_cast<float>(value));
      case DType::kBF16:
        return grad_.set(i, bf16(static_cast<float>(value)));
      default:
        return grad_.set(i, fp16(static_cast<float>(value)));
    }
  }
  template <class S>
  S master(std::size_t i) const {
    if (!split())
      return case_.format.full == DType::kF64 ? static_cast<S>(master_.get<double>(i))
                                              : static_cast<S>(master_.get<float>(i));
    const std::uint32_t low = master_.get<std::uint16_t>(i);
    const std::uint32_t high = weight_.get<bf16>(i).bits - (low >= 0x8000u ? 1u : 0u);
    return static_cast<S>(std::bit_cast<float>(high << 16 | low));
  }
  // And the weight with it.
  void set_master(std::size_t i, float value) {
    if (value != value) value = std::numeric_limits<float>::quiet_NaN();
    if (split()) {
      master_.set(i, static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value)));
    } else {
      master_.set(i, value);
    }
    set_weight(i, value);
  }
  void set_master(std::size_t i, double value) {
    if (case_.format.full != DType::kF64) return set_master(i, static_cast<float>(value));
    master_.set(i, value), weight_.set(i, value);
  }
  void set_weight(std::size_t i, float value) {
    if (case_.weight == DType::kF32) weight_.set(i, value);
    if (case_.weight == DType::kBF16) weight_.set(i, round_master(value));
    if (case_.weight == DType::kF16) weight_.set(i, fp16(value));
  }
  double weight(std::size_t i) const {
    if (case_.weight == DType::kF64) return weight_.get<double>(i);
    if (case_.weight == DType::kF32) return static_cast<double>(weight_.get<float>(i));
    if (case_.weight == DType::kBF16) return static_cast<double>(static_cast<float>(weight_.get<bf16>(i)));
    return static_cast<double>(static_cast<float>(weight_.get<fp16>(i)));
  }
  template <class S>
  S moment(std::size_t k, std::size_t i) const {
    switch (case_.format.moments) {
      case MomentFormat::kFull:
        return case_.format.full == DType::kF64 ? static_cast<S>(moment_[k].get<double>(i))
                                                : static_cast<S>(moment_[k].get<float>(i));
      case MomentFormat::kBf16:
        return static_cast<S>(static_cast<float>(moment_[k].get<bf16>(i)));
      default:
        return static_cast<S>(host::int8::decode(static_cast<int>(k), moment_[k].get<std::uint8_t>(i),
                                                 scale_[k].get<float>(i / 256)));
    }
  }
  // All of a moment, encoded as the step of p would encode it.
  template <class S>
  void set_moment(std::size_t k, const std::vector<S>& values, const UpdateParams& p) {
    for (std::size_t i = 0; i < n_; ++i) {
      if (case_.format.full == DType::kF64) moment_[k].set(i, static_cast<double>(values[i]));
      if (case_.format.full == DType::kF64) continue;
      const float value = static_cast<float>(values[i]);
      const std::uint32_t random = host::update_random(
          p.random, p.step, p.first_element + static_cast<std::int64_t>(i), static_cast<int>(k));
      if (case_.format.moments == MomentFormat::kFull) moment_[k].set(i, value);
      if (case_.format.moments == MomentFormat::kBf16)
        moment_[k].set(i, host::round_stochastically(value, random));
      if (case_.format.moments != MomentFormat::kInt8) continue;
      if (i % 256 == 0) {
        std::uint32_t largest = 0;
        for (std::size_t j = i; j < std::min(n_, i + 256); ++j) {
          largest =
              std::max(largest, std::bit_cast<std::uint32_t>(static_cast<float>(values[j])) & 0x7fffffffu);
        }
        scale_[k].set(i / 256, host::int8::scale_of(static_cast<int>(k), largest));
      }
      moment_[k].set(i,
                     host::int8::encode(static_cast<int>(k), value, scale_[k].get<float>(i / 256), random));
    }
  }
  std::uint16_t weight_bits(std::size_t i) const { return weight_.get<std::uint16_t>(i); }  // of 16
  void make_moment_nans_one() {
    if (case_.format.moments != MomentFormat::kFull || case_.format.full == DType::kF64) return;
    for (std::size_t k = 0; k < moments(); ++k) {
      for (std::size_t i = 0; i < n_; ++i) {
        const float m = moment_[k].get<float>(i);
        if (m != m) moment_[k].set(i, std::numeric_limits<float>::quiet_NaN());
      }
    }
  }
  void spoil_weight(std::size_t i) {
    if (case_.weight == DType::kF64) return weight_.set(i, 1234.0);
    set_weight(i, 1234.0f);
  }

  bool operator==(const State& other) const {
    return grad_ == other.grad_ && weight_ == other.weight_ && master_ == other.master_ &&
           moment_ == other.moment_ && scale_ == other.scale_;
  }

  // Numbers from subnormal to large, with zeros; with `special`, infinities and NaN among them.
  void fill(std::uint64_t test_case, const UpdateParams& p, bool special = false) {
    auto random = generator(test_case);
    std::normal_distribution<double> normal;
    std::uniform_int_distribution<int> exponent(-60, 3);
    std::vector<double> moment[2] = {std::vector<double>(n_), std::vector<double>(n_)};
    for (std::size_t i = 0; i < n_; ++i) {
      const int kind = static_cast<int>(random() % 16);
      const double size = kind < 4 ? std::ldexp(1.0, exponent(random)) : 1.0;
      set_grad(i, kind == 0 ? 0.0 : normal(random) * size);
      set_master(i, normal(random) * size);
      moment[0][i] = kind == 1 ? 0.0 : 0.1 * normal(random) * size;
      moment[1][i] = kind == 2 ? 0.0 : std::pow(normal(random) * size, 2);
      if (!special) continue;
      const double infinity = std::numeric_limits<double>::infinity();
      const std::uint64_t which = random() % 64;
      if (which == 0) set_grad(i, infinity);
      if (which == 1) set_grad(i, -infinity);
      if (which == 2) set_grad(i, std::numeric_limits<double>::quiet_NaN());
      if (which == 3) set_master(i, infinity);
      if (which == 4) set_master(i, std::numeric_limits<double>::quiet_NaN());
      if (which == 5) set_master(i, -static_cast<double>(std::numeric_limits<float>::max()));
      if (which == 6) moment[0][i] = infinity;
      if (which == 7) moment[1][i] = infinity;
    }
    for (std::size_t k = 0; k < moments(); ++k) set_moment(k, moment[k], p);
  }

 private:
  Case case_;
  std::size_t n_;
  Guarded grad_, weight_, master_;
  std::array<Guarded, 2> moment_, scale_;
};

// update.hpp, one element at a time, in S.
template <class S>
void reference_in(State& s, const Case& c, const UpdateParams& p) {
  if (p.skip) return;
  const host::UpdateConstants<S> k(c.format.kind, p);
  std::vector<S> m(s.n()), v(s.n());
  for (std::size_t i = 0; i < s.n(); ++i) {
    if (s.moments() > 0) m[i] = s.moment<S>(0, i);
    if (s.moments() > 1) v[i] = s.moment<S>(1, i);
    S master = s.master<S>(i);
    S g = s.grad<S>(i) * k.grad_scale;
    switch (c.format.kind) {
      case OptimizerKind::kAdam:
        if (!p.decoupled) g = g + k.l2 * master;
        m[i] = k.beta1 * m[i] + k.one_minus_beta1 * g;
        v[i] = k.beta2 * v[i] + (k.one_minus_beta2 * g) * g;
        if (p.decoupled) master = k.decay * master;
        master = master - (k.step_size * m[i]) / (std::sqrt(v[i]) * k.inv_sqrt_correction2 + k.eps);
        break;
      case OptimizerKind::kSgd:
        g = g + k.l2 * master;
        if (s.moments() > 0) {
          m[i] = k.momentum * m[i] + k.one_minus_dampening * g;
          g = p.nesterov ? g + k.momentum * m[i] : m[i];
        }
        master = master - k.step_size * g;
        break;
      case OptimizerKind::kLion: {
        const S u = k.beta1 * m[i] + k.one_minus_beta1 * g;
        m[i] = k.beta2 * m[i] + k.one_minus_beta2 * g;
        master = k.decay * master - (u > 0 ? k.step_size : u < 0 ? -k.step_size : u);
        break;
      }
    }
    if (master != master) master = std::numeric_limits<S>::quiet_NaN();
    s.set_master(i, master);
  }
  if (s.moments() > 0) s.set_moment(0, m, p);
  if (s.moments() > 1) s.set_moment(1, v, p);
}

inline void reference(State& s, const Case& c, const UpdateParams& p) {
  if (c.format.full == DType::kF64) {
    reference_in<double>(s, c, p);
  } else {
    reference_in<float>(s, c, p);
  }
}

}  // namespace zg::test
