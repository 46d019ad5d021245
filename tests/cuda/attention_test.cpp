// Attention on the device against fp64: all types, on tensor cores and without, any sizes and pitches.
#include "tests/cuda/harness.hpp"
#include "tests/kernels/attention_reference.hpp"

namespace zg::test {
namespace {

// Memory of the kernels' operands: rows begin `lead` columns into their matrix, and end `gap` before the
// next.
struct Layout {
  std::int64_t lead = 0, gap = 0;
};
constexpr Layout kLayouts[] = {{0, 8}, {0, 5}, {1, 7}};  // packs; a pitch, and a pointer, that are in none

template <class T>
struct Problem {
  Problem(const AttentionShape& s, Layout l, std::uint64_t test_case, double spread = 1)
      : shape(s),
        layout(l),
        qkv(s.batch * s.time, s.qkv_columns()),
        d_o(s.batch * s.time, s.result_columns()),
        o(d_o.rows(), d_o.cols() + l.lead, l.gap),
        dqkv(qkv.rows(), qkv.cols() + l.lead, l.gap),
        lse(static_cast<std::size_t>(s.batch * s.heads * s.time)) {
    auto random = generator(test_case);
    qkv.fill_normal(random, 0, spread), d_o.fill_normal(random);
  }

  void run() {
    Matrix<T> in_qkv = spread_out(qkv), in_do = spread_out(d_o);
    o.fill(NAN), dqkv.fill(NAN);
    mark_lead(o), mark_lead(dqkv);
    std::fill(lse.begin(), lse.end(), static_cast<Acc<T>>(NAN));
    const auto bytes = cuda::attention_scratch_bytes(dtype_of<T>, shape, on.deterministic);
    scratch.assign(static_cast<std::size_t>(bytes), 0xff);  // NaNs
    OnDevice<T> on_qkv(in_qkv), on_do(in_do), on_o(o), on_dqkv(dqkv);
    OnDevice<Acc<T>> on_lse(lse);
    OnDevice<unsigned char> on_scratch(scratch);
    const std::int64_t lead = layout.lead;
    cuda::attention<T>(on, shape,
                       {.qkv = {on_qkv.data() + lead, in_qkv.ld()},
                        .o = {on_o.data() + lead, o.ld()},
                        .lse = on_lse.data()});
    cuda::attention_backward<T>(on, shape,
                                {.qkv = {on_qkv.data() + lead, in_qkv.ld()},
                                 .o = {on_o.data() + lead, o.ld()},
                                 .lse = on_lse.data(),
                                 .d_o = {on_do.data() + lead, in_do.ld()},
                                 .dqkv = {on_dqkv.data() + lead, dqkv.ld()},
                                 .scratch = on_scratch.data()});
    on_o.fetch(), on_lse.fetch(), on_dqkv.fetch(), on_scratch.fetch();
    o.expect_gaps_intact("o"), dqkv.expect_gaps_intact("dqkv");
    expect_lead_intact(o), expect_lead_intact(dqkv);
  }

  AttentionShape shape;
  Layout layout;
  Matrix<T> qkv, d_o, o, dqkv;
  std::vector<Acc<T>> lse;
  cuda::Launch on = launch();
  std::vector<unsigned char> scratch;

