// Attention with windows, scales, caps and documents: what must hold of the kernels of any device. Kernels: a
// type with forward(AttentionRun<T>&) and backward(AttentionRun<T>&), which compute o and lse, and dqkv.
#pragma once
#include <string>

#include "tests/kernels/attention_reference.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/visible_keys.hpp"

namespace zg::test {

// For each row of `batch` sequences the first row of its document. A sequence is cut into documents of these
// lengths, over and over; sequence b begins with length number b, and the last document ends with the
// sequence.
inline std::vector<std::int32_t> first_keys_of(std::int64_t batch, std::int64_t time,
                                               const std::vector<std::int64_t>& lengths) {
  std::vector<std::int32_t> first;
  for (std::int64_t b = 0; b < batch && !lengths.empty(); ++b) {
    std::int64_t begin = 0, n = b;
    for (std::int64_t t = 0; t < time; ++t) {
      if (t == begin + lengths[static_cast<std::size_t>(n) % lengths.size()]) begin = t, ++n;
      first.push_back(static_cast<std::int32_t>(begin));
    }
  }
  return first;
}

// One call of attention and one of its backward, with rows `gap` elements apart, and NaNs where results go.
template <class T>
struct AttentionRun {
  AttentionRun(const AttentionShape& s, std::vector<std::int32_t> firsts, std::int64_t gap = 8)
      : shape(s),
        first_keys(std::move(firsts)),
        qkv(s.batch * s.time, s.qkv_columns(), gap),
        o(s.batch * s.time, s.result_columns(), gap),
        d_o(o.rows(), o.cols(), gap),
        dqkv(qkv.rows(), qkv.cols(), gap),
        sinks(1, s.rule.sinks ? s.heads : 0),
        d_sinks(1, sinks.cols()),
        lse(static_cast<std::size_t>(s.batch * s.heads * s.time), static_cast<Acc<T>>(NAN)) {
    shape.documents = !first_keys.empty();
    auto random = generator(static_cast<std::uint64_t>(s.time * 1000 + s.head_size));
    qkv.fill_normal(random, 0, 1.5), d_o.fill_normal(random);
    o.fill(NAN), dqkv.fill(NAN);
    auto of_heads = generator(77);
    sinks.fill_normal(of_heads, 0.5, 2);
  }
  std::vector<double> sink_values() const {
    std::vector<double> values;
    for (std::int64_t h = 0; h < sinks.cols(); ++h) values.push_back(sinks.get(0, h));
    return values;
  }
  kernels::AttentionSinksBackward<T> sinks_backward() {
    return {.batch = shape.batch,
            .time = shape.time,
            .heads = shape.heads,
            .value_size = shape.values(),
            .o = o,
            .d_o = d_o,
            .lse = {lse.data(), shape.time},
            .sinks = sinks.data(),
            .d_sinks = d_sinks.data()};
  }
  const std::int32_t* documents() const { return first_keys.empty() ? nullptr : first_keys.data(); }

