// Parameters that kernels and the op set share.
#pragma once
#include <cstdint>

#include "ziggurat/base/dtype.hpp"

namespace zg {

enum class Trans : bool { kNo, kYes };

struct AttentionShape {
  std::int64_t batch = 0, time = 0, heads = 0, kv_heads = 0, head_size = 0;
};

// How an optimizer turns gradients into steps; kernels/host/update.hpp has the formulae.
enum class OptimizerKind : std::uint8_t { kAdam, kSgd, kLion };

// How the fp32 master weight is kept.
//   kFull   whole, beside a weight that is its rounded copy
//   kSplit  the bf16 weight is the rounded high half, the low 16 bits are kept beside it: nothing is lost,
//           and nothing is kept twice
enum class MasterFormat : std::uint8_t { kFull, kSplit };

// How the moments are kept.
//   kFull  fp32
//   kBf16  bf16, rounded stochastically
//   kInt8  8-bit codes with a fp32 scale for each block of kQuantBlock elements
enum class MomentFormat : std::uint8_t { kFull, kBf16, kInt8 };

inline constexpr std::int64_t kQuantBlock = 256;  // elements; blocks are counted from a parameter's first

// What an optimizer keeps for each parameter.
struct StateFormat {
  OptimizerKind kind = OptimizerKind::kAdam;
  MasterFormat master = MasterFormat::kFull;
  MomentFormat moments = MomentFormat::kFull;
  int moment_count = 2;        // Adam 2 (m, v), Lion 1, SGD 1 or 0 (without momentum)
  DType full = DType::kF32;    // of what is kept whole: f32, or f64 for a model in f64
  bool operator==(const StateFormat&) const = default;
};

// The Philox key of a parameter's random numbers (base/philox.hpp).
struct RandomKey {
  std::uint32_t key[2] = {0, 0};
};

// What is left out: element i (row-major, without gaps) stays where word i % 4 of the Philox block i / 4 of
// (key, counter) is at least rate * 2^32, and is then divided by 1 - rate. A function of these alone, so that
// a backward, or a forward that is run again, leaves out the same.
struct Dropout {
  double rate = 0;  // [0, 1)
  RandomKey key = {};
  std::uint64_t counter = 0;        // the high half of Philox's counter: step, layer, ... as the caller numbers them
  std::int64_t first_element = 0;  // of the view, in what the numbers are counted over; a multiple of 4
};

struct UpdateParams {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999;  // Adam, Lion
  double eps = 1e-8;                  // Adam
  double weight_decay = 0;            // decoupled (AdamW, Lion) or added to the gradient (Adam, SGD)
  bool decoupled = true;              // Adam
  bool bias_correction = true;        // Adam
  double momentum = 0, dampening = 0;  // SGD
  bool nesterov = false;               // SGD
  std::int64_t step = 1;               // t of the bias correction, from 1
  double grad_scale = 1;  // the gradient is multiplied by this first (1/tokens, clip factor, 1/loss scale)
  // The step is left out (its gradient overflowed): nothing changes, and a weight that is a copy of its
  // master is made anew from it.
  bool skip = false;
  // Of stochastic rounding: the parameter's key, and where in it the arrays begin (a multiple of kQuantBlock).
  RandomKey random = {};
  std::int64_t first_element = 0;
};

}  // namespace zg
