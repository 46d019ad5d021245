// Matrix products against a double reference: every kind of operand, odd sizes, gaps between rows, fixed
// bits.
#include <gtest/gtest.h>
#include <malloc.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels/host/matrix.hpp"
#include "tests/kernels/support.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg {
namespace {

constexpr std::uint64_t kSeed = 20250118;
constexpr std::int64_t kGap = 3;  // columns between rows that nobody may touch

template <class T>
double wide(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return static_cast<double>(static_cast<float>(x));
  }
}
template <class T>
T narrow(double x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return T(static_cast<float>(x));
  }
}

template <class T>
struct Matrix {
  Matrix(std::int64_t r, std::int64_t c)
      : rows(r), cols(c), ld(c + kGap), data(static_cast<std::size_t>(r * ld), narrow<T>(std::nan(""))) {}
  double get(std::int64_t r, std::int64_t c) const {
    return wide(data[static_cast<std::size_t>(r * ld + c)]);
  }
  double get(std::int64_t r, std::int64_t c, Trans trans) const {
    return trans == Trans::kNo ? get(r, c) : get(c, r);
  }
  void fill(const std::string& name) {
    const NamedRandom random(kSeed, name);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const double x = static_cast<double>(random.uniform(static_cast<std::uint64_t>(r * cols + c)));
        data[static_cast<std::size_t>(r * ld + c)] = narrow<T>(2 * x - 1);
      }
    }
  }
  std::int64_t rows, cols, ld;
  std::vector<T> data;
};

enum class Extra { kNothing, kAccumulate, kBias, kBoth };

template <class In, class Out>
struct Case {
  Case(std::int64_t m, std::int64_t n, std::int64_t k, Trans ta, Trans tb, Extra extra)
      : a(ta == Trans::kNo ? m : k, ta == Trans::kNo ? k : m),
        b(tb == Trans::kNo ? k : n, tb == Trans::kNo ? n : k),
        c(m, n),
        bias(1, n) {
    shape = {.m = m, .n = n, .k = k, .ta = ta, .tb = tb, .lda = a.ld, .ldb = b.ld, .ldc = c.ld};
    shape.accumulate = extra == Extra::kAccumulate || extra == Extra::kBoth;
    with_bias = extra == Extra::kBias || extra == Extra::kBoth;
    a.fill("a");
    b.fill("b");
    bias.fill("bias");
    if (shape.accumulate) c.fill("c");  // else NaN: what was in C may not matter
  }
  void run() {
    host::gemm<In, Out>(shape, a.data.data(), b.data.data(), c.data.data(),
                        with_bias ? bias.data.data() : nullptr);
  }
  host::GemmShape shape;
  Matrix<In> a, b;
  Matrix<Out> c;
  Matrix<In> bias;
  bool with_bias = false;
};

// Half an ulp, relative, of what is stored and of what is computed in.
template <class T>
double roundoff() {
  return std::is_same_v<T, bf16>    ? 0x1p-8
         : std::is_same_v<T, fp16>  ? 0x1p-11
         : std::is_same_v<T, float> ? 0x1p-24
                                    : 0x1p-53;
}

template <class In, class Out>
void compare(Case<In, Out>& x) {
  const host::GemmShape& s = x.shape;
  const Matrix<Out> before = x.c;
  x.run();
  // k products and k + 1 additions, each rounded; AVX512_BF16 rounds to nearest as well, but adds pairs: the
  // same count.
  const double relative = (2.0 * static_cast<double>(s.k) + 3) * roundoff<host::Acc<In>>();
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; ++j) {
      double want = 0, size = 0;
      const auto add = [&](double term) { want += term, size += std::abs(term); };
      for (std::int64_t p = 0; p < s.k; ++p) add(x.a.get(i, p, s.ta) * x.b.get(p, j, s.tb));
      if (x.with_bias) add(x.bias.get(0, j));
      if (s.accumulate) add(before.get(i, j));
      const double subnormal = std::is_same_v<Out, fp16> ? 0x1p-25 : 0.0;
      const double tolerance = relative * size + roundoff<Out>() * std::abs(want) * 1.01 + subnormal;
      ASSERT_NEAR(x.c.get(i, j), want, tolerance) << i << ", " << j;
    }
    for (std::int64_t j = s.n; j < x.c.ld; ++j) ASSERT_TRUE(std::isnan(x.c.get(i, j))) << "gap of row " << i;
  }
}

