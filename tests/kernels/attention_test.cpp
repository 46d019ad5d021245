// Attention and rotary embedding against plain double references, and against finite differences.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/host/matrix.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg {
namespace {

constexpr std::uint64_t kSeed = 20250117;

template <class T>
double wide(T x) {
  if constexpr (std::is_same_v<T, double>)
    return x;
  else
    return static_cast<double>(static_cast<float>(x));
}

template <class T>
T narrow(double x) {
  if constexpr (std::is_same_v<T, double>)
    return x;
  else
    return T(static_cast<float>(x));
}

// Half an ulp of the stored type, relative.
template <class T>
constexpr double kRoundoff = std::is_same_v<T, bf16>    ? 0x1p-8
                             : std::is_same_v<T, fp16>  ? 0x1p-11
                             : std::is_same_v<T, float> ? 0x1p-24
                                                        : 0x1p-53;
// ... absolute, of what is subnormal there (ample for all but fp16).
template <class T>
constexpr double kLeast = std::is_same_v<T, fp16> ? 0x1p-25 : 1e-37;
// ... of the type that is computed in.
template <class T>
constexpr double kArithmetic = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;

constexpr std::int64_t kGap = 5;  // columns between rows that nobody may touch

// Rows of `cols` numbers with a gap of NaNs after each.
template <class T>
struct Matrix {
  Matrix(std::int64_t r, std::int64_t c)
      : rows(r), cols(c), ld(c + kGap), data(static_cast<std::size_t>(r * ld), narrow<T>(std::nan(""))) {}
  T& at(std::int64_t r, std::int64_t c) { return data[static_cast<std::size_t>(r * ld + c)]; }
  double get(std::int64_t r, std::int64_t c) const {
    return wide(data[static_cast<std::size_t>(r * ld + c)]);
  }
  void fill(const char* name, double spread) {
    const NamedRandom random(kSeed, name);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        at(r, c) =
            narrow<T>(spread * static_cast<double>(random.normal(static_cast<std::uint64_t>(r * cols + c))));
      }
    }
  }
  bool gaps_untouched() const {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = cols; c < ld; ++c) {
        if (!std::isnan(get(r, c))) return false;
      }
    }
    return true;
  }
  std::int64_t rows, cols, ld;
  std::vector<T> data;
};

// Everything of one call, in T or (the reference) in double.
template <class T>
struct Problem {
  explicit Problem(const AttentionShape& s)
      : shape(s),
        qkv(s.batch * s.time, (s.heads + 2 * s.kv_heads) * s.head_size),
        o(s.batch * s.time, s.heads * s.head_size),
        d_o(o.rows, o.cols),
        dqkv(qkv.rows, qkv.cols),
        lse(static_cast<std::size_t>(s.batch * s.heads * s.time)) {
    qkv.fill("qkv", 1.5);
    d_o.fill("d_o", 1.0);
  }
  void forward() { host::attention<T>(shape, qkv.data.data(), qkv.ld, o.data.data(), o.ld, lse.data()); }
  void backward() {
    host::attention_backward<T>(shape, qkv.data.data(), qkv.ld, o.data.data(), o.ld, lse.data(),
                                d_o.data.data(), d_o.ld, dqkv.data.data(), dqkv.ld);
  }
  AttentionShape shape;
  Matrix<T> qkv, o, d_o, dqkv;
  std::vector<host::Acc<T>> lse;
};

