// Defaults of the store that a run's configuration shares.
#pragma once

namespace zg {

// Operations of a program that the store decides ahead of the current one. The budgets bound how much it
// fetches early.
inline constexpr int kPrefetchDepth = 256;

}  // namespace zg
