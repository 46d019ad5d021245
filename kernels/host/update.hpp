// The optimizers of the host, each one fused pass: per parameter it reads a gradient, the master weight and
// the moments once, and writes the last two and the rounded weight once.
//
// Blocking, any thread, threaded by parallel_for. The bits of every output are the same on every instruction
// set, for any alignment and for any number of threads: the arithmetic is additions, products, quotients and
// square roots, each rounded once to S (never contracted), in the order written here. S is float, or double
// for a model in f64. Constants (UpdateConstants) are computed in double and rounded once.
//
//   g = grad * grad_scale
//
//   Adam       g = g + l2 * master                           (only if not decoupled)
//              m = beta1 * m + one_minus_beta1 * g
//              v = beta2 * v + (one_minus_beta2 * g) * g
//              master = decay * master                       (only if decoupled)
//              master = master - (step_size * m) / (sqrt(v) * inv_sqrt_correction2 + eps)
//   SGD        g = g + l2 * master
//              m = momentum * m + rest * g                   (with a moment; rest: 1 - dampening, 1 in the
//                                                            first step, as torch does)
//              g = nesterov ? g + momentum * m : m           (with a moment)
//              master = master - step_size * g
//   Lion       u = beta1 * m + one_minus_beta1 * g
//              m = beta2 * m + one_minus_beta2 * g
//              master = decay * master
//              master = master - (step_size with the sign of u; u itself where it is zero or NaN)
//
//   weight = master, rounded to nearest, ties away from zero in bf16 (see below), to even in f16
//
// A NaN in a master or a weight is one quiet NaN, and so it is in narrow moments. Whole moments keep the NaN
// that the machine makes: which one is the only thing that is left open.
//
// Master formats (MasterFormat). A weight in bf16 is the fp32 master, rounded to nearest. With kSplit the low
// 16 bits of the master are kept beside it, and from these two the master comes back exactly: its high half is
// the weight, less one where the low half is 0x8000 or more, since then it was rounded up. That is why ties
// go away from zero here, in all formats: to-even would round half of the ties up and half down, with the same
// low half, so that the master could not be told any more.
//
// Moments (MomentFormat), computed in fp32 from what was kept, kept anew:
//   kBf16  rounded stochastically to bf16 by 16 random bits, added to the fp32 bits below the last that stays
//          (update_random.hpp): of expectation exact. An infinity or a NaN stays one.
//   kInt8  see update_int8.hpp.
#pragma once
#include <cstdint>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

using namespace kernels;

// p.step >= 1; with Adam p.eps > 0, also when rounded to S. Of f64 only kFull, and all arrays are f64.
// Ends the process otherwise: whoever calls it has a bug. For other devices' update(), too.
void check_update(const UpdateArrays& arrays, const StateFormat& format, const UpdateParams& p);

void update(std::int64_t n, const UpdateArrays& arrays, const StateFormat& format, const UpdateParams& p);

}  // namespace zg::host
