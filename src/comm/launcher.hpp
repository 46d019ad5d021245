// Signs in the environment that a launcher has started other processes, too.
#pragma once
#include <functional>
#include <string>

namespace zg::comm {

// Returns the value of an environment variable; null: it is not set.
using Environment = std::function<const char*(const char*)>;

// The sign that this process is not the only one of its launcher; "" if there is none. Slurm's number of
// tasks for an allocation is no sign: one process may run in it on purpose.
std::string sign_of_others(const Environment& environment);

// Throws Error(kUsage) if there is such a sign: each process would train the whole run alone, and their
// results would overwrite each other. `mpi`: the name of the MPI library; empty: it is not used.
void expect_no_others(const std::string& mpi, const std::string& sign);

}  // namespace zg::comm
