// The instruction sets that Highway compiles the kernels for: all but those with vectors of unknown width
// (SVE, RVV), because loop bodies keep vectors in their captures and in arrays. Arm runs NEON. To be
// included before hwy/foreach_target.h.
#pragma once
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
