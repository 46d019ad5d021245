// What a launcher has told this process of the others that it has started.
#pragma once
#include <functional>
#include <string>

namespace zg::comm {

// The value of an environment variable; null: it is not set.
using Environment = std::function<const char*(const char*)>;

// Why this process does not seem to be the only one of its launcher, though it knows of no other: "" where
// it may be. Slurm's number for an allocation is no sign: one process may run in it on purpose.
std::string sign_of_others(const Environment& environment);

// Throws Error(kUsage) where there is such a sign: each of the processes would train the whole run alone, and
// their results would overwrite each other. `mpi`: the name of the library; empty: it is not used.
void expect_no_others(const std::string& mpi, const std::string& sign);

}  // namespace zg::comm
