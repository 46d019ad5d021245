// Rules for operands that several ops share, and the conversion of views to the typed pointers that kernels
// take. An operand that breaks a rule ends the process. The rules do not know the backend; properties of it
// that they depend on are arguments.
#pragma once
#include <cstdint>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/arguments.hpp"

namespace zg::checked {

using namespace kernels;

inline DType acc_of(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// The view must have this type and shape.
inline void expect(const View& v, const char* name, DType dtype, std::int64_t rows, std::int64_t cols) {
  ZG_ASSERT(v.dtype == dtype && v.rows == rows && v.cols == cols, "{} is {} [{}, {}], expected {} [{}, {}]",
            name, name_of(v.dtype), v.rows, v.cols, name_of(dtype), rows, cols);
  ZG_ASSERT(v.data != nullptr || v.count() == 0, "{} is null", name);
  ZG_ASSERT(v.ld >= v.cols || v.rows <= 1, "{}: rows of {} elements, {} apart", name, v.cols, v.ld);
}

// Calls f<T>() with T = this storage type.
template <class F>
void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF32:
      return f.template operator()<float>();
    case DType::kBF16:
      return f.template operator()<bf16>();
    case DType::kF16:
      return f.template operator()<fp16>();
    case DType::kF64:
      return f.template operator()<double>();
    default:
      ZG_ASSERT(false, "no kernel for {}", name_of(dtype));
  }
}

template <class T>
Strided<T> strided(const View& v) {
  return v.data == nullptr ? Strided<T>() : Strided<T>(v.as<T>(), v.ld);
}

inline Extent extent_of(const View& v) {
  return {v.rows, v.cols};
}

// The view must have `count` elements, without gaps.
inline void expect_dense(const View& v, const char* name, std::int64_t count) {
  ZG_ASSERT(v.count() == count && (v.rows <= 1 || v.ld == v.cols),
            "{} is [{}, {}] with rows {} apart, expected {} in one piece", name, v.rows, v.cols, v.ld, count);
  ZG_ASSERT(v.data != nullptr || count == 0, "{} is null", name);
}

inline void expect_dense(const View& v, const char* name, DType dtype, std::int64_t count) {
  ZG_ASSERT(v.dtype == dtype, "{} is {}, expected {}", name, name_of(v.dtype), name_of(dtype));
  expect_dense(v, name, count);
}

