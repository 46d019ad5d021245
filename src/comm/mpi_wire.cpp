// Messages over MPI, which any thread may send and receive (MPI_THREAD_MULTIPLE), and the processes that its
// launcher has started.
#ifdef ZG_MPI
#include <mpi.h>
#endif

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "comm/host_ranks.hpp"
#include "comm/launcher.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/comm/processes.hpp"

namespace zg {

// All exchanges send this one struct. So a process that fails before an exchange can report it in that
// exchange, whatever the other processes expect to exchange.
struct Processes::Word {
  double failure = 0;  // 0: none; else 1 + the error's code
  double numbers[kMost] = {};
};

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

constexpr int kWordNumbers = 15, kFailureTag = 1;
constexpr std::size_t kFailureBytes = 2000;  // longest text of a failure: short enough for an eager send
// Pauses between two tests in a process that waits for others. Short waits are common; long waits must not
// cost processor time.
constexpr std::chrono::microseconds kShortPause{50}, kLongPause{2000};
constexpr std::chrono::milliseconds kFirstWord{500}, kLastWord{2000};
constexpr std::chrono::milliseconds kLook{100};  // between two checks whether the launcher is alive

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw Error(Errc::kComm, "MPI", fmt::format("{}: {}", what, text));
}

// Library and version: "Open MPI v4.1.4".
std::string name_of_mpi() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string version = text;
  return version.substr(0, version.find_first_of(",\n"));
}

// Messages by which the processes of a world tell each other of failures, on an MPI communicator of their
// own. Any thread.
class Failures {
 public:
  Failures(MPI_Comm comm, int process, int processes)
      : comm_(comm), process_(process), processes_(processes) {}
  // Tells all other processes. Only the first call counts, and only if no other process has reported a
  // failure before. The text begins with the rank's number.
  void tell(int rank, const Error& error) {
    std::lock_guard lock(mutex_);
    if (told_ || heard_) return;
    told_ = true;
    text_ = fmt::format("{} {}", rank,
                        error.where().empty() ? error.message() : error.where() + ": " + error.message());
    text_.resize(std::min(text_.size(), kFailureBytes));
    for (int p = 0; p < processes_; ++p) {
      MPI_Request request = MPI_REQUEST_NULL;
      if (p == process_ || MPI_Isend(text_.data(), static_cast<int>(text_.size()), MPI_CHAR, p, kFailureTag,
                                     comm_, &request) != MPI_SUCCESS)
        continue;
      MPI_Request_free(&request);  // the text lives as long as MPI does
    }
  }
  // The failure that another process has reported, unless this process's own report came first.
  std::optional<std::pair<int, Error>> heard() {
    std::lock_guard lock(mutex_);
    int there = 0;
    MPI_Status status;
    while (MPI_Iprobe(MPI_ANY_SOURCE, kFailureTag, comm_, &there, &status) == MPI_SUCCESS && there != 0) {
      std::string text(kFailureBytes, '\0');
      check(MPI_Recv(text.data(), static_cast<int>(text.size()), MPI_CHAR, status.MPI_SOURCE, kFailureTag,
                     comm_, &status),
            "MPI_Recv");
      // If two processes have reported failures to each other, the lower one counts as the first.
      if (heard_ || (told_ && status.MPI_SOURCE > process_)) continue;
      int bytes = 0;
      check(MPI_Get_count(&status, MPI_CHAR, &bytes), "MPI_Get_count");
      text.resize(static_cast<std::size_t>(bytes));
      const std::size_t blank = std::min(text.find(' '), text.size() - 1);
      heard_.emplace(std::atoi(text.c_str()), Error(Errc::kComm, "", text.substr(blank + 1)));
    }
    return heard_;
  }
  bool has_told() {
    std::lock_guard lock(mutex_);
    return told_;
  }

 private:
  const MPI_Comm comm_;
  const int process_, processes_;
  std::mutex mutex_;  // guards what follows
  bool told_ = false;
  std::string text_;
  std::optional<std::pair<int, Error>> heard_;
};

