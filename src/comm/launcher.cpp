#include "comm/launcher.hpp"

#include <cstdint>
#include <optional>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parse.hpp"

namespace zg::comm {
namespace {

struct Variable {
  const char *name, *launcher;
};

// Variables with the number of processes. MPI's own come first: if one of them is 1, the innermost launcher
// has started one process, whatever outer launchers have left in the environment.
constexpr Variable kMpiSizes[] = {{"OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"},
                                  {"PMI_SIZE", "the mpirun of MPICH or Intel MPI, or srun"},
                                  {"MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"}};
constexpr Variable kOtherSizes[] = {{"SLURM_STEP_NUM_TASKS", "srun"},
                                    {"WORLD_SIZE", "torchrun, or a launcher like it"},
                                    {"HOROVOD_SIZE", "horovodrun"},
                                    {"FLUX_JOB_SIZE", "flux run"},
                                    {"JSM_NAMESPACE_SIZE", "jsrun"}};
// Variables with the number of this process, from 0: above 0 it cannot be alone.
constexpr Variable kRanks[] = {{"PMIX_RANK", "a launcher with PMIx"}, {"SLURM_PROCID", "srun"}};

std::optional<std::int64_t> number_of(const Environment& environment, const char* name) {
  const char* const text = environment(name);
  return text == nullptr ? std::nullopt : number_in<std::int64_t>(text);
}

std::string sign_of(const Variable& v, std::int64_t number) {
  return fmt::format("{} is {}, set by {}", v.name, number, v.launcher);
}

}  // namespace

std::string sign_of_others(const Environment& environment) {
  for (const Variable& v : kMpiSizes) {
    const auto size = number_of(environment, v.name);
    if (size && *size == 1) return {};
    if (size && *size > 1) return sign_of(v, *size);
  }
  for (const Variable& v : kOtherSizes) {
    const auto size = number_of(environment, v.name);
    if (size && *size > 1) return sign_of(v, *size);
  }
  for (const Variable& v : kRanks) {
    const auto rank = number_of(environment, v.name);
    if (rank && *rank > 0) return sign_of(v, *rank);
  }
  // Within a step of srun, if its version does not report the step's number of processes.
  const bool step = environment("SLURM_STEP_ID") != nullptr && environment("SLURM_STEP_NUM_TASKS") == nullptr;
  const auto tasks = number_of(environment, "SLURM_NTASKS");
  return step && tasks && *tasks > 1 ? sign_of({"SLURM_NTASKS", "srun"}, *tasks) : std::string();
}

void expect_no_others(const std::string& mpi, const std::string& sign) {
  if (sign.empty()) return;
  const std::string name = sign.substr(0, sign.find(' '));
  throw Error(
      Errc::kUsage, "MPI",
      fmt::format(
          "{}, but {}: each process would train the whole run alone", sign,
          mpi.empty() ? "this process knows of no other" : fmt::format("{} knows of one process", mpi)),
      fmt::format("{}; or, where one process is meant, unset {}",
                  mpi.empty() ? "start several processes with an mpirun of the MPI that this program is "
                                "built with (one built without: install libopenmpi-dev, build again)"
                              : "start the processes with the mpirun of that MPI, or srun --mpi=pmix",
                  name));
}

}  // namespace zg::comm