 private:
  // With a lead, and NaNs in it and in the gaps.
  Matrix<T> spread_out(const Matrix<T>& from) {
    Matrix<T> to(from.rows(), from.cols() + layout.lead + layout.gap);
    to.fill(NAN);
    for (std::int64_t r = 0; r < from.rows(); ++r) {
      for (std::int64_t c = 0; c < from.cols(); ++c) to.set(r, c + layout.lead, from.get(r, c));
    }
    return to;
  }
  void mark_lead(Matrix<T>& m) {
    for (std::int64_t r = 0; r < m.rows(); ++r) {
      for (std::int64_t c = 0; c < layout.lead; ++c) m.at(r, c) = poison<T>();
    }
  }
  void expect_lead_intact(Matrix<T>& m) {
    const T expected = poison<T>();
    for (std::int64_t r = 0; r < m.rows(); ++r) {
      for (std::int64_t c = 0; c < layout.lead; ++c)
        ASSERT_EQ(std::memcmp(&m.at(r, c), &expected, sizeof(T)), 0) << "before row " << r;
    }
  }
};

std::string text_of(const AttentionShape& s, Layout layout) {
  return fmt::format("B {} T {} heads {}/{} of {}/{}, lead {} gap {}", s.batch, s.time, s.heads, s.kv_heads,
                     s.head_size, s.values(), layout.lead, layout.gap);
}

template <class T>
void compare(const AttentionShape& shape, Layout layout, std::uint64_t test_case, bool deterministic = true) {
  SCOPED_TRACE(text_of(shape, layout));
  Problem<T> x(shape, layout, test_case);
  x.on = launch(deterministic);
  x.run();
  const AttentionReference want(shape, x.qkv, x.d_o);
  expect_near(x.o, want.o, want.o_size, want.o_bound<T>(), "o", layout.lead);
  for (std::size_t i = 0; i < x.lse.size(); ++i)
    ASSERT_NEAR(static_cast<double>(x.lse[i]), want.lse[i], arithmetic_error<T>() * want.worst)
        << "lse " << i;
  expect_near(x.dqkv, want.dqkv, want.dqkv_size, want.dqkv_bound<T>(), "dqkv", layout.lead);
}

template <class T>
class CudaAttention : public testing::Test {};
TYPED_TEST_SUITE(CudaAttention, StorageTypes);
using Halves = testing::Types<bf16, fp16>;
template <class T>
class TensorAttention : public testing::Test {};
TYPED_TEST_SUITE(TensorAttention, Halves);
using Wholes = testing::Types<float, double>;
template <class T>
class PlainAttention : public testing::Test {};
TYPED_TEST_SUITE(PlainAttention, Wholes);

AttentionShape shape_of(std::int64_t batch, std::int64_t time, std::int64_t heads, std::int64_t kv_heads,
                        std::int64_t head_size, std::int64_t value_size = 0) {
  return {.batch = batch,
          .time = time,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_size = head_size,
          .value_size = value_size};
}

// Head sizes of multiples of 8 up to 256: all four padded sizes, one tile and several, whole and begun.
const AttentionShape kTensorShapes[] = {
    shape_of(2, 1, 3, 3, 64),   shape_of(2, 7, 2, 1, 40),   shape_of(1, 64, 1, 1, 64),
    shape_of(1, 197, 2, 1, 64), shape_of(2, 65, 2, 2, 8),   shape_of(1, 131, 3, 1, 80),
    shape_of(1, 129, 1, 1, 96), shape_of(1, 33, 6, 2, 104), shape_of(1, 150, 2, 1, 128),
    shape_of(2, 1, 1, 1, 256),  shape_of(2, 35, 4, 2, 136), shape_of(1, 150, 2, 1, 256),
    shape_of(1, 257, 1, 1, 192)};
TYPED_TEST(TensorAttention, IsTheFullSoftmax) {
  std::uint64_t test_case = 10;
  for (const AttentionShape& shape : kTensorShapes) compare<TypeParam>(shape, kLayouts[0], ++test_case);
}

// Values of another size than queries and keys: on tensor cores with large heads, and else without.
TYPED_TEST(CudaAttention, ValuesHaveASizeOfTheirOwn) {
  std::uint64_t test_case = 400;
  for (const AttentionShape& shape :
       {shape_of(1, 135, 2, 1, 192, 128), shape_of(1, 35, 2, 2, 136, 256), shape_of(2, 20, 4, 2, 43, 22),
        shape_of(1, 70, 2, 1, 16, 150), shape_of(1, 20, 2, 1, 150, 8), shape_of(1, 33, 1, 1, 64, 40)}) {
    for (const Layout& layout : {kLayouts[0], kLayouts[2]}) compare<TypeParam>(shape, layout, ++test_case);
    compare<TypeParam>(shape, kLayouts[0], ++test_case, false);
  }
}

// The backward in one pass, where results need not be deterministic.
TYPED_TEST(TensorAttention, AnyOrderIsTheFullSoftmax) {
  std::uint64_t test_case = 10;
  for (const AttentionShape& shape : kTensorShapes)
    compare<TypeParam>(shape, kLayouts[0], ++test_case, false);
  compare<TypeParam>(shape_of(1, 300, 2, 1, 64), kLayouts[1], ++test_case, false);
  compare<TypeParam>(shape_of(1, 75, 1, 1, 88), kLayouts[2], ++test_case, false);
}

// Whether the backward was one pass: its sums are in scratch memory.
template <class T>
bool one_pass(std::int64_t head_size, bool deterministic) {
  Problem<T> x(shape_of(1, 70, 1, 1, head_size), kLayouts[0], 88);
  x.on = launch(deterministic);
  x.run();
  const std::int64_t stats = cuda::attention_scratch_bytes(dtype_of<T>, x.shape, true);
  return std::ssize(x.scratch) > stats && x.scratch.back() != 0xff;
}
TYPED_TEST(TensorAttention, OnePassWhereOrderMayVary) {
  for (const std::int64_t size : {64, 96}) {
    EXPECT_TRUE(one_pass<TypeParam>(size, false)) << size;
    EXPECT_FALSE(one_pass<TypeParam>(size, true)) << size;
  }
  for (const bool deterministic : {false, true}) EXPECT_FALSE(one_pass<TypeParam>(256, deterministic));
}

// sm_86 and sm_89. With heads of 128 the backward then takes two passes.
TYPED_TEST(CudaAttention, GpusWithLittleSharedMemory) {
  with_shared_memory(99 * 1024, [] {
    for (const std::int64_t size : {64, 96, 128, 256, 43}) {
      for (const bool deterministic : {false, true})
        compare<TypeParam>(shape_of(1, 140, 2, 1, size), kLayouts[0], 89, deterministic);
    }
    if constexpr (sizeof(TypeParam) == 2) {
      EXPECT_TRUE(one_pass<TypeParam>(96, false));
      EXPECT_FALSE(one_pass<TypeParam>(128, false));
    }
  });
  if constexpr (sizeof(TypeParam) == 2) {
    EXPECT_TRUE(is_gpu() || one_pass<TypeParam>(128, false));
  }
}

TYPED_TEST(TensorAttention, AnyPitchAndPointer) {
  std::uint64_t test_case = 30;
  for (const Layout layout : kLayouts) {
    compare<TypeParam>(shape_of(1, 75, 2, 1, 64), layout, ++test_case);
    compare<TypeParam>(shape_of(2, 40, 1, 1, 88), layout, ++test_case);
    compare<TypeParam>(shape_of(2, 40, 1, 1, 200), layout, ++test_case);
  }
}

// Without tensor cores: all types, any head size, several pieces and blocks of a head.
TYPED_TEST(CudaAttention, AnyHeadSizeIsTheFullSoftmax) {
  std::uint64_t test_case = 50;
  for (const AttentionShape& shape :
       {shape_of(2, 1, 3, 3, 22), shape_of(2, 7, 2, 1, 43), shape_of(1, 70, 4, 2, 22),
        shape_of(1, 65, 1, 1, 1), shape_of(1, 131, 2, 1, 43), shape_of(1, 40, 2, 1, 131),
        shape_of(1, 70, 1, 1, 256), shape_of(1, 20, 2, 1, 300)}) {
    compare<TypeParam>(shape, kLayouts[test_case % 3], test_case);
    ++test_case;
  }
}
TYPED_TEST(PlainAttention, CommonHeadSizesAreTheFullSoftmax) {
  std::uint64_t test_case = 70;
  for (const AttentionShape& shape : {shape_of(1, 131, 4, 2, 64), shape_of(1, 64, 2, 2, 128)}) {
    compare<TypeParam>(shape, kLayouts[test_case % 3], test_case);
    ++test_case;
  }
}

// On a GPU as many heads as no dimension of a grid but x holds.
TYPED_TEST(CudaAttention, ManyHeads) {
  compare<TypeParam>(shape_of(is_gpu() ? 33000 : 9, 2, 2, 1, 8), kLayouts[0], 80);
}

TYPED_TEST(CudaAttention, NoRowsAreNothing) {
  Problem<TypeParam> none(shape_of(0, 5, 2, 1, 64), kLayouts[0], 81),
      at_once(shape_of(3, 0, 2, 1, 64), kLayouts[0], 82);
  none.run(), at_once.run();
}

// The same bits for all orders of threads, and of what copies do meanwhile.
TYPED_TEST(CudaAttention, BitsDoNotDependOnOrder) {
  for (const AttentionShape& shape : {shape_of(1, 140, 2, 1, 64), shape_of(1, 70, 1, 1, 128),
                                      shape_of(1, 70, 2, 1, 43), shape_of(1, 70, 2, 1, 256)}) {
    SCOPED_TRACE(text_of(shape, kLayouts[0]));
    Problem<TypeParam> first(shape, kLayouts[0], 83), again(shape, kLayouts[0], 83);
    first.run();
    for_each_order([&] {
      again.run();
      EXPECT_TRUE(first.o.same_bits(again.o));
      EXPECT_TRUE(first.dqkv.same_bits(again.dqkv));
      EXPECT_EQ(std::memcmp(first.lse.data(), again.lse.data(), first.lse.size() * sizeof(first.lse[0])), 0);
    });
  }
}

template <class T>
bool same_part(const Matrix<T>& a, const Matrix<T>& b, std::int64_t row, std::int64_t first,
               std::int64_t cols) {
  for (std::int64_t c = first; c < first + cols; ++c) {
    if (!(a.get(row, c) == b.get(row, c))) return false;
  }
  return true;
}

// What bounds of whole sums cannot see: a value reaches the queries from its own on and no other, and a
// query's gradient the keys up to its own.
TYPED_TEST(CudaAttention, SeesEveryVisibleKeyAndNoOther) {
  for (const std::int64_t size : {64, 128, 256, 20}) {
    const AttentionShape shape = shape_of(1, 140, 1, 1, size);
    SCOPED_TRACE(text_of(shape, kLayouts[0]));
    Problem<TypeParam> x(shape, kLayouts[0], 84, 0.3);
    x.run();
    for (const std::int64_t changed : {0, 15, 64, 127, 139}) {
      Problem<TypeParam> y(shape, kLayouts[0], 84, 0.3);
      for (std::int64_t c = 0; c < size; ++c) {
        y.qkv.set(changed, 2 * size + c, 1000);
        y.d_o.set(changed, c, 1000);
      }
      y.run();
      for (std::int64_t i = 0; i < shape.time; ++i) {
        ASSERT_EQ(same_part(x.o, y.o, i, 0, size), i < changed) << "query " << i << ", key " << changed;
        ASSERT_EQ(same_part(x.dqkv, y.dqkv, i, 2 * size, size), i > changed)
            << "key " << i << ", query " << changed;
      }
    }
  }
}

TYPED_TEST(CudaAttention, LargeScoresDoNotOverflow) {
  for (const std::int64_t size : {64, 256, 43}) {
    Problem<TypeParam> x(shape_of(1, 70, 1, 1, size), kLayouts[0], 85, 40);  // scores of some ten thousands
    x.run();
    for (std::int64_t r = 0; r < x.o.rows(); ++r) {
      for (std::int64_t c = 0; c < x.o.cols(); ++c) ASSERT_TRUE(std::isfinite(x.o.get(r, c)));
      for (std::int64_t c = 0; c < x.dqkv.cols(); ++c) ASSERT_TRUE(std::isfinite(x.dqkv.get(r, c)));
    }
  }
}

// One large score among small ones, late: what was summed before must shrink.
TYPED_TEST(CudaAttention, AMaximumThatComesLate) {
  for (const std::int64_t size : {64, 256, 20}) {
    const AttentionShape shape = shape_of(1, 140, 1, 1, size);
    Problem<TypeParam> x(shape, kLayouts[0], 86, 0.5);
    for (std::int64_t r = 0; r < shape.time; ++r) {
      for (std::int64_t c = 0; c < size; ++c) {
        x.qkv.set(r, c, 0.5);
        x.qkv.set(r, size + c, 0.02 * static_cast<double>(r));
      }
    }
    x.run();
    const AttentionReference want(shape, x.qkv, x.d_o);
    expect_near(x.o, want.o, want.o_size, want.o_bound<TypeParam>(), "o");
    expect_near(x.dqkv, want.dqkv, want.dqkv_size, want.dqkv_bound<TypeParam>(), "dqkv");
  }
}

TYPED_TEST(CudaAttention, ANaNReachesWhatDependsOnIt) {
  for (const std::int64_t size : {64, 256, 20}) {
    for (const std::int64_t column : {std::int64_t{0}, size, 2 * size}) {  // q, k, v
      Problem<TypeParam> x(shape_of(1, 140, 1, 1, size), kLayouts[0], 87);
      x.qkv.set(130, column, NAN);
      x.run();
      // In tiles before; in its own, 0 * NaN may reach earlier queries.
      for (std::int64_t i = 0; i < 64; ++i) ASSERT_TRUE(std::isfinite(x.o.get(i, 0)));
      EXPECT_TRUE(std::isnan(x.o.get(130, 0))) << "column " << column;
      EXPECT_TRUE(std::isnan(x.dqkv.get(130, 0))) << "column " << column;
    }
  }
}

TEST(CudaAttentionScratch, IsStatsOfQueriesInWholeTiles) {
  const AttentionShape shape = shape_of(2, 65, 3, 1, 40);
  EXPECT_EQ(cuda::attention_scratch_bytes(DType::kF32, shape, false), 2 * 3 * 128 * 2 * 4);
  EXPECT_EQ(cuda::attention_scratch_bytes(DType::kF64, shape, false), 2 * 3 * 128 * 2 * 8);
  EXPECT_EQ(cuda::attention_scratch_bytes(DType::kBF16, shape, true), 2 * 3 * 128 * 2 * 4);
  EXPECT_EQ(cuda::attention_scratch_bytes(DType::kBF16, shape, false), 2 * 3 * 128 * (2 + 64) * 4);
  // No sums of queries' gradients, which are computed in a fixed order.
  EXPECT_EQ(cuda::attention_scratch_bytes(DType::kBF16, shape_of(2, 65, 3, 1, 136), false),
            2 * 3 * 128 * 2 * 4);
}

}  // namespace
}  // namespace zg::test