// MPI itself. The first user in this process initialises it, unless other code has done so; then the last
// user finalises it.
class Mpi {
 public:
  static std::shared_ptr<Mpi> get() {
    static std::mutex mutex;
    static std::weak_ptr<Mpi> instance;
    std::lock_guard lock(mutex);
    std::shared_ptr<Mpi> mpi = instance.lock();
    if (mpi == nullptr) instance = mpi = std::make_shared<Mpi>();
    return mpi;
  }
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
    control = duplicate_world();
    check(MPI_Comm_rank(control, &process), "MPI_Comm_rank");
    check(MPI_Comm_size(control, &processes), "MPI_Comm_size");
    failures.emplace(control, process, processes);
  }
  Mpi(const Mpi&) = delete;
  ~Mpi() {
    for (auto& [comm, of_world] : apart_) MPI_Comm_free(&comm);
    MPI_Comm_free(&control);
    end();
  }

  static MPI_Comm duplicate_world() {
    MPI_Comm copy = MPI_COMM_NULL;
    check(MPI_Comm_dup(MPI_COMM_WORLD, &copy), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return copy;
  }

  // The failures of a separate world (CommOptions::apart). All processes make these in the same order. They
  // live as long as MPI does, since their texts may still be in transit.
  Failures& failures_apart() {
    std::lock_guard lock(mutex_);
    const MPI_Comm comm = duplicate_world();
    return *apart_.emplace_back(comm, std::make_unique<Failures>(comm, process, processes)).second;
  }

  MPI_Comm control = MPI_COMM_NULL;
  std::optional<Failures> failures;  // of all worlds that are not `apart`, and of the processes
  int process = 0, processes = 1;
  std::atomic<bool> is_managed{false};  // a zg::Processes exists, and ends the run after a failure

 private:
  void end() {
    if (owns_) MPI_Finalize();
    owns_ = false;
  }
  bool owns_ = false;
  std::mutex mutex_;  // guards what follows
  std::vector<std::pair<MPI_Comm, std::unique_ptr<Failures>>> apart_;
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
  int bytes = -1;  // expected size of a message to receive; -1: this is a send
};

class MpiWire final : public Wire {
 public:
  explicit MpiWire(bool apart)
      : mpi_(Mpi::get()),
        world_(Mpi::duplicate_world()),
        failures_(apart ? mpi_->failures_apart() : *mpi_->failures) {}
  // After a failure, messages may be in transit, and the process ends without finalising MPI.
  ~MpiWire() override {
    for (Failures* failures : {&failures_, &*mpi_->failures}) {
      if (failures->has_told() || failures->heard()) return;
    }
    MPI_Comm_free(&world_);
  }
  int process() const override { return mpi_->process; }
  std::string describe() const override { return name_of_mpi(); }
  // The number of ranks of each process.
  std::vector<int> gather(int ranks) const {
    std::vector<int> all(static_cast<std::size_t>(mpi_->processes));
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
  void abort() override {
    if (!mpi_->is_managed) MPI_Abort(world_, 1);
  }
  void tell_failure(int rank, const Error& error) override { failures_.tell(rank, error); }
  std::optional<std::pair<int, Error>> heard_failure() override { return failures_.heard(); }

 private:
  std::shared_ptr<Mpi> mpi_;
  MPI_Comm world_ = MPI_COMM_NULL;
  Failures& failures_;
};

// Waits without spinning. False if another process has reported a failure, or does not come.
bool wait_for(MPI_Request& request, Mpi& mpi) {
  int done = 0;
  std::optional<Clock::time_point> heard;
  for (int round = 0;; ++round) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) return true;
    if (!heard && mpi.failures->heard()) heard = Clock::now();
    if (heard && Clock::now() - *heard > kLastWord) return false;
    std::this_thread::sleep_for(round < 1000 ? kShortPause : kLongPause);
  }
}

}  // namespace
}  // namespace comm

