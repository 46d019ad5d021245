// The optimizers on the host. Each is one fused pass: for each element it reads the gradient, the master
// weight and the moments once, and writes the master, the moments and the rounded weight once.
//
// Blocking, from any thread, parallel (parallel_for). Every output has the same bits on every instruction
// set, for any alignment and any number of threads: the arithmetic is additions, products, quotients and
// square roots, each rounded once to S (never contracted to FMA), in the order written here. S is float, or
// double for a model in f64. Constants (UpdateConstants) are computed in double and rounded once.
//
//   g = grad * grad_scale
//
//   Adam       g = g + l2 * master                           (only if not decoupled)
//              m = beta1 * m + one_minus_beta1 * g
//              v = beta2 * v + (one_minus_beta2 * g) * g
//              master = decay * master                       (only if decoupled)
//              master = master - (step_size * m) / (sqrt(v) * inv_sqrt_correction2 + eps)
//   SGD        g = g + l2 * master
//              m = momentum * m + one_minus_dampening * g    (with a moment; in the first step the factor
//                                                            is 1, as in torch)
//              g = nesterov ? g + momentum * m : m           (with a moment)
//              master = master - step_size * g
//   Lion       u = beta1 * m + one_minus_beta1 * g
//              m = beta2 * m + one_minus_beta2 * g
//              master = decay * master
//              master = master - (step_size with the sign of u; u itself where it is zero or NaN)
//
//   weight = master, rounded to nearest, ties away from zero in bf16 (see below), to even in f16
//
// A NaN in a master, a weight or a moment narrower than S is always the same quiet NaN. In moments of format
// kFull it is the NaN that the processor makes. All other bits are specified.
//
// Master formats (MasterFormat). A weight in bf16 is the fp32 master, rounded to nearest. With kSplit the low
// 16 bits of the master are kept in addition to the weight, and the two restore it exactly: its high half is
// the weight, less one if the low half is 0x8000 or more, since the weight was rounded up then. This is why
// ties round away from zero, in all formats. With ties to even, half of the ties would round up and half
// down, both with the low half 0x8000, and the master could not be restored.
//
// Moments (MomentFormat) are decoded to fp32, updated, and encoded again:
//   kBf16  rounded stochastically to bf16: 16 random bits are added to the low half of the fp32 number
//          (update_random.hpp), which is then cut off. The expectation is exact. Infinities and NaNs stay.
//   kInt8  see update_int8.hpp.
#pragma once
#include <cstdint>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

using namespace kernels;

// Ends the process if the arguments are wrong, which is a bug of the caller. It must hold that p.step >= 1;
// for Adam that p.eps > 0, also when rounded to S; for f64 that all formats are kFull and all arrays f64.
// Every device's update calls it.
void check_update(const UpdateArrays& arrays, const StateFormat& format, const UpdateParams& p);

// Updates n elements, beginning with element p.first_element of the parameter.
void update(std::int64_t n, const UpdateArrays& arrays, const StateFormat& format, const UpdateParams& p);

}  // namespace zg::host