template <class In, class Out>
void compare_all_sizes() {
  int number = 0;
  for (const std::int64_t m : {1, 3, 43, 257}) {
    for (const std::int64_t n : {1, 3, 43, 257}) {
      for (const std::int64_t k : {1, 3, 43, 257}) {
        for (const Trans ta : {Trans::kNo, Trans::kYes}) {
          for (const Trans tb : {Trans::kNo, Trans::kYes}) {
            const auto extra = static_cast<Extra>(number++ * 7 / 3 % 4);
            SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << " ta=" << (ta == Trans::kYes)
                                            << " tb=" << (tb == Trans::kYes)
                                            << " extra=" << static_cast<int>(extra) << " seed=" << kSeed);
            Case<In, Out> x(m, n, k, ta, tb, extra);
            compare(x);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Gemm, Bf16) {
  compare_all_sizes<bf16, bf16>();
}
TEST(Gemm, Bf16ToFloat) {
  compare_all_sizes<bf16, float>();
}
TEST(Gemm, Fp16) {
  compare_all_sizes<fp16, fp16>();
}
TEST(Gemm, Fp16ToFloat) {
  compare_all_sizes<fp16, float>();
}
TEST(Gemm, Float) {
  compare_all_sizes<float, float>();
}
TEST(Gemm, Double) {
  compare_all_sizes<double, double>();
}

// Enough work for several tiles, cut by rows, by columns and by both, with a smaller last one.
TEST(Gemm, Bf16ManyTiles) {
  for (const Extra extra : {Extra::kAccumulate, Extra::kBias}) {
    Case<bf16, bf16> tall(901, 130, 300, Trans::kNo, Trans::kYes, extra);
    compare(tall);
    Case<bf16, float> wide_one(70, 1501, 300, Trans::kNo, Trans::kNo, extra);
    compare(wide_one);
    Case<bf16, float> square(333, 402, 300, Trans::kYes, Trans::kNo, extra);
    compare(square);
  }
}

// A transposed A, which is copied in blocks of rows and of the inner dimension where the tiles are small, on
// every instruction set.
TEST(Gemm, FloatOfTransposedRows) {
  test::for_each_target([] {
    for (const Extra extra : {Extra::kNothing, Extra::kBoth}) {
      Case<float, float> deep(37, 70, 2051, Trans::kYes, Trans::kNo, extra);
      compare(deep);
      Case<float, float> tall(1301, 66, 5, Trans::kYes, Trans::kYes, extra);
      compare(tall);
      Case<float, float> both(2 * 515, 66, 1030, Trans::kYes, Trans::kNo, extra);
      compare(both);
    }
  });
}

// Several tiles and blocks of the inner dimension, on every instruction set that widens and rounds.
TEST(Gemm, Fp16ManyTiles) {
  test::for_each_target([] {
    Case<fp16, fp16> square(301, 700, 37, Trans::kNo, Trans::kYes, Extra::kBias);
    compare(square);
    Case<fp16, float> deep(70, 61, 1301, Trans::kYes, Trans::kNo, Extra::kAccumulate);
    compare(deep);
    Case<fp16, fp16> both(43, 530, 513, Trans::kNo, Trans::kNo, Extra::kBoth);
    compare(both);
  });
}

// The sum is made in fp32: what is too large for fp16 on the way comes back; a result that is becomes
// infinite.
TEST(Gemm, Fp16OverflowsInTheResultAlone) {
  std::vector<fp16> a(600, fp16(300.0f)), b(600, fp16(300.0f)), c(1);
  const host::GemmShape shape{.m = 1, .n = 1, .k = 600, .lda = 600, .ldb = 1, .ldc = 1};
  float wide_c = 0;
  host::gemm<fp16, float>(shape, a.data(), b.data(), &wide_c, nullptr);
  EXPECT_EQ(wide_c, 600 * 9e4f);
  host::gemm<fp16, fp16>(shape, a.data(), b.data(), c.data(), nullptr);
  EXPECT_EQ(c[0].bits, 0x7c00u);
  for (std::size_t i = 300; i < 600; ++i) b[i] = fp16(-300.0f);
  b[599] = fp16(-299.0f);
  host::gemm<fp16, fp16>(shape, a.data(), b.data(), c.data(), nullptr);
  EXPECT_EQ(static_cast<float>(c[0]), 300.0f);
}

// What the program has from malloc.
std::int64_t allocated_bytes() {
  const auto info = mallinfo2();
  return static_cast<std::int64_t>(info.uordblks + info.hblkhd);
}

TEST(Gemm, Fp16ScratchDoesNotGrowWithTheSizes) {
  const int before = parallelism();
  set_parallelism(1);
  // A thread without scratch of earlier products.
  std::thread([] {
    const auto growth = [](std::int64_t m, std::int64_t n, std::int64_t k) {
      Case<fp16, fp16> x(m, n, k, Trans::kNo, Trans::kNo, Extra::kNothing);
      const std::int64_t start = allocated_bytes();
      x.run();
      return allocated_bytes() - start;
    };
    // One whole tile: the memory of what is widened, and at most as much again of oneDNN's, with the code
    // that it makes.
    EXPECT_LE(growth(256, 512, 512), 2 * host::kWidenedBytes + 1024 * 1024);
    // All of these operands would be 41 MB of fp32; code for the smaller tiles at the ends is made.
    EXPECT_LE(growth(500, 600, 9000), 1024 * 1024);
  }).join();
  set_parallelism(before);
}

TEST(Gemm, IsSetOrAdded) {
  // The same call twice: C = AB stays, C += AB doubles.
  Case<float, float> set(65, 33, 17, Trans::kNo, Trans::kNo, Extra::kNothing);
  set.run();
  const std::vector<float> once = set.c.data;
  set.run();
  EXPECT_EQ(std::memcmp(once.data(), set.c.data.data(), once.size() * sizeof(float)), 0);
  set.shape.accumulate = true;
  set.run();
  for (std::int64_t i = 0; i < 65; ++i) {
    for (std::int64_t j = 0; j < 33; ++j) {
      // 17 products of numbers below 1: the sum's roundings, once more each.
      const double old = static_cast<double>(once[static_cast<std::size_t>(i * set.c.ld + j)]);
      ASSERT_NEAR(set.c.get(i, j), 2 * old, 40 * 17 * 0x1p-24);
    }
  }
}

TEST(Gemm, EmptyProductsTouchNothing) {
  host::gemm<float, float>({.m = 0, .n = 5, .k = 3, .lda = 3, .ldb = 5, .ldc = 5}, nullptr, nullptr, nullptr,
                           nullptr);
  host::gemm<bf16, bf16>({.m = 4, .n = 0, .k = 3, .lda = 3, .ldb = 5, .ldc = 5}, nullptr, nullptr, nullptr,
                         nullptr);
}

template <class In, class Out>
void expect_same_bits(std::int64_t m, std::int64_t n, std::int64_t k) {
  const int before = parallelism();
  set_parallelism(1);
  Case<In, Out> alone(m, n, k, Trans::kYes, Trans::kNo, Extra::kAccumulate);
  alone.run();
  for (const int threads : {2, 3, 8}) {
    set_parallelism(threads);
    Case<In, Out> x(m, n, k, Trans::kYes, Trans::kNo, Extra::kAccumulate);
    x.run();
    for (std::int64_t i = 0; i < m; ++i) {
      const auto at = static_cast<std::size_t>(i * x.c.ld);
      ASSERT_EQ(std::memcmp(&x.c.data[at], &alone.c.data[at], static_cast<std::size_t>(n) * sizeof(Out)), 0)
          << "row " << i << " with " << threads << " threads";
    }
  }
  set_parallelism(before);
}

TEST(Gemm, BitsDoNotDependOnThreads) {
  expect_same_bits<bf16, bf16>(700, 900, 300);
  expect_same_bits<bf16, float>(200, 300, 5000);
  expect_same_bits<fp16, fp16>(700, 900, 300);
  expect_same_bits<fp16, float>(200, 300, 5000);
  expect_same_bits<float, float>(515, 260, 400);
  expect_same_bits<double, double>(130, 300, 100);
}

// One row times the rows of a matrix: an element has its bits whatever other rows are beside it, in however
// many of them, on every instruction set.
TEST(Gemm, OneRowHasTheBitsOfEachElement) {
  test::for_each_target([] {
    for (const std::int64_t k : {1, 16, 43, 768, 1301}) {
      Case<float, float> all(1, 131, k, Trans::kNo, Trans::kYes, Extra::kBoth);
      const Matrix<float> before = all.c;
      compare(all);
      for (std::int64_t j = 0; j < 131; ++j) {
        float one = before.data[static_cast<std::size_t>(j)];
        host::GemmShape shape = all.shape;
        shape.n = 1;
        host::gemm<float, float>(shape, all.a.data.data(), all.b.data.data() + j * all.b.ld, &one,
                                 all.bias.data.data() + j);
        ASSERT_EQ(std::memcmp(&one, &all.c.data[static_cast<std::size_t>(j)], sizeof one), 0)
            << k << " " << j;
      }
    }
  });
}

// More shapes than a thread keeps primitives for: the oldest make room, and come back right.
TEST(Gemm, ManyShapes) {
  for (int round = 0; round < 2; ++round) {
    for (std::int64_t m = 1; m <= 1100; ++m) {
      Case<float, float> x(m, 5, 4, Trans::kNo, Trans::kNo, Extra::kNothing);
      compare(x);
    }
  }
}

TEST(Gemm, DescribesBf16) {
  EXPECT_EQ(host::has_native_bf16(), std::string(host::bf16_description()).rfind("none", 0) != 0);
  if (std::getenv("ZG_TEST_WITHOUT_BF16") != nullptr) {
    EXPECT_FALSE(host::has_native_bf16());
  }
}

#if defined(__x86_64__)
// The same tests in a child that is told to have AVX2 only: operands are then widened to fp32.
TEST(Gemm, WithoutBf16Instructions) {
  std::string limit = "ONEDNN_MAX_CPU_ISA=AVX2", mark = "ZG_TEST_WITHOUT_BF16=1";
  std::string program = "/proc/self/exe", filter = "--gtest_filter=Gemm.Bf16*:Gemm.Bits*:Gemm.DescribesBf16";
  std::vector<char*> environment{limit.data(), mark.data()};
  for (char** e = environ; *e != nullptr; ++e) environment.push_back(*e);
  environment.push_back(nullptr);
  char* arguments[] = {program.data(), filter.data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environment.data()), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}
#endif

}  // namespace
}  // namespace zg