// The state of a process under a launcher, with a thread that watches the launcher. A killed launcher cannot
// end its processes, and some of them may never wait for another process. So each process watches its parent,
// and ends itself when the parent has ended. MPI's initialisation waits for all processes, possibly for ever
// if one of them ends meanwhile, so the thread also ends a process that has not joined in time; each such
// process says so. A launcher that ends before the watch begins is not noticed, but without it joining MPI
// fails anyway.
struct Processes::State {
  explicit State(std::chrono::duration<double> limit) {
    watch = NamedThread("zg-launcher", [this, limit, parent = getppid(), begin = Clock::now()] {
      std::unique_lock lock(mutex);
      while (!ended.wait_for(lock, comm::kLook, [this] { return ending; })) {
        if (getppid() != parent) end_process("the launcher has ended, and this process with it");
        if (!has_joined && Clock::now() - begin > limit)
          end_process(
              fmt::format("not all processes of the launcher have started MPI within {:g} s: one has "
                          "ended, hangs, or runs another program; where they need longer, raise "
                          "--join-timeout",
                          limit.count()));
      }
    });
  }
  // MPI is finalised before the watch ends, since finalising waits for the other processes, too.
  ~State() {
    mpi.reset();
    std::lock_guard lock(mutex);
    ending = true;
    ended.notify_all();
  }
  void joined() {
    std::lock_guard lock(mutex);
    has_joined = true;
    name = fmt::format("process {}", mpi->process);
  }
  [[noreturn]] void end_process(const std::string& why) const {
    std::fprintf(stderr, "ziggurat: %s: %s\n", name.c_str(), why.c_str());
    std::fflush(nullptr);
    _exit(1);
  }
  std::shared_ptr<comm::Mpi> mpi;
  std::mutex mutex;  // guards what follows
  std::condition_variable ended;
  bool ending = false, has_joined = false;
  std::string name = fmt::format("pid {}", getpid());
  NamedThread watch;  // last
};

Processes Processes::join(std::chrono::duration<double> limit) {
  const std::string others = comm::sign_of_others(::getenv);  // before MPI sets variables of its own
  if (!is_under_mpi()) {
    comm::expect_no_others("", others);
    return {};
  }
  auto state = std::make_unique<State>(limit);
  state->mpi = comm::Mpi::get();
  comm::Mpi& mpi = *state->mpi;
  Processes p;
  if (mpi.processes == 1) {
    comm::expect_no_others(comm::name_of_mpi(), others);
    return p;
  }
  p.count_ = mpi.processes, p.number_ = mpi.process;
  mpi.is_managed = true;
  try {
    MPI_Comm here = MPI_COMM_NULL;
    comm::check(MPI_Comm_split_type(mpi.control, MPI_COMM_TYPE_SHARED, mpi.process, MPI_INFO_NULL, &here),
                "MPI_Comm_split_type");
    comm::check(MPI_Comm_size(here, &p.count_here_), "MPI_Comm_size");
    comm::check(MPI_Comm_rank(here, &p.number_here_), "MPI_Comm_rank");
    p.machine_ = p.number_;
    comm::check(MPI_Bcast(&p.machine_, 1, MPI_INT, 0, here), "MPI_Bcast");
    MPI_Comm_free(&here);
  } catch (const Error& e) {  // ends at once: finalising MPI would wait for the others
    state->end_process(e.what());
  }
  state->joined();
  p.state_ = std::move(state);
  return p;
}

Processes::~Processes() {
  if (state_ == nullptr) return;
  comm::Mpi& mpi = *state_->mpi;
  MPI_Request request = MPI_REQUEST_NULL;
  bool met = (ended_ || !mpi.failures->has_told()) && MPI_Ibarrier(mpi.control, &request) == MPI_SUCCESS;
  try {
    met = met && comm::wait_for(request, mpi);
  } catch (const Error&) {
    met = false;
  }
  if (!met) abort(1);
}

std::vector<Processes::Word> Processes::exchange(const Word& mine) {
  static_assert(sizeof(Word) == comm::kWordNumbers * sizeof(double));
  std::vector<Word> all(static_cast<std::size_t>(count_));
  MPI_Request request = MPI_REQUEST_NULL;
  comm::check(MPI_Iallgather(&mine, comm::kWordNumbers, MPI_DOUBLE, all.data(), comm::kWordNumbers,
                             MPI_DOUBLE, state_->mpi->control, &request),
              "MPI_Iallgather");
  if (comm::wait_for(request, *state_->mpi)) return all;
  lost_ = true;
  const Error heard = state_->mpi->failures->heard()->second;
  throw FailedElsewhere(heard.code(), heard.where(), heard.message());
}