// The reference: full softmax in double of the same stored inputs, with the sums of magnitudes that bound the
// errors.
struct Reference {
  template <class T>
  explicit Reference(const Problem<T>& x)
      : shape(x.shape),
        o(x.o.rows, x.o.cols),
        o_size(o),
        dqkv(x.dqkv.rows, x.dqkv.cols),
        dqkv_size(dqkv),
        lse(x.lse.size()) {
    for (auto* m : {&o, &o_size, &dqkv, &dqkv_size}) std::fill(m->data.begin(), m->data.end(), 0.0);
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t h = 0; h < shape.heads; ++h) {
        for (std::int64_t i = 0; i < shape.time; ++i) row(x, b, h, i);
      }
    }
  }

  template <class T>
  void row(const Problem<T>& x, std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::int64_t size = shape.head_size, kv = h / (shape.heads / shape.kv_heads),
                       first = b * shape.time;
    const std::int64_t q_at = h * size, k_at = (shape.heads + kv) * size, v_at = k_at + shape.kv_heads * size;
    const double scale = 1 / std::sqrt(static_cast<double>(size));
    std::vector<double> p(static_cast<std::size_t>(i + 1)), dp(p), p_error(p);
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t j = 0; j <= i; ++j) {
      double s = 0, magnitude = 0;
      for (std::int64_t c = 0; c < size; ++c) {
        const double product = x.qkv.get(first + i, q_at + c) * x.qkv.get(first + j, k_at + c);
        s += product;
        magnitude += std::abs(product);
      }
      p[j] = s * scale;
      // Roundings of a score: one for each of `size` additions, and a few; and a few of the exponential of
      // this size.
      p_error[j] = (static_cast<double>(size) + 4) * magnitude * scale + 4 * std::abs(p[j]);
      max = std::max(max, p[j]);
    }
    for (double& s : p) sum += s = std::exp(s - max);
    for (double& s : p) s /= sum;
    const double lse_here = max + std::log(sum);
    lse[static_cast<std::size_t>((b * shape.heads + h) * shape.time + i)] = lse_here;
    // Relative error of probabilities in units of the arithmetic's roundoff: of the score, the maximum (or
    // the stored lse), the exponential, and of a sum over i + 1 keys; the same for all keys, at worst.
    double rel = 0;
    for (double e : p_error) rel = std::max(rel, e);
    rel = 2 * rel + 4 * std::abs(lse_here) + 8 + static_cast<double>(i + 1);
    worst_rel = std::max(worst_rel, rel);
    double delta = 0, delta_size = 0;
    for (std::int64_t j = 0; j <= i; ++j) {
      double magnitude = 0;
      for (std::int64_t c = 0; c < size; ++c) {
        const double v = x.qkv.get(first + j, v_at + c), g = x.d_o.get(first + i, q_at + c);
        o.at(first + i, q_at + c) += p[j] * v;
        o_size.at(first + i, q_at + c) += p[j] * std::abs(v);
        dp[j] += g * v;
        magnitude += std::abs(g * v);
      }
      delta += p[j] * dp[j];
      delta_size += p[j] * magnitude;
      p_error[j] = magnitude;
    }
    for (std::int64_t j = 0; j <= i; ++j) {
      const double ds = p[j] * (dp[j] - delta) * scale, ds_size = p[j] * (p_error[j] + delta_size) * scale;
      for (std::int64_t c = 0; c < size; ++c) {
        const double q = x.qkv.get(first + i, q_at + c), k = x.qkv.get(first + j, k_at + c);
        const double g = x.d_o.get(first + i, q_at + c);
        dqkv.at(first + i, q_at + c) += ds * k;
        dqkv_size.at(first + i, q_at + c) += ds_size * std::abs(k);
        dqkv.at(first + j, k_at + c) += ds * q;
        dqkv_size.at(first + j, k_at + c) += ds_size * std::abs(q);
        dqkv.at(first + j, v_at + c) += p[j] * g;
        dqkv_size.at(first + j, v_at + c) += p[j] * std::abs(g);
      }
    }
  }

  AttentionShape shape;
  Matrix<double> o, o_size, dqkv, dqkv_size;
  std::vector<double> lse;
  double worst_rel = 0;  // of the probabilities, in roundoffs
};

// |got - want| <= relative * (sum of magnitudes of the terms) + rounding of the stored result.
template <class T>
void expect_near(const Matrix<T>& got, const Matrix<double>& want, const Matrix<double>& size,
                 double relative, const std::string& what) {
  std::int64_t bad = 0;
  for (std::int64_t r = 0; r < want.rows; ++r) {
    for (std::int64_t c = 0; c < want.cols; ++c) {
      const double tolerance =
          relative * size.get(r, c) + kRoundoff<T> * std::abs(want.get(r, c)) * 1.01 + kLeast<T>;
      const double error = std::abs(got.get(r, c) - want.get(r, c));
      if (!(error <= tolerance) && ++bad <= 3) {
        ADD_FAILURE() << what << " [" << r << ", " << c << "]: " << got.get(r, c) << ", expected "
                      << want.get(r, c) << ", tolerance " << tolerance;
      }
    }
  }
  EXPECT_EQ(bad, 0) << what;
}