inline void expect_scratch(const View& scratch, std::int64_t bytes) {
  ZG_ASSERT(scratch.count() >= bytes && (scratch.data != nullptr || bytes == 0),
            "attention needs {} bytes of scratch, given {}", bytes, scratch.count());
}
// Scratch of sums over rows must have at least `cols` columns; wider scratch, such as LayerNorm's, will do.
inline void expect_row_scratch(const View& scratch, DType dtype, std::int64_t groups, std::int64_t cols) {
  ZG_ASSERT_GE(scratch.cols, cols);
  expect(scratch, "scratch", dtype, groups, scratch.cols);
}
inline void expect_quantized(const View& values, int bits, const View& codes) {
  ZG_ASSERT(bits == 8 || bits == 4, "codes of {} bits", bits);
  expect_dense(values, "values", values.count());
  expect_dense(codes, "codes", DType::kU8, quantized_bytes(values.count(), bits));
  ZG_ASSERT_EQ(reinterpret_cast<std::uintptr_t>(codes.data) % 4, 0u);
}
inline void expect_coded(const DecodeArgs& a) {
  const CodeFormat& f = a.format;
  const std::int64_t rows = a.out.rows, cols = a.out.cols, blocks = f.blocks(rows, cols);
  const bool int4 = f.code == WeightCode::kInt4, nested = f.scale == CodeScale::kNested;
  ZG_ASSERT(f.block_rows > 0 && f.block_cols > 0 && f.nested_block > 0, "blocks of {} x {} elements",
            f.block_rows, f.block_cols);
  // A block begins at a whole byte.
  ZG_ASSERT(f.block_cols % 2 == 0 || f.row_blocks(rows, cols) <= 1, "blocks of {} columns", f.block_cols);
  ZG_ASSERT(!f.is_flat() || f.block_rows == 1, "a block of {} rows", f.block_rows);
  expect_dense(a.out, "out", rows * cols);
  expect_dense(a.codes, "codes", DType::kU8, f.code_bytes(rows, cols));
  expect_dense(a.scales, "scales", scale_type(f.scale), blocks);
  ZG_ASSERT(int4 || (!a.zeros && !a.groups), "zero points or groups of a code that has none");
  if (a.zeros) expect_dense(a.zeros, "zeros", DType::kU8, blocks);
  if (a.groups) expect_dense(a.groups, "groups", DType::kI32, cols);
  ZG_ASSERT(nested || (!a.nested_levels && !a.nested_scales), "nested operands of scales that are numbers");
  if (!nested) return;
  expect_dense(a.nested_levels, "nested_levels", DType::kF32, 256);
  expect_dense(a.nested_scales, "nested_scales", DType::kF32, f.nested_blocks(rows, cols));
}
inline CodedMatrix coded_matrix(const DecodeArgs& a) {
  const auto optional = []<class T>(const View& v, T) -> const T* { return v ? v.as<T>() : nullptr; };
  return {.format = a.format,
          .rows = a.out.rows,
          .cols = a.out.cols,
          .codes = a.codes.as<std::uint8_t>(),
          .scales = a.scales.data,
          .zeros = optional(a.zeros, std::uint8_t{}),
          .groups = optional(a.groups, std::int32_t{}),
          .nested_levels = optional(a.nested_levels, float{}),
          .nested_scales = optional(a.nested_scales, float{}),
          .nested_offset = a.nested_offset};
}
// Libraries refuse a leading dimension that is too small, even if there is only one row.
inline void expect_leading_dimension(const View& v) {
  ZG_ASSERT_GE(v.ld, v.cols);
}
inline bool has_epilogue(const GemmOptions& o) {
  return o.bias || o.addend || o.gelu_input || o.gelu_backward;
}
inline void check_epilogue(const GemmOptions& o, DType t, const View& c) {
  if (!has_epilogue(o)) return;
  expect(c, "c", t, c.rows, c.cols);
  ZG_ASSERT(!o.accumulate,
            "a bias, or what else is added to a product, would be added once more with every accumulation");
  if (o.bias) expect(o.bias, "bias", t, 1, c.cols);
  for (const View& v : {o.addend, o.gelu_input, o.gelu_backward}) {
    if (!v) continue;
    expect(v, "an operand of the epilogue", t, c.rows, c.cols);
    expect_leading_dimension(v);
    ZG_ASSERT(v.data != c.data, "an operand of the epilogue is C itself");
  }
  ZG_ASSERT(!o.addend + !o.gelu_input + !o.gelu_backward >= 2, "more than one of addend and gelu");
  ZG_ASSERT(!o.gelu_backward || !o.bias, "a bias has no place in a backward");
}
inline void check_bias_gradient(const GemmOptions& o, DType t, const View& c, std::int64_t row_groups) {
  if (!o.bias_gradient) return;
  const DType a = acc_of(t);
  ZG_ASSERT(o.a == Trans::kYes && !has_epilogue(o),
            "the gradient of a bias comes with that of a weight, and nothing else");
  expect(c, "c", a, c.rows, c.cols);
  expect(o.bias_gradient, "bias_gradient", a, 1, c.rows);
  expect_row_scratch(o.scratch, a, row_groups, c.rows);
}