bool Processes::is_first_to_fail() {
  if (state_ == nullptr) return true;
  comm::Mpi& mpi = *state_->mpi;
  mpi.failures->tell(number_, Error(Errc::kComm, "", "its process has failed"));
  const auto until = Clock::now() + (number_ > 0 ? comm::kFirstWord : comm::kFirstWord * 0);
  do {
    if (mpi.failures->heard()) return false;
    if (number_ > 0) std::this_thread::sleep_for(comm::kLongPause);
  } while (Clock::now() < until);
  return true;
}

void Processes::abort(int exit_code) {
  std::fflush(nullptr);
  if (state_ == nullptr) _exit(exit_code);
  if (state_->mpi->failures->heard()) std::this_thread::sleep_for(comm::kLastWord);
  MPI_Abort(state_->mpi->control, exit_code);
  _exit(exit_code);
}

std::unique_ptr<comm::Wire> comm::make_mpi_wire(int ranks, std::vector<int>& ranks_of, bool apart) {
  auto wire = std::make_unique<MpiWire>(apart);
  ranks_of = wire->gather(ranks);
  return wire;
}
#else
struct Processes::State {};

Processes Processes::join(std::chrono::duration<double>) {
  comm::expect_no_others("", comm::sign_of_others(::getenv));
  return {};
}
Processes::~Processes() = default;
std::vector<Processes::Word> Processes::exchange(const Word& mine) {
  return {mine};
}
bool Processes::is_first_to_fail() {
  return true;
}
void Processes::abort(int exit_code) {
  std::fflush(nullptr);
  _exit(exit_code);
}
std::unique_ptr<comm::Wire> comm::make_mpi_wire(int, std::vector<int>&, bool) {
  throw Error(Errc::kUsage, "MPI", "is not in this build", "install libopenmpi-dev and build again");
}
#endif

std::vector<std::unique_ptr<CommRank>> make_mpi_ranks(int ranks, const CommOptions& options) {
  ZG_ASSERT_GE(ranks, 1);
  std::vector<int> ranks_of;
  auto wire = comm::make_mpi_wire(ranks, ranks_of, options.apart);
  return comm::make_host_ranks(std::move(ranks_of), std::move(wire), options);
}

Processes::Processes() = default;
Processes::Processes(Processes&&) noexcept = default;

std::vector<std::vector<double>> Processes::all_gather(std::span<const double> mine) {
  ZG_ASSERT_LE(mine.size(), kMost);
  if (state_ == nullptr) return {{mine.begin(), mine.end()}};
  Word word;
  std::copy(mine.begin(), mine.end(), word.numbers);
  std::vector<std::vector<double>> numbers;
  for (const Word& theirs : exchange_or_fail(word))
    numbers.emplace_back(theirs.numbers, theirs.numbers + mine.size());
  return numbers;
}

// Exchanges, and throws the failure of the lowest process that failed, unless that is this process.
std::vector<Processes::Word> Processes::exchange_or_fail(const Word& mine) {
  if (ended_ || lost_) throw FailedElsewhere(Errc::kComm, "", "another process has failed");
  const std::vector<Word> all = exchange(mine);
  for (int p = 0; p < count_; ++p) {
    const Word& theirs = all[static_cast<std::size_t>(p)];
    if (theirs.failure == 0) continue;
    ended_ = true;
    if (p == number_) break;
    const auto code = static_cast<Errc>(static_cast<int>(theirs.failure) - 1);
    throw FailedElsewhere(code, fmt::format("process {}", p), "has failed");
  }
  return all;
}

void Processes::together(const std::function<void()>& work) {
  if (state_ == nullptr) return work();
  std::optional<Error> mine;
  try {
    work();
  } catch (const FailedElsewhere&) {
    throw;
  } catch (const Error& e) {
    mine.emplace(e);
  } catch (const std::exception& e) {
    mine.emplace(error_from(e));
  }
  Word word;
  if (mine) word.failure = 1 + static_cast<double>(mine->code());
  if (!mine || !(ended_ || lost_)) exchange_or_fail(word);
  if (mine) throw Error(*mine);
}

}  // namespace zg