template <class T>
void compare_with_reference(const AttentionShape& shape) {
  SCOPED_TRACE("B=" + std::to_string(shape.batch) + " T=" + std::to_string(shape.time) +
               " H=" + std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) +
               " d=" + std::to_string(shape.head_size) + " seed=" + std::to_string(kSeed));
  Problem<T> x(shape);
  x.forward();
  x.backward();
  const Reference want(x);
  // Every product is summed over at most time or head_size terms; a group of query heads adds to the same dk,
  // dv.
  const double terms = static_cast<double>(shape.time * (shape.heads / shape.kv_heads) + 2 * shape.head_size);
  const double relative = kArithmetic<T> * (want.worst_rel + terms);
  expect_near(x.o, want.o, want.o_size, relative, "o");
  for (std::size_t i = 0; i < x.lse.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(x.lse[i]), want.lse[i], kArithmetic<T> * want.worst_rel) << "lse " << i;
  }
  // delta is made of the stored o, which was rounded to T.
  expect_near(x.dqkv, want.dqkv, want.dqkv_size, relative + kRoundoff<T>, "dqkv");
  EXPECT_TRUE(x.o.gaps_untouched());
  EXPECT_TRUE(x.dqkv.gaps_untouched());
}

const AttentionShape kShapes[] = {
    {.batch = 2, .time = 1, .heads = 3, .kv_heads = 3, .head_size = 22},
    {.batch = 2, .time = 7, .heads = 2, .kv_heads = 1, .head_size = 43},
    {.batch = 1, .time = 64, .heads = 2, .kv_heads = 2, .head_size = 64},
    {.batch = 2, .time = 65, .heads = 6, .kv_heads = 2, .head_size = 22},
    {.batch = 1, .time = 200, .heads = 4, .kv_heads = 2, .head_size = 64},
    {.batch = 1, .time = 200, .heads = 3, .kv_heads = 1, .head_size = 43},
    {.batch = 1, .time = 333, .heads = 2, .kv_heads = 2, .head_size = 1},
    {.batch = 1, .time = 300, .heads = 1, .kv_heads = 1, .head_size = 128},
};

TEST(Attention, Float32IsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<float>(shape);
}
TEST(Attention, Bf16IsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<bf16>(shape);
}
TEST(Attention, Fp16IsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<fp16>(shape);
}
TEST(Attention, DoubleIsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<double>(shape);
}

