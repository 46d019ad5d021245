// Messages by MPI, which any thread may use (MPI_THREAD_MULTIPLE).
#ifdef ZG_MPI
#include <mpi.h>
#endif

#include <cstdlib>

#include "comm/host_ranks.hpp"

namespace zg {

bool is_under_mpi() {
  // OpenMPI, MPICH and Intel MPI, Slurm's own PMI.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

#ifdef ZG_MPI
namespace comm {
namespace {

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw Error(Errc::kComm, "MPI", fmt::format("{}: {}", what, text));
}

// MPI itself: initialised by the first, unless someone else has.
class Mpi {
 public:
  Mpi() {
    int there = 0;
    check(MPI_Initialized(&there), "MPI_Initialized");
    int level = MPI_THREAD_SINGLE;
    if (there != 0) {
      check(MPI_Query_thread(&level), "MPI_Query_thread");
    } else {
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
      owns_ = true;
    }
    if (level < MPI_THREAD_MULTIPLE) {
      end();
      throw Error(Errc::kUsage, "MPI", "serves one thread at a time, and each rank has threads of its own",
                  "use an MPI that is built with MPI_THREAD_MULTIPLE");
    }
  }
  Mpi(const Mpi&) = delete;
  ~Mpi() { end(); }

 private:
  void end() {
    if (owns_) MPI_Finalize();
    owns_ = false;
  }
  bool owns_ = false;
};

class MpiRequest final : public Wire::Request {
 public:
  ~MpiRequest() override {
    if (request == MPI_REQUEST_NULL) return;  // else a failure has ended the call
    MPI_Cancel(&request);
    MPI_Request_free(&request);
  }
  bool test() override {
    int done = 0;
    MPI_Status status;
    check(MPI_Test(&request, &done, &status), "MPI_Test");
    if (done == 0) return false;
    if (bytes >= 0) {
      int count = 0;
      check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
      if (count != bytes) {
        throw Error(Errc::kComm, "MPI",
                    fmt::format("a message has {} bytes where {} are expected", count, bytes),
                    "ranks must run the same program");
      }
    }
    return true;
  }
  MPI_Request request = MPI_REQUEST_NULL;
  int bytes = -1;  // of a message to be received
};

class MpiWire final : public Wire {
 public:
  MpiWire() {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(world_, &process_), "MPI_Comm_rank");
  }
  ~MpiWire() override { MPI_Comm_free(&world_); }
  int process() const override { return process_; }
  std::string describe() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string version = text;
    return version.substr(0, version.find_first_of(",\n"));
  }
  // The number of ranks of each process.
  std::vector<int> gather(int ranks) const {
    int processes = 0;
    check(MPI_Comm_size(world_, &processes), "MPI_Comm_size");
    std::vector<int> all(static_cast<std::size_t>(processes));
    check(MPI_Allgather(&ranks, 1, MPI_INT, all.data(), 1, MPI_INT, world_), "MPI_Allgather");
    return all;
  }
  std::unique_ptr<Request> send(int process, int tag, const void* data, std::int64_t bytes) override {
    auto r = std::make_unique<MpiRequest>();
    check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, process, tag, world_, &r->request), "MPI_Isend");
    return r;
  }
  std::unique_ptr<Request> receive(int process, int tag, void* data, std::int64_t bytes) override {
    auto r = std::make_unique<MpiRequest>();
    r->bytes = static_cast<int>(bytes);
    check(MPI_Irecv(data, r->bytes, MPI_BYTE, process, tag, world_, &r->request), "MPI_Irecv");
    return r;
  }
  void abort() override { MPI_Abort(world_, 1); }

 private:
  Mpi mpi_;
  MPI_Comm world_ = MPI_COMM_NULL;
  int process_ = 0;
};

}  // namespace
}  // namespace comm

std::vector<std::unique_ptr<CommRank>> make_mpi_ranks(int ranks, const CommOptions& options) {
  ZG_ASSERT_GE(ranks, 1);
  auto wire = std::make_unique<comm::MpiWire>();
  std::vector<int> ranks_of = wire->gather(ranks);
  return comm::make_host_ranks(std::move(ranks_of), std::move(wire), options);
}
#else
std::vector<std::unique_ptr<CommRank>> make_mpi_ranks(int, const CommOptions&) {
  throw Error(Errc::kUsage, "MPI", "is not in this build", "install libopenmpi-dev and build again");
}
#endif

}  // namespace zg
