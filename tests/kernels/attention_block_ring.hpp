// An attention in blocks, as the ranks of a context group compute it: each has two chunks of every sequence,
// the r-th from the beginning and the r-th from the end, and sees the keys of one rank after the other. The
// blocks must be the whole attention, which AttentionReference computes in fp64.
#pragma once
#include "tests/kernels/attention_rules.hpp"
#include "ziggurat/kernels/arguments.hpp"

namespace zg::test {

// The operands of one rank; results are NaN before they are computed, so that a block that merges too early,
// or not at all, shows.
template <class T>
struct RingPart {
  using A = Acc<T>;
  RingPart(const AttentionShape& s, std::int64_t rows, std::int64_t gap)
      : q(rows, s.heads * s.head_size, gap),
        kv(rows, s.qkv_columns() - q.cols(), gap),
        d_o(rows, s.result_columns(), gap),
        o_rounded(rows, d_o.cols(), gap),
        o(rows, d_o.cols(), gap),
        dq(rows, q.cols(), gap),
        dkv(rows, kv.cols(), gap),
        lse(s.batch * s.heads, rows / std::max<std::int64_t>(1, s.batch), gap) {
    o.fill(NAN), lse.fill(NAN);
  }
  Matrix<T> q, kv, d_o, o_rounded;
  std::vector<std::int32_t> first_keys;  // of q, positions in the whole; empty: there are no documents
  Matrix<A> o, dq, dkv, lse;
};

// The rows of a matrix's sequences from `first` on, for kernels.
template <class M>
auto rows_from(M& matrix, std::int64_t first) {
  return Strided(matrix.data() + first * matrix.ld(), matrix.ld());
}

// Whole sequences, cut into the parts of a ring.
template <class T>
class Ring {
 public:
  Ring(const AttentionShape& s, std::int64_t n, std::int64_t gap, std::vector<std::int32_t> first_keys)
      : whole(s),
        firsts(std::move(first_keys)),
        parts(n),
        chunk(s.time / (2 * n)),
        local(2 * chunk),
        q_cols(s.heads * s.head_size),
        kv_cols(s.qkv_columns() - q_cols),
        o_cols(s.result_columns()),
        qkv(s.batch * s.time, q_cols + kv_cols),
        d_o(qkv.rows(), o_cols),
        sinks(1, s.rule.sinks ? s.heads : 0) {
    auto of_heads = generator(78);
    sinks.fill_normal(of_heads, 0.5, 2);
    auto random = generator(static_cast<std::uint64_t>(whole.time + whole.head_size));
    qkv.fill_normal(random, 0, 1.2), d_o.fill_normal(random);
    for (std::int64_t r = 0; r < parts; ++r) {
      RingPart<T>& p = ranks.emplace_back(whole, rows(), gap);
      for (std::int64_t i = 0; i < rows(); ++i) {
        for (std::int64_t c = 0; c < q_cols; ++c) p.q.set(i, c, qkv.get(place(r, i), c));
        for (std::int64_t c = 0; c < kv_cols; ++c) p.kv.set(i, c, qkv.get(place(r, i), q_cols + c));
        for (std::int64_t c = 0; c < o_cols; ++c) p.d_o.set(i, c, d_o.get(place(r, i), c));
        if (!firsts.empty()) p.first_keys.push_back(firsts[static_cast<std::size_t>(place(r, i))]);
      }
    }
  }

  // kernels.forward(block, part, kv, first query row, sinks or null) and kernels.backward(block, part, kv,
  // dkv, first query row) run the kernels on matrices of the host's memory.
  template <class Kernels>
  void run(Kernels& kernels) {
    for_blocks([&](RingPart<T>& p, RingPart<T>& other, const AttentionBlock& block, std::int64_t first) {
      kernels.forward(block, p, other.kv, first, block.rule.sinks && !block.merge ? &sinks : nullptr);
    });
    for (RingPart<T>& p : ranks) {
      for (std::int64_t i = 0; i < rows(); ++i) {
        for (std::int64_t c = 0; c < o_cols; ++c) p.o_rounded.set(i, c, p.o.get(i, c));
      }
    }
    for_blocks([&](RingPart<T>& p, RingPart<T>& other, const AttentionBlock& block, std::int64_t first) {
      kernels.backward(block, p, other.kv, other.dkv, first);
    });
  }

  void expect_whole() {
    std::vector<double> of_heads;
    for (std::int64_t h = 0; h < sinks.cols(); ++h) of_heads.push_back(sinks.get(0, h));
    const AttentionReference want(whole, qkv, d_o, firsts, of_heads);
    // Each merge multiplies by two factors, of five roundings each; lse is rounded at each.
    const double merges = 12 * static_cast<double>(parts) * arithmetic_error<T>();
    const double o_bound = want.template o_bound<T>() + merges;
    const double g_bound = want.template dqkv_bound<T>() + merges;
    for (std::int64_t r = 0; r < parts; ++r) {
      SCOPED_TRACE(testing::Message() << "rank " << r);
      RingPart<T>& p = ranks[static_cast<std::size_t>(r)];
      for (std::int64_t i = 0; i < rows(); ++i) {
        const std::int64_t at = place(r, i), b = i / local;
        for (std::int64_t c = 0; c < o_cols; ++c)
          ASSERT_TRUE(near(p.o.get(i, c), want.o.get(at, c), want.o_size.get(at, c), o_bound)) << "o";
        for (std::int64_t c = 0; c < q_cols; ++c) {
          ASSERT_TRUE(near(p.dq.get(i, c), want.dqkv.get(at, c), want.dqkv_size.get(at, c), g_bound)) << "dq";
        }
        for (std::int64_t c = 0; c < kv_cols; ++c) {
          const double size = want.dqkv_size.get(at, q_cols + c);
          ASSERT_TRUE(near(p.dkv.get(i, c), want.dqkv.get(at, q_cols + c), size, g_bound)) << "dkv";
        }
        for (std::int64_t h = b * whole.heads; h < (b + 1) * whole.heads; ++h) {
          const auto of = static_cast<std::size_t>(h * whole.time + at % whole.time);
          ASSERT_NEAR(p.lse.get(h, i % local), want.lse[of], arithmetic_error<T>() * want.worst + merges);
        }
      }
      for (Matrix<Acc<T>>* m : {&p.o, &p.dq, &p.dkv, &p.lse}) m->expect_gaps_intact("a result");
    }
  }