// Calls f once for each instruction set of this CPU that the kernels were compiled for, down to the plainest.
template <class F>
void for_each_instruction_set(F&& f) {
  const std::int64_t all = hwy::SupportedTargets();
  for (std::int64_t rest = all; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    f();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(Attention, EveryInstructionSetIsTheFullSoftmax) {
  for_each_instruction_set([] {
    for (const AttentionShape& shape : kShapes) {
      if (shape.time > 65) continue;
      compare_with_reference<float>(shape);
      compare_with_reference<bf16>(shape);
      compare_with_reference<fp16>(shape);
    }
  });
}

// The tolerance of the tests above must be able to fail: it is far below the effect of one forgotten key.
TEST(Attention, SeesEveryVisibleKeyAndNoOther) {
  const AttentionShape shape{.batch = 1, .time = 130, .heads = 1, .kv_heads = 1, .head_size = 16};
  Problem<float> x(shape);
  x.forward();
  for (const std::int64_t changed : {0, 1, 63, 64, 65, 127, 128, 129}) {
    Problem<float> y(shape);
    for (std::int64_t c = 0; c < 16; ++c) y.qkv.at(changed, 32 + c) += 1000.0f;  // its value
    y.forward();
    for (std::int64_t i = 0; i < shape.time; ++i) {
      const bool same = std::memcmp(&x.o.at(i, 0), &y.o.at(i, 0), 16 * sizeof(float)) == 0;
      EXPECT_EQ(same, i < changed) << "query " << i << ", key " << changed;
    }
  }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const AttentionShape shape{.batch = 1, .time = 100, .heads = 1, .kv_heads = 1, .head_size = 64};
  Problem<float> x(shape);
  for (float& v : x.qkv.data) v *= 30.0f;  // scores of some thousands
  x.forward();
  x.backward();
  for (std::int64_t r = 0; r < x.o.rows; ++r) {
    for (std::int64_t c = 0; c < x.o.cols; ++c) ASSERT_TRUE(std::isfinite(x.o.get(r, c)));
    for (std::int64_t c = 0; c < x.dqkv.cols; ++c) ASSERT_TRUE(std::isfinite(x.dqkv.get(r, c)));
  }
}

TEST(Attention, ANaNReachesWhatDependsOnIt) {
  const AttentionShape shape{.batch = 1, .time = 90, .heads = 1, .kv_heads = 1, .head_size = 32};
  for (const std::int64_t column : {0, 32, 64}) {  // q, k, v
    Problem<float> x(shape);
    x.qkv.at(70, column) = std::nanf("");
    x.forward();
    EXPECT_TRUE(
        std::isfinite(x.o.get(63, 0)));  // in a tile before: in one tile, 0 * NaN may reach earlier queries
    EXPECT_TRUE(std::isnan(x.o.get(70, 0))) << "column " << column;
    x.backward();
    EXPECT_TRUE(std::isnan(x.dqkv.get(70, 0))) << "column " << column;
  }
}

// Central differences in double: error about step^2 |f'''| + eps |f| / step, some 1e-9 here for f of
// order 10.
TEST(Attention, BackwardIsTheDerivative) {
  const AttentionShape shape{.batch = 2, .time = 5, .heads = 4, .kv_heads = 2, .head_size = 3};
  Problem<double> x(shape);
  x.forward();
  x.backward();
  const auto value = [&](Problem<double>& y) {
    y.forward();
    double sum = 0;
    for (std::int64_t r = 0; r < y.o.rows; ++r) {
      for (std::int64_t c = 0; c < y.o.cols; ++c) sum += y.o.get(r, c) * y.d_o.get(r, c);
    }
    return sum;
  };
  constexpr double kStep = 1e-5;
  Problem<double> y(shape);
  for (std::int64_t r = 0; r < y.qkv.rows; ++r) {
    for (std::int64_t c = 0; c < y.qkv.cols; ++c) {
      const double at = y.qkv.get(r, c);
      y.qkv.at(r, c) = at + kStep;
      const double above = value(y);
      y.qkv.at(r, c) = at - kStep;
      const double below = value(y);
      y.qkv.at(r, c) = at;
      ASSERT_NEAR(x.dqkv.get(r, c), (above - below) / (2 * kStep), 1e-7) << r << ", " << c;
    }
  }
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
void expect_same_bits() {
  const AttentionShape shape{.batch = 2, .time = 600, .heads = 4, .kv_heads = 2, .head_size = 22};
  const int before = parallelism();
  set_parallelism(1);
  Problem<T> x(shape);
  x.forward();
  x.backward();
  for (const int threads : {2, 4}) {
    set_parallelism(threads);
    Problem<T> y(shape);
    y.forward();
    y.backward();
    EXPECT_TRUE(same_bits(x.o.data, y.o.data));
    EXPECT_TRUE(same_bits(x.lse, y.lse));
    EXPECT_TRUE(same_bits(x.dqkv.data, y.dqkv.data));
  }
  set_parallelism(before);
}

TEST(Attention, BitsDoNotDependOnThreads) {
  expect_same_bits<bf16>();
  expect_same_bits<fp16>();
}

// ---- rope
// -------------------------------------------------------------------------------------------------------

template <class T>
void compare_rope(std::int64_t head_size) {
  const std::int64_t time = 37, rows = 2 * time, heads = 3;
  const double theta = 10000;
  Matrix<T> x(rows, heads * head_size + 4);  // the last four columns are not rope's
  x.fill("rope", 1.0);
  const Matrix<T> before = x;
  host::rope<T>(x.data.data(), x.ld, rows, time, heads, head_size, theta, /*inverse=*/false);
  const std::int64_t half = head_size / 2;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(r % time) *
                             std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_size));
        const double a = before.get(r, h * head_size + i), b = before.get(r, h * head_size + half + i);
        // Rounding of sine and cosine, of two products and a sum, and of the stored result.
        const double tolerance = (std::abs(a) + std::abs(b)) * (3 * kArithmetic<T> + kRoundoff<T>)+kLeast<T>;
        ASSERT_NEAR(x.get(r, h * head_size + i), a * std::cos(angle) - b * std::sin(angle), tolerance);
        ASSERT_NEAR(x.get(r, h * head_size + half + i), b * std::cos(angle) + a * std::sin(angle), tolerance);
      }
    }
    for (std::int64_t c = heads * head_size; c < x.cols; ++c) ASSERT_EQ(x.get(r, c), before.get(r, c));
  }
  EXPECT_TRUE(x.gaps_untouched());
  host::rope<T>(x.data.data(), x.ld, rows, time, heads, head_size, theta, /*inverse=*/true);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < heads * head_size; ++c) {
      // Two passes over numbers that a rotation makes at most sqrt(2) times the largest of a pair: 6 is ample
      // here.
      ASSERT_NEAR(x.get(r, c), before.get(r, c), 6.0 * 4 * (3 * kArithmetic<T> + kRoundoff<T>));
    }
  }
}

TEST(Rope, RotatesPairsOfHalvesAndBack) {
  for_each_instruction_set([] {
    for (const std::int64_t head_size : {2, 22, 64, 128}) {
      compare_rope<float>(head_size);
      compare_rope<bf16>(head_size);
      compare_rope<fp16>(head_size);
      compare_rope<double>(head_size);
    }
  });
}

}  // namespace
}  // namespace zg
