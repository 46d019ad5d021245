// The instruction sets that Highway compiles the optimizers for: the minimum of the build, AVX2 and AVX-512;
// NEON on Arm. The sets in between would gain nothing measurable, and each costs a compilation of every pass.
// No vectors of unknown width (SVE, RVV), because classes keep vectors as members. To be included before
// hwy/foreach_target.h.
#pragma once
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
