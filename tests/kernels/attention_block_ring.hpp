// An attention in blocks, as the ranks of a context group compute it: each has two chunks of every sequence,
// the r-th from the beginning and the r-th from the end, and sees the keys of one rank after the other. The
// blocks must be the whole attention, which AttentionReference computes in fp64.
#pragma once
#include "tests/kernels/attention_reference.hpp"
#include "ziggurat/kernels/arguments.hpp"

namespace zg::test {

// The operands of one rank; results are NaN before they are computed, so that a block that merges too early,
// or not at all, shows.
template <class T>
struct RingPart {
  using A = Acc<T>;
  RingPart(const AttentionShape& s, std::int64_t rows, std::int64_t gap)
      : q(rows, s.heads * s.head_size, gap),
        kv(rows, 2 * s.kv_heads * s.head_size, gap),
        d_o(rows, q.cols(), gap),
        o_rounded(rows, q.cols(), gap),
        o(rows, q.cols(), gap),
        dq(rows, q.cols(), gap),
        dkv(rows, kv.cols(), gap),
        lse(s.batch * s.heads, rows / std::max<std::int64_t>(1, s.batch), gap) {
    o.fill(NAN), lse.fill(NAN);
  }
  Matrix<T> q, kv, d_o, o_rounded;
  Matrix<A> o, dq, dkv, lse;
};

// The rows of a matrix's sequences from `first` on, for kernels.
template <class M>
auto rows_from(M& matrix, std::int64_t first) {
  return Strided(matrix.data() + first * matrix.ld(), matrix.ld());
}

// kernels.forward(block, q, kv, o, lse, first query row) and kernels.backward(block, part, kv, dkv, first
// query row) run the kernels on matrices of the host's memory.
template <class T, class Kernels>
void compare_ring(const AttentionShape& whole, std::int64_t parts, std::int64_t gap, Kernels&& kernels) {
  SCOPED_TRACE(testing::Message() << "B " << whole.batch << " T " << whole.time << " heads " << whole.heads
                                  << "/" << whole.kv_heads << " of " << whole.head_size << ", " << parts
                                  << " parts, gap " << gap);
  const std::int64_t chunk = whole.time / (2 * parts), local = 2 * chunk, rows = whole.batch * local;
  ASSERT_EQ(chunk * 2 * parts, whole.time);
  const std::int64_t q_cols = whole.heads * whole.head_size, kv_cols = 2 * whole.kv_heads * whole.head_size;
  Matrix<T> qkv(whole.batch * whole.time, q_cols + kv_cols), d_o(qkv.rows(), q_cols);
  auto random = generator(static_cast<std::uint64_t>(whole.time + whole.head_size));
  qkv.fill_normal(random, 0, 1.2), d_o.fill_normal(random);
  const AttentionReference want(whole, qkv, d_o);
  // Row `i` of rank r, in the whole.
  const auto place = [&](std::int64_t r, std::int64_t i) {
    const std::int64_t t = i % local;
    return i / local * whole.time + (t < chunk ? r * chunk + t : (2 * parts - 1 - r) * chunk + t - chunk);
  };
  std::vector<RingPart<T>> ranks;
  for (std::int64_t r = 0; r < parts; ++r) {
    RingPart<T>& p = ranks.emplace_back(whole, rows, gap);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < q_cols; ++c) p.q.set(i, c, qkv.get(place(r, i), c));
      for (std::int64_t c = 0; c < kv_cols; ++c) p.kv.set(i, c, qkv.get(place(r, i), q_cols + c));
      for (std::int64_t c = 0; c < q_cols; ++c) p.d_o.set(i, c, d_o.get(place(r, i), c));
    }
  }
  const auto block_of = [&](std::int64_t r, std::int64_t s) {
    AttentionBlock b{whole.batch, local, local, local, local, whole.heads, whole.kv_heads, whole.head_size};
    b.causal = r == s, b.merge = r != s;
    if (s < r) b.keys = chunk;     // of the rank's later chunk none is visible
    if (s > r) b.queries = chunk;  // the earlier queries see nothing
    return b;
  };
  for (std::int64_t r = 0; r < parts; ++r) {
    RingPart<T>& p = ranks[static_cast<std::size_t>(r)];
    for (std::int64_t j = 0; j < parts; ++j) {
      const std::int64_t s = (r - j + parts) % parts;
      kernels.forward(block_of(r, s), p, ranks[static_cast<std::size_t>(s)].kv, s > r ? chunk : 0);
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < q_cols; ++c) p.o_rounded.set(i, c, p.o.get(i, c));
    }
  }
  for (std::int64_t r = 0; r < parts; ++r) {
    RingPart<T>& p = ranks[static_cast<std::size_t>(r)];
    for (std::int64_t j = 0; j < parts; ++j) {
      const std::int64_t s = (r - j + parts) % parts;
      RingPart<T>& other = ranks[static_cast<std::size_t>(s)];
      kernels.backward(block_of(r, s), p, other.kv, other.dkv, s > r ? chunk : 0);
    }
  }
  // Each merge multiplies by two factors, of five roundings each; lse is rounded at each.
  const double merges = 12 * static_cast<double>(parts);
  const double o_bound = want.template o_bound<T>() + merges * arithmetic_error<T>();
  const double g_bound = want.template dqkv_bound<T>() + merges * arithmetic_error<T>();
  const auto near = [&](double got, double expected, double size, double relative, const char* what) {
    EXPECT_NEAR(got, expected,
                relative * size + 2 * unit_roundoff<Acc<T>>() * std::abs(expected) + least_error<T>())
        << what;
    return !testing::Test::HasFailure();
  };
  for (std::int64_t r = 0; r < parts; ++r) {
    RingPart<T>& p = ranks[static_cast<std::size_t>(r)];
    SCOPED_TRACE(testing::Message() << "rank " << r);
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t at = place(r, i);
      for (std::int64_t c = 0; c < q_cols; ++c) {
        if (!near(p.o.get(i, c), want.o.get(at, c), want.o_size.get(at, c), o_bound, "o")) return;
        if (!near(p.dq.get(i, c), want.dqkv.get(at, c), want.dqkv_size.get(at, c), g_bound, "dq")) return;
      }
      for (std::int64_t c = 0; c < kv_cols; ++c) {
        if (!near(p.dkv.get(i, c), want.dqkv.get(at, q_cols + c), want.dqkv_size.get(at, q_cols + c), g_bound,
                  "dkv"))
          return;
      }
      for (std::int64_t h = 0; h < whole.heads; ++h) {
        const std::int64_t of = (i / local * whole.heads + h) * whole.time + at % whole.time;
        ASSERT_NEAR(p.lse.get(i / local * whole.heads + h, i % local), want.lse[static_cast<std::size_t>(of)],
                    arithmetic_error<T>() * (want.worst + merges));
      }
    }
    for (Matrix<Acc<T>>* m : {&p.o, &p.dq, &p.dkv, &p.lse}) m->expect_gaps_intact("a result");
  }
}

inline AttentionShape ring_shape(std::int64_t batch, std::int64_t time, std::int64_t heads,
                                 std::int64_t kv_heads, std::int64_t head_size) {
  return {.batch = batch, .time = time, .heads = heads, .kv_heads = kv_heads, .head_size = head_size};
}

}  // namespace zg::test