inline void expect_part(const VocabShard& part, std::int64_t rows) {
  ZG_ASSERT(part.first >= 0 && part.first + (part.whole > 0 ? rows : 0) <= part.whole,
            "{} rows from row {} on, of {}", rows, part.first, part.whole);
}
// Calls f with the typed operands of cross_entropy().
template <class F>
void with_loss(const CrossEntropyArgs& args, const F& f) {
  const View &logits = args.logits, &dlogits = args.dlogits;
  const DType t = dlogits ? dlogits.dtype : logits.dtype;
  expect(logits, "logits", acc_of(t), logits.rows, logits.cols);
  expect(args.targets, "targets", DType::kI32, 1, logits.rows);
  expect(args.loss_sum, "loss_sum", DType::kF64, 1, 1);
  expect(args.scratch, "scratch", DType::kF64, 1, Ops::kSumPartials);
  if (dlogits) expect(dlogits, "dlogits", t, logits.rows, logits.cols);
  with_type(t, [&]<class T>() {
    f(CrossEntropy<T>{.logits = strided<Acc<T>>(logits),
                      .targets = args.targets.as<std::int32_t>(),
                      .loss_sum = args.loss_sum.as<double>(),
                      .dlogits = strided<T>(dlogits),
                      .scratch = args.scratch.as<double>(),
                      .scale = args.scale,
                      .softcap = args.softcap});
  });
}
inline void expect_heads(const View& v, DType t, std::int64_t rows, std::int64_t heads,
                         std::int64_t head_size) {
  ZG_ASSERT(heads >= 1 && head_size >= 1 && heads * head_size <= v.cols, "{} heads of {} in {} columns",
            heads, head_size, v.cols);
  ZG_ASSERT_LT(rows * heads, std::int64_t{1} << 31);
  expect(v, "an operand of head_rmsnorm", t, rows, v.cols);
}
inline void expect_rope_table(const RopeTable& table, std::int64_t head_size) {
  ZG_ASSERT(table.pairs >= 0 && table.pairs <= kMaxRopePairs && table.first_column >= 0 &&
                table.first_column + 2 * table.pairs <= head_size,
            "{} pairs of columns turn, from column {} of heads of {}", table.pairs, table.first_column,
            head_size);
}
inline void expect_latent_heads(const LatentHeads& x, const View& joint, const View& shared, const View& kv) {
  ZG_ASSERT(x.heads >= 1 && x.plain >= 1 && x.shared >= 1 && x.value >= 1,
            "{} heads, keys of {} and {} columns, values of {}", x.heads, x.plain, x.shared, x.value);
  expect(joint, "joint", kv.dtype, kv.rows, x.joint_columns());
  expect(shared, "shared", kv.dtype, kv.rows, x.shared);
  expect(kv, "kv", kv.dtype, kv.rows, x.kv_columns());
}
// Returns null if there are no documents.
inline const std::int32_t* expect_first_keys(const View& first_keys, std::int64_t rows) {
  if (!first_keys) return nullptr;
  expect(first_keys, "first_keys", DType::kI32, 1, rows);
  return first_keys.as<std::int32_t>();
}
inline AttentionShape with_documents(AttentionShape shape, const std::int32_t* first_keys) {
  shape.documents = shape.documents || first_keys != nullptr;
  return shape;
}
inline void expect_rule(const AttentionRule& rule) {
  ZG_ASSERT(rule.window >= 0 && rule.scale >= 0 && rule.softcap >= 0,
            "attention with a window of {}, scale {}, softcap {}", rule.window, rule.scale, rule.softcap);
}
inline void expect_attention(const View& qkv, const AttentionShape& shape, const View& o, const View& lse) {
  expect_rule(shape.rule);
  const std::int64_t tokens = shape.batch * shape.time;
  ZG_ASSERT_GE(shape.kv_heads, 1);
  ZG_ASSERT_EQ(shape.heads % shape.kv_heads, 0);
  expect(qkv, "qkv", qkv.dtype, tokens, shape.qkv_columns());
  expect(o, "o", qkv.dtype, tokens, shape.result_columns());
  expect(lse, "lse", acc_of(qkv.dtype), shape.batch * shape.heads, shape.time);
  expect_dense(lse, "lse", lse.count());
}
inline void expect_sinks(const View& sinks, bool wanted, DType t, std::int64_t heads) {
  ZG_ASSERT_EQ(static_cast<bool>(sinks), wanted);
  if (sinks) expect(sinks, "sinks", t, 1, heads);
}
inline void expect_block(const View& q, const View& kv, const AttentionBlock& b, const View& lse,
                         const View& first_keys) {
  expect_rule(b.rule);
  ZG_ASSERT((b.rule.window == 0 && !first_keys) ||
                (b.query_positions.time == b.queries && b.key_positions.time == b.keys),
            "positions of {} queries and {} keys, of which there are {} and {}", b.query_positions.time,
            b.key_positions.time, b.queries, b.keys);
  ZG_ASSERT_GE(b.kv_heads, 1);
  ZG_ASSERT_EQ(b.heads % b.kv_heads, 0);
  ZG_ASSERT(!b.causal || b.keys == b.queries,
            "{} queries up to the keys of their numbers, of which there are {}", b.queries, b.keys);
  ZG_ASSERT(b.query_step >= b.queries && b.key_step >= b.keys, "sequences overlap");
  expect(q, "q", q.dtype, b.query_rows(), b.heads * b.head_size);
  expect(kv, "kv", q.dtype, b.key_rows(), b.kv_columns());
  expect(lse, "lse", acc_of(q.dtype), b.batch * b.heads, b.queries);
}

// gate_up with gates in the left half of its columns and ups in the right, for a result y.
inline void expect_halves(const View& gate_up, Gate activation, const View& y) {
  ZG_ASSERT(activation != Gate::kClampedPairs, "gates and ups in pairs");
  expect(gate_up, "gate_up", y.dtype, y.rows, 2 * y.cols);
}

}  // namespace zg::checked
