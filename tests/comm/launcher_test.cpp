// What launchers leave in the environment, and what it says of other processes.
#include "comm/launcher.hpp"

#include <gtest/gtest.h>

#include <map>

#include "support/errors.hpp"

namespace zg::comm {
namespace {

using Variables = std::map<std::string, const char*>;

Environment from(const Variables& variables) {
  return [variables](const char* name) {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second;
  };
}

TEST(Launcher, MoreThanOneProcessIsSeenByItsVariable) {
  const std::pair<Variables, const char*> cases[] = {
      {{{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is 2"},
      {{{"PMI_SIZE", "4"}, {"PMI_RANK", "0"}}, "PMI_SIZE is 4"},
      {{{"MV2_COMM_WORLD_SIZE", "3"}}, "MV2_COMM_WORLD_SIZE is 3"},
      {{{"PMIX_RANK", "1"}}, "PMIX_RANK is 1"},
      {{{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}},
       "SLURM_STEP_NUM_TASKS is 2"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_PROCID", "0"}}, "SLURM_NTASKS is 2"},
      {{{"SLURM_NTASKS", "2"}, {"SLURM_PROCID", "1"}}, "SLURM_PROCID is 1"},
      {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"LOCAL_RANK", "0"}}, "WORLD_SIZE is 2"},
  };
  for (const auto& [variables, sign] : cases) {
    const Environment environment = from(variables);
    const std::string name = std::string(sign).substr(0, std::string(sign).find(' '));
    const Error alone = test::error_of([&] { expect_no_others("", sign_of_others(environment)); });
    EXPECT_EQ(alone.code(), Errc::kUsage);
    EXPECT_HAS(alone.message(), sign);
    EXPECT_HAS(alone.message(), "this process knows of no other");
    EXPECT_HAS(alone.hint(), "unset " + name);
    const Error other =
        test::error_of([&] { expect_no_others("Open MPI v4.1.4", sign_of_others(environment)); });
    EXPECT_HAS(other.message(), "Open MPI v4.1.4 knows of one process");
    EXPECT_HAS(other.hint(), "mpirun of that MPI");
  }
}

TEST(Launcher, OneProcessMayRunAlone) {
  const Variables alone[] = {
      {},
      {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"PMIX_RANK", "0"}},
      {{"PMI_SIZE", "1"}},
      {{"WORLD_SIZE", "1"}, {"RANK", "0"}},
      {{"WORLD_SIZE", ""}},
      {{"WORLD_SIZE", "many"}},
      // An allocation: after salloc, or in the script of a batch job.
      {{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}, {"SLURM_NPROCS", "8"}},
      {{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}},
      // The step of an interactive shell.
      {{"SLURM_STEP_ID", "4294967290"},
       {"SLURM_STEP_NUM_TASKS", "1"},
       {"SLURM_NTASKS", "8"},
       {"SLURM_PROCID", "0"}},
      // mpirun -n 1 below srun, which has started mpirun's own servers.
      {{"OMPI_COMM_WORLD_SIZE", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}},
  };
  for (const Variables& variables : alone) {
    EXPECT_EQ(sign_of_others(from(variables)), "");
    EXPECT_NO_THROW(expect_no_others("", sign_of_others(from(variables))));
  }
}

}  // namespace
}  // namespace zg::comm