 private:
  std::int64_t rows() const { return whole.batch * local; }
  // Row `i` of rank r, in the whole.
  std::int64_t place(std::int64_t r, std::int64_t i) const {
    const std::int64_t t = i % local;
    return i / local * whole.time + (t < chunk ? r * chunk + t : (2 * parts - 1 - r) * chunk + t - chunk);
  }
  // body(rank, the rank whose keys it sees, what of them, its first query that does).
  template <class F>
  void for_blocks(const F& body) {
    for (std::int64_t r = 0; r < parts; ++r) {
      for (std::int64_t j = 0; j < parts; ++j) {
        const std::int64_t s = (r - j + parts) % parts;
        AttentionBlock b{whole.batch, local,       local,          local,
                         local,       whole.heads, whole.kv_heads, whole.head_size};
        b.causal = r == s, b.merge = r != s, b.rule = whole.rule, b.value_size = whole.value_size;
        if (s < r) b.keys = chunk;     // of the rank's later chunk none is visible
        if (s > r) b.queries = chunk;  // the earlier queries see nothing
        const auto positions = [&](std::int64_t rank, std::int64_t first, std::int64_t rows) {
          const auto at = [&](std::int64_t t) { return place(rank, t) - t; };
          return RowPositions(rows, at(first) + first, at(first + rows - 1) + first);
        };
        b.query_positions = positions(r, s > r ? chunk : 0, b.queries);
        b.key_positions = positions(s, 0, b.keys);
        body(ranks[static_cast<std::size_t>(r)], ranks[static_cast<std::size_t>(s)], b, s > r ? chunk : 0);
      }
    }
  }
  static testing::AssertionResult near(double got, double expected, double size, double relative) {
    const double allowed =
        relative * size + 2 * unit_roundoff<Acc<T>>() * std::abs(expected) + least_error<T>();
    if (std::abs(got - expected) <= allowed) return testing::AssertionSuccess();
    return testing::AssertionFailure() << got << ", expected " << expected << " within " << allowed;
  }

  AttentionShape whole;
  std::vector<std::int32_t> firsts;
  std::int64_t parts, chunk, local, q_cols, kv_cols, o_cols;
  Matrix<T> qkv, d_o, sinks;
  std::vector<RingPart<T>> ranks;
};

template <class T, class Kernels>
void compare_ring(const AttentionShape& whole, std::int64_t parts, std::int64_t gap, Kernels&& kernels,
                  const std::vector<std::int64_t>& documents = {}) {
  SCOPED_TRACE(testing::Message() << "B " << whole.batch << " T " << whole.time << " heads " << whole.heads
                                  << "/" << whole.kv_heads << " of " << whole.head_size << "/"
                                  << whole.values() << ", " << parts << " parts, gap " << gap << ", window "
                                  << whole.rule.window << ", documents of "
                                  << testing::PrintToString(documents));
  Ring<T> ring(whole, parts, gap, first_keys_of(whole.batch, whole.time, documents));
  ring.run(kernels);
  ring.expect_whole();
}

// Windows of less than a chunk, of more, and of more than a rank has; documents that are ragged, of length
// one, over many chunks; sinks; and all at once. Chunks of whole tiles and not.
template <class T, class Kernels>
void compare_rings_by_rules(std::int64_t head_size, Kernels&& kernels) {
  const auto shape = [&](std::int64_t batch, std::int64_t time, const AttentionRule& rule) {
    return AttentionShape{
        .batch = batch, .time = time, .heads = 2, .kv_heads = 1, .head_size = head_size, .rule = rule};
  };
  for (const std::int64_t window : {1, 5, 11, 23, 41})
    compare_ring<T>(shape(2, 42, {.window = window}), 3, 5, kernels);
  compare_ring<T>(shape(2, 42, {}), 3, 1, kernels, {5, 1, 9, 30});
  compare_ring<T>(shape(1, 40, {}), 4, 0, kernels, {1});
  compare_ring<T>(shape(2, 24, {.sinks = true}), 2, 2, kernels);
  compare_ring<T>(shape(1, 4 * 70, {.window = 90}), 2, 0, kernels);
  compare_ring<T>(shape(1, 4 * 64, {.window = 64, .softcap = 3, .sinks = true}), 2, 0, kernels, {100, 1, 77});
  compare_ring<T>(shape(1, 6 * 50, {.window = 70, .scale = 0.3}), 3, 0, kernels, {130, 1, 3, 64});
}

inline AttentionShape ring_shape(std::int64_t batch, std::int64_t time, std::int64_t heads,
                                 std::int64_t kv_heads, std::int64_t head_size,
                                 const AttentionRule& rule = {}, std::int64_t value_size = 0) {
  return {.batch = batch,
          .time = time,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_size = head_size,
          .rule = rule,
          .value_size = value_size};
}

}  // namespace zg::test
