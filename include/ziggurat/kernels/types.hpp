// Parameter types that the kernels and the op set share.
#pragma once
#include <array>
#include <cstdint>

#include "ziggurat/base/dtype.hpp"

namespace zg {

enum class Trans : bool { kNo, kYes };

// The positions of rows in their sequences. Each sequence has `time` consecutive rows here: row r is row t =
// r % time of its sequence, at position t. With context parallelism these rows are two ranges of a longer
// sequence: the first half of them is at positions t + early, the second half at t + late.
struct RowPositions {
  constexpr RowPositions(std::int64_t rows = 1, std::int64_t first = 0, std::int64_t second = 0)  // NOLINT
      : time(rows), early(first), late(second) {}
  std::int64_t time, early, late;
  constexpr std::int64_t of(std::int64_t row) const { return at(row % time); }
  // The position of row t of the first sequence.
  constexpr std::int64_t at(std::int64_t t) const { return t + (2 * t < time ? early : late); }
  // The number of a sequence's rows whose position is below `position`.
  constexpr std::int64_t rows_before(std::int64_t position) const {
    const std::int64_t half = (time + 1) / 2, in_early = position - early, in_late = position - late;
    if (in_early < half) return in_early < 0 ? 0 : in_early;
    return in_late < half ? half : in_late < time ? in_late : time;
  }
  // One more than the last position among the first `rows` rows.
  constexpr std::int64_t end(std::int64_t rows) const {
    return rows == 0 ? 0 : of((rows < time ? rows : time) - 1) + 1;
  }
  bool operator==(const RowPositions&) const = default;
};

// Which keys a query sees, and how scores are computed. The defaults are plain causal attention.
struct AttentionRule {
  std::int64_t window = 0;  // query i sees key j only where i - window < j (the token itself counts); 0: all
  double scale = 0;         // factor of the products of queries and keys; 0: 1/sqrt(head_size)
  double softcap = 0;       // scores become softcap * tanh(score / softcap) before the mask; 0: no cap
  // Each head has a learned score, its sink, which joins the scores of every query of the head. It has no
  // value vector: it only adds its exponential to the softmax's denominator.
  bool sinks = false;
  bool operator==(const AttentionRule&) const = default;
};

// batch sequences of `time` tokens. heads is a multiple of kv_heads (grouped-query attention).
struct AttentionShape {
  std::int64_t batch = 0, time = 0, heads = 0, kv_heads = 0, head_size = 0;
  AttentionRule rule = {};
  bool documents = false;  // the scratch memory must suffice for calls with documents (first_keys)
  // Columns of a head of values, and of a head of the result; 0: head_size, as of queries and keys.
  std::int64_t value_size = 0;
  constexpr std::int64_t values() const { return value_size == 0 ? head_size : value_size; }
  constexpr std::int64_t qkv_columns() const { return (heads + kv_heads) * head_size + kv_heads * values(); }
  constexpr std::int64_t result_columns() const { return heads * values(); }
  bool operator==(const AttentionShape&) const = default;
};

// Attention between blocks of rows: in each of `batch` sequences, `queries` rows attend to `keys` rows. The
// first query (key) of a sequence is `query_step` (`key_step`) rows after the first query (key) of the
// previous sequence.
struct AttentionBlock {
  std::int64_t batch = 0, queries = 0, keys = 0, query_step = 0, key_step = 0;
  std::int64_t heads = 0, kv_heads = 0, head_size = 0;  // as in AttentionShape
  bool causal = false;  // query i attends to keys 0 to i (queries == keys); else each query to all keys
  bool merge = false;   // merge the result into the one for other keys; else overwrite
  AttentionRule rule = {};
  // The positions of the block's queries and keys in their sequences; used only with a window or documents.
  // The results of queries that see none of the keys are left unchanged.
  RowPositions query_positions = {}, key_positions = {};
  std::int64_t value_size = 0;  // as in AttentionShape
  constexpr std::int64_t values() const { return value_size == 0 ? head_size : value_size; }
  constexpr std::int64_t kv_columns() const { return kv_heads * (head_size + values()); }
  constexpr std::int64_t result_columns() const { return heads * values(); }
  // The number of rows from the first row of the first sequence to the last row of the last one.
  std::int64_t query_rows() const { return batch == 0 ? 0 : (batch - 1) * query_step + queries; }
  std::int64_t key_rows() const { return batch == 0 ? 0 : (batch - 1) * key_step + keys; }
};

// The sizes of latent attention's heads (DeepSeek): a key has `plain` columns of its own and then `shared`
// columns that are the same for all heads; a value has `value` columns.
struct LatentHeads {
  std::int64_t heads = 0, plain = 0, shared = 0, value = 0;
  constexpr std::int64_t joint_columns() const { return heads * (plain + value); }
  constexpr std::int64_t key_columns() const { return heads * (plain + shared); }
  constexpr std::int64_t kv_columns() const { return key_columns() + heads * value; }
};

inline constexpr std::int64_t kMaxRopePairs = 256;

// Rotary embedding of heads: of a head's 2 * pairs columns from first_column on, each pair i is rotated by
// the angle position * frequency[i] and multiplied by the amplitude. Pair i is columns (i, i + pairs) of
// these or, if they are interleaved, columns (2 i, 2 i + 1). A head's other columns stay unchanged.
struct RopeTable {
  std::int64_t pairs = 0;
  double amplitude = 1;
  std::int64_t first_column = 0;
  bool interleaved = false;
  std::array<double, kMaxRopePairs> frequency = {};  // radians from one position to the next
  bool operator==(const RopeTable&) const = default;
};

// The update rule; kernels/host/update.hpp has the formulae.
enum class OptimizerKind : std::uint8_t { kAdam, kSgd, kLion };

// How the fp32 master weight is kept.
//   kFull   as a whole fp32 number; the weight is a separate, rounded copy
//   kSplit  the bf16 weight is the rounded high half, and the low 16 bits are a separate array: the master is
//           exact, and no bit is kept twice
enum class MasterFormat : std::uint8_t { kFull, kSplit };

// How the moments are kept.
//   kFull  fp32
//   kBf16  bf16, rounded stochastically
//   kInt8  8-bit codes with an fp32 scale for each block of kQuantBlock elements
enum class MomentFormat : std::uint8_t { kFull, kBf16, kInt8 };

// Elements of a quantisation block. Blocks are counted from the first element of the parameter.
inline constexpr std::int64_t kQuantBlock = 256;

// The state that an optimizer keeps for each element of a parameter.
struct StateFormat {
  OptimizerKind kind = OptimizerKind::kAdam;
  MasterFormat master = MasterFormat::kFull;
  MomentFormat moments = MomentFormat::kFull;
  int moment_count = 2;      // Adam 2 (m, v); Lion 1; SGD 1, or 0 without momentum
  DType full = DType::kF32;  // type of masters and moments in format kFull: f32, or f64 for a model in f64
  bool operator==(const StateFormat&) const = default;
};

// The types in which masters (kSplit: their low halves) and moments (kInt8: their codes) are stored.
constexpr DType stored_master_type(const StateFormat& format) {
  return format.master == MasterFormat::kSplit ? DType::kU16 : format.full;
}
constexpr DType stored_moment_type(const StateFormat& format) {
  return format.moments == MomentFormat::kInt8   ? DType::kU8
         : format.moments == MomentFormat::kBf16 ? DType::kBF16
                                                 : format.full;
}

// The rows of a split vocabulary table that are held here: rows first, first + 1, ... of `whole` rows in all.
// whole 0: the table is not split. only: output rows of tokens that are not held here stay unchanged, instead
// of becoming zero.
struct VocabShard {
  std::int64_t first = 0, whole = 0;
  bool only = false;
};

// The Philox key of a parameter's random numbers (base/philox.hpp).
struct RandomKey {
  std::uint32_t key[2] = {0, 0};
};

// Which elements dropout drops. Let c be an element's column in the whole row, and r word c mod 4 of the
// Philox block with the counter (c / 4, the row's position in its sequence, the number of the sequence,
// step). The element is kept if r is at least rate * 2^32, and is then divided by 1 - rate. So the mask is a
// pure function of an element's place in the batch: every rank that holds the row drops the same elements, in
// the forward pass, the backward pass and a recomputation.
struct Dropout {
  double rate = 0;  // [0, 1)
  RandomKey key = {};
  std::int64_t step = 0;            // below 2^32
  RowPositions positions = {};      // of rows that are counted from the first row of a sequence
  std::int64_t first_row = 0;       // number, in that count, of the view's first row
  std::int64_t first_sequence = 0;  // number of the sequence of row 0; all numbers are below 2^32
  std::int64_t first_column = 0;    // column of the whole row at which the view begins
  // For rows that are gathered by slot: the slot of each row of the view, in the device's memory. The row's
  // number in that count is then slots[r] / per_token, and first_row does not count. Null: rows are
  // consecutive.
  const std::int32_t* slots = nullptr;
  std::int64_t per_token = 1;
};

// The factor of an RMSNorm's normalised row: its weight w, or 1 + w (Gemma, whose weights begin at 0). 1 + w
// is computed in the type of the arithmetic.
enum class NormWeight : std::uint8_t { kPlain, kPlusOne };

// How a gated MLP makes its activation of gate and up, which lie in the left and in the right half of the
// columns:
//
//   kSilu         silu(gate) * up
//   kGeluTanh     the same with the tanh approximation of GELU (Gemma)
//
// Experts alone can have kClampedPairs (gpt-oss): gates lie in the even columns and ups in the odd ones, and
// the activation is g * sigmoid(kPairsSlope * g) * (u + 1), where g is gate, at most kPairsLimit, and u is
// up, between -kPairsLimit and kPairsLimit. Nothing flows back through a value that was clamped.
enum class Gate : std::uint8_t { kSilu, kGeluTanh, kClampedPairs };
inline constexpr double kPairsSlope = 1.702, kPairsLimit = 7;

struct UpdateParams {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999;   // Adam, Lion
  double eps = 1e-8;                   // Adam
  double weight_decay = 0;             // decoupled (AdamW, Lion), or an L2 term of the gradient (Adam, SGD)
  bool decoupled = true;               // Adam
  bool bias_correction = true;         // Adam
  double momentum = 0, dampening = 0;  // SGD
  bool nesterov = false;               // SGD
  std::int64_t step = 1;               // t in the bias correction, from 1
  double grad_scale = 1;               // factor of the gradient: 1/tokens, clipping, 1/loss scale
  // The step is skipped because a gradient overflowed. State does not change; with MasterFormat::kFull the
  // weight is rewritten from its master.
  bool skip = false;
  // For stochastic rounding: the parameter's key, and the index in the parameter of the arrays' first element
  // (a multiple of kQuantBlock unless moments are kFull).
  RandomKey random = {};
  std::int64_t first_element = 0;
};

}  // namespace zg