  AttentionShape shape;
  std::vector<std::int32_t> first_keys;
  Matrix<T> qkv, o, d_o, dqkv, sinks;
  Matrix<Acc<T>> d_sinks;  // to which a backward adds
  std::vector<Acc<T>> lse;
};

struct RuleCase {
  AttentionRule rule;
  std::vector<std::int64_t> lengths;  // of documents; none: whole sequences
};
inline std::string text_of(const AttentionShape& s, const RuleCase& x) {
  return fmt::format("B {} T {} heads {}/{} of {}/{}, window {} scale {} cap {} sinks {}, documents of {}",
                     s.batch, s.time, s.heads, s.kv_heads, s.head_size, s.values(), x.rule.window,
                     x.rule.scale, x.rule.softcap, x.rule.sinks, testing::PrintToString(x.lengths));
}

// Windows of one, odd, of a tile, larger than a sequence; caps that matter; documents that are ragged, of
// length one, of tiles, whole; and all at once.
inline const RuleCase kRuleCases[] = {
    {{.window = 1}, {}},
    {{.window = 5}, {}},
    {{.window = 64}, {}},
    {{.window = 77}, {}},
    {{.window = 5000}, {}},
    {{.scale = 0.21}, {}},
    {{.softcap = 3}, {}},
    {{.scale = 0.4, .softcap = 1.5}, {}},
    {{}, {1}},
    {{}, {7, 1, 1, 70, 3, 130}},
    {{}, {64}},
    {{}, {5000}},
    {{.window = 9}, {31, 2, 100}},
    {{.window = 70, .scale = 0.3, .softcap = 4}, {90, 1, 33}},
    {{.sinks = true}, {}},
    {{.window = 9, .scale = 0.3, .softcap = 4, .sinks = true}, {31, 2, 100}},
};

// With the bounds of tensor cores, on which probabilities and the gradients of scores are rounded to T.
template <class T, class Kernels>
void compare_rule(const AttentionShape& sizes, const RuleCase& x, Kernels kernels, std::int64_t gap = 8) {
  SCOPED_TRACE(text_of(sizes, x));
  AttentionShape shape = sizes;
  shape.rule = x.rule;
  AttentionRun<T> run(shape, first_keys_of(shape.batch, shape.time, x.lengths), gap);
  kernels.forward(run);
  kernels.backward(run);
  const AttentionReference want(shape, run.qkv, run.d_o, run.first_keys, run.sink_values());
  expect_near(run.o, want.o, want.o_size, want.template o_bound<T>(), "o");
  for (std::size_t i = 0; i < run.lse.size(); ++i)
    ASSERT_NEAR(static_cast<double>(run.lse[i]), want.lse[i], arithmetic_error<T>() * want.worst)
        << "lse " << i;
  expect_near(run.dqkv, want.dqkv, want.dqkv_size, want.template dqkv_bound<T>(), "dqkv");
  for (std::size_t h = 0; h < want.sinks.size(); ++h) {
    const double bound = want.template dqkv_bound<T>() * want.d_sinks_size[h] + least_error<T>();
    EXPECT_NEAR(static_cast<double>(run.d_sinks.get(0, static_cast<std::int64_t>(h))), want.d_sinks[h], bound)
        << "the sink of head " << h;
  }
  run.o.expect_gaps_intact("o"), run.dqkv.expect_gaps_intact("dqkv");
}

// A pack of documents is its documents one by one, in any order.
template <class Kernels>
void expect_pack_is_its_documents(Kernels kernels, const std::vector<std::int64_t>& lengths,
                                  const AttentionRule& rule) {
  std::int64_t time = 0;
  for (const std::int64_t n : lengths) time += n;
  const AttentionShape shape{
      .batch = 1, .time = time, .heads = 4, .kv_heads = 2, .head_size = 6, .rule = rule};
  AttentionRun<double> pack(shape, first_keys_of(1, time, lengths));
  kernels.forward(pack);
  kernels.backward(pack);
  std::int64_t first = 0;
  for (const std::int64_t n : lengths) {
    SCOPED_TRACE(testing::Message() << "document of " << n << " rows from " << first << " on");
    AttentionShape alone = shape;
    alone.time = n;
    AttentionRun<double> one(alone, {});
    for (std::int64_t r = 0; r < n; ++r) {
      for (std::int64_t c = 0; c < one.qkv.cols(); ++c) one.qkv.at(r, c) = pack.qkv.at(first + r, c);
      for (std::int64_t c = 0; c < one.d_o.cols(); ++c) one.d_o.at(r, c) = pack.d_o.at(first + r, c);
    }
    kernels.forward(one);
    kernels.backward(one);
    for (std::int64_t r = 0; r < n; ++r) {
      // Sums of at most 300 terms of some units.
      for (std::int64_t c = 0; c < one.o.cols(); ++c)
        ASSERT_NEAR(one.o.at(r, c), pack.o.at(first + r, c), 1e-12) << "o " << r << ", " << c;
      for (std::int64_t c = 0; c < one.dqkv.cols(); ++c)
        ASSERT_NEAR(one.dqkv.at(r, c), pack.dqkv.at(first + r, c), 1e-11) << "dqkv " << r << ", " << c;
    }
    first += n;
  }
}

// Gradients in fp64 against central differences.
template <class Kernels>
void expect_derivative(Kernels kernels, const RuleCase& x) {
  const AttentionShape shape{
      .batch = 2, .time = 7, .heads = 2, .kv_heads = 1, .head_size = 3, .rule = x.rule};
  SCOPED_TRACE(text_of(shape, x));
  AttentionRun<double> run(shape, first_keys_of(2, 7, x.lengths)), other = run;
  kernels.forward(run);
  kernels.backward(run);
  const auto value = [&] {
    kernels.forward(other);
    double sum = 0;
    for (std::int64_t r = 0; r < other.o.rows(); ++r) {
      for (std::int64_t c = 0; c < other.o.cols(); ++c) sum += other.o.get(r, c) * other.d_o.get(r, c);
    }
    return sum;
  };
  for (std::int64_t r = 0; r < run.qkv.rows(); ++r) {
    for (std::int64_t c = 0; c < run.qkv.cols(); ++c)
      // Rounding a sum of order 10 costs 1e-9, and the step some 1e-10 times a third derivative.
      ASSERT_NEAR(run.dqkv.get(r, c), slope(other.qkv.at(r, c), value), 1e-7) << r << ", " << c;
  }
  for (std::int64_t h = 0; h < run.sinks.cols(); ++h)
    ASSERT_NEAR(run.d_sinks.get(0, h), slope(other.sinks.at(0, h), value), 1e-7) << "the sink of head " << h;
}

// The rows of one tile and the columns of q, k or v.
template <class T>
void fill_tile(Matrix<T>& m, std::int64_t tile, std::int64_t rows, std::int64_t first, std::int64_t cols,
               double value) {
  for (std::int64_t r = tile * rows; r < std::min(m.rows(), (tile + 1) * rows); ++r) {
    for (std::int64_t c = first; c < first + cols; ++c) m.set(r, c, value);
  }
}
template <class T>
bool has_nan(const Matrix<T>& m, std::int64_t tile, std::int64_t rows, std::int64_t first,
             std::int64_t cols) {
  for (std::int64_t r = tile * rows; r < std::min(m.rows(), (tile + 1) * rows); ++r) {
    for (std::int64_t c = first; c < first + cols; ++c) {
      if (std::isnan(m.get(r, c))) return true;
    }
  }
  return false;
}

// Which tiles of queries and keys are computed, with so many rows each: exactly those of which some query
// attends to some key. A NaN shows it: what is computed and then masked still has it, as 0 * NaN. Each tile
// of keys in turn has NaNs as values (forward), as keys (the backward's gradients of queries), and each tile
// of queries as the gradients of o (the backward's gradients of values).
struct TileSizes {
  std::int64_t queries, keys;
};
template <class T, class Kernels>
void expect_computed_tiles(const RuleCase& x, std::int64_t time, std::int64_t size, Kernels kernels,
                           TileSizes forward, TileSizes of_queries, TileSizes of_keys) {
  const AttentionShape shape{
      .batch = 1, .time = time, .heads = 1, .kv_heads = 1, .head_size = size, .rule = x.rule};
  SCOPED_TRACE(text_of(shape, x));
  const AttentionRun<T> clean(shape, first_keys_of(1, time, x.lengths));
  const auto visible = [&](TileSizes tile, std::int64_t i, std::int64_t j) {
    for (std::int64_t q = i * tile.queries; q < std::min(time, (i + 1) * tile.queries); ++q) {
      for (std::int64_t k = j * tile.keys; k <= std::min(q, (j + 1) * tile.keys - 1); ++k) {
        if (x.rule.window > 0 && q - x.rule.window >= k) continue;
        if (clean.first_keys.empty() || k >= clean.first_keys[static_cast<std::size_t>(q)]) return true;
      }
    }
    return false;
  };
  const auto count = [time](std::int64_t tile) { return (time + tile - 1) / tile; };
  for (std::int64_t j = 0; j < count(forward.keys); ++j) {
    AttentionRun<T> run = clean;
    fill_tile(run.qkv, j, forward.keys, 2 * size, size, NAN);
    kernels.forward(run);
    for (std::int64_t i = 0; i < count(forward.queries); ++i) {
      ASSERT_EQ(has_nan(run.o, i, forward.queries, 0, size), visible(forward, i, j))
          << "forward, tile " << i << " of queries, " << j << " of keys";
    }
  }
  AttentionRun<T> known = clean;
  kernels.forward(known);
  for (std::int64_t j = 0; j < count(of_queries.keys); ++j) {
    AttentionRun<T> run = known;
    fill_tile(run.qkv, j, of_queries.keys, size, size, NAN);
    kernels.backward(run);
    for (std::int64_t i = 0; i < count(of_queries.queries); ++i) {
      ASSERT_EQ(has_nan(run.dqkv, i, of_queries.queries, 0, size), visible(of_queries, i, j))
          << "gradients of queries, tile " << i << " of queries, " << j << " of keys";
    }
  }
  for (std::int64_t i = 0; i < count(of_keys.queries); ++i) {
    AttentionRun<T> run = known;
    fill_tile(run.d_o, i, of_keys.queries, 0, size, NAN);
    kernels.backward(run);
    for (std::int64_t j = 0; j < count(of_keys.keys); ++j) {
      ASSERT_EQ(has_nan(run.dqkv, j, of_keys.keys, 2 * size, size), visible(of_keys, i, j))
          << "gradients of values, tile " << i << " of queries, " << j << " of keys";
    }
  }
}

}  // namespace zg::test
