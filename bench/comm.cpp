// Collectives beside the copy bandwidth of the machine and, under an MPI launcher, beside MPI's own: seconds
// of an all-gather that gives every rank 64 MiB, and of a reduce-scatter of 64 MiB of every rank.
//
//   bench_comm [--ranks 2,4] [--mib 64] [--rounds 9]          ranks are threads
//   mpirun -n 2 bench_comm [--mib 64] [--rounds 9]            each process is a rank
//   bench_comm --gpus 2,4 [--mib 64] [--rounds 9]             ranks have a GPU each; beside NCCL's own
//
// In each round every way has its turn; a turn's time is that of its slowest rank. `memcpy` copies the same
// bytes: each rank, at the same time, 64 MiB from memory that another rank has written.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#ifdef ZG_MPI
#include <mpi.h>
#endif

#include "bench/measure.hpp"
#include "comm/nccl.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/comm/comm.hpp"
#include "ziggurat/comm/gpu.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/device/cuda_access.hpp"

namespace {

using namespace zg;

struct Options {
  std::vector<int> ranks = {2, 4}, gpus = {};
  int mib = 64, rounds = 9;
};
using Times = std::map<std::string, std::vector<double>>;  // seconds by way
constexpr const char* kGather = "all-gather";
constexpr const char* kReduce = "reduce-scatter";

class Turns {
 public:
  Turns(CommRank& rank, const Options& options)
      : options_(options),
        comm_(rank.group(all(rank.size()), "bench")),
        bytes_(std::int64_t{options.mib} << 20),
        whole_(bytes_),
        out_(bytes_),
        part_(bytes_ / rank.size()) {
    std::fill_n(reinterpret_cast<float*>(whole_.data()), bytes_ / 4, 1.0f);
    std::memset(out_.data(), 0, static_cast<std::size_t>(bytes_));
    std::fill_n(reinterpret_cast<float*>(part_.data()), part_.size() / 4, 1.0f);
  }

  Times operator()() {
    const std::int64_t row = bytes_ / comm_->size() / 4;
    for (int round = -1; round < options_.rounds; ++round) {  // the first warms up
      turn(kGather, round, [&] { comm_->all_gather(stream_, part_.data(), out_.data(), row, DType::kF32); });
      turn(kReduce, round, [&] {
        comm_->reduce_scatter(stream_, whole_.data(), part_.data(), row, DType::kF32, Reduction::kSum);
      });
      turn("memcpy", round,
           [&] { std::memcpy(out_.data(), whole_.data(), static_cast<std::size_t>(bytes_)); });
#ifdef ZG_MPI
      if (!is_under_mpi()) continue;
      const auto n = static_cast<int>(row);
      turn("MPI_Allgather", round,
           [&] { MPI_Allgather(part_.data(), n, MPI_FLOAT, out_.data(), n, MPI_FLOAT, MPI_COMM_WORLD); });
      turn("MPI_Reduce_scatter_block", round, [&] {
        MPI_Reduce_scatter_block(whole_.data(), part_.data(), n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      });
#endif
    }
    return times_;
  }

 private:
  static std::vector<int> all(int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  void turn(const char* way, int round, const std::function<void()>& work) {
    comm_->barrier(stream_);
    stream_.synchronize();
    const auto begin = Clock::now();
    work();
    stream_.synchronize();
    double seconds = seconds_between(begin, Clock::now());
    comm_->all_reduce(stream_, &seconds, 1, DType::kF64, Reduction::kMax);
    stream_.synchronize();
    if (round >= 0) times_[way].push_back(seconds);
  }

  const Options& options_;
  HostStream stream_{"comm", HostStream::Mode::kThread};
  std::unique_ptr<Communicator> comm_;
  std::int64_t bytes_;
  Buffer whole_, out_, part_;
  Times times_;
};

// The same on GPUs. `memcpy` is a copy on the GPU, and "NCCL all-gather" is what NCCL does when it is asked
// directly.
class GpuTurns {
 public:
  GpuTurns(CommRank& rank, Device& device, comm::Nccl& nccl, const comm::NcclId& id, const Options& options)
      : options_(options),
        device_(device),
        gpu_(dynamic_cast<CudaAccess&>(device)),
        nccl_(nccl),
        rank_(rank.rank()),
        bytes_(std::int64_t{options.mib} << 20),
        stream_(device.make_stream("comm")),
        queue_(gpu_.make_queue()) {
    std::vector<int> all(static_cast<std::size_t>(rank.size()));
    std::iota(all.begin(), all.end(), 0);
    comm_ = rank.group(all, "bench");
    for (void*& data : memory_) data = device.arena().allocate(bytes_);
    gpu_.use();
    direct_ = nccl.init(rank.size(), id, rank_);
    settle();
  }
  ~GpuTurns() {
    nccl_.abort(direct_);
    for (void* data : memory_) device_.arena().release(data, bytes_);
  }
  Times operator()() {
    const std::int64_t row = bytes_ / comm_->size();
    for (int round = -1; round < options_.rounds; ++round) {  // the first warms up
      turn(kGather, round, [&] {
        comm_->all_gather(*stream_, memory_[0], memory_[1], row / 4, DType::kF32);
        stream_->synchronize();
      });
      turn(kReduce, round, [&] {
        comm_->reduce_scatter(*stream_, memory_[0], memory_[1], row / 4, DType::kF32, Reduction::kSum);
        stream_->synchronize();
      });
      turn("memcpy", round, [&] {
        queue_->copy(memory_[1], memory_[0], bytes_);
        wait();
      });
      turn("NCCL all-gather", round, [&] {
        nccl_.all_gather(direct_, memory_[0], memory_[1], row, queue_->handle());
        settle();
        wait();
      });
    }
    return times_;
  }

 private:
  void settle() {
    while (!nccl_.settled(direct_)) std::this_thread::yield();
  }
  void wait() {
    queue_->mark();
    while (!queue_->reached()) std::this_thread::yield();
  }
  void turn(const char* way, int round, const std::function<void()>& work) {
    comm_->barrier(numbers_);
    gpu_.use();
    const auto begin = Clock::now();
    work();
    double seconds = seconds_between(begin, Clock::now());
    comm_->all_reduce(numbers_, &seconds, 1, DType::kF64, Reduction::kMax);
    if (round >= 0) times_[way].push_back(seconds);
  }

  const Options& options_;
  Device& device_;
  CudaAccess& gpu_;
  comm::Nccl& nccl_;
  const int rank_;
  const std::int64_t bytes_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<CudaQueue> queue_;
  HostStream numbers_{"numbers", HostStream::Mode::kInline};
  std::unique_ptr<Communicator> comm_;
  void* memory_[2] = {};
  comm::NcclComm direct_ = nullptr;
  Times times_;
};

Times on_gpus(int n, const Options& options, std::string& by) {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Device*> pointers;
  for (int i = 0; i < n; ++i) {
    devices.push_back(make_cuda_device(
        {.device = i,
         .budget = 2 * (std::int64_t{options.mib} << 20) + kGpuCommStaging + (std::int64_t{64} << 20)}));
    pointers.push_back(devices.back().get());
  }
  auto ranks = make_gpu_ranks(pointers, {});
  by = ranks[0]->describe();
  std::string why;
  const auto nccl = comm::load_nccl(&why);
  const comm::NcclId id = nccl->make_id();
  Times times;
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&, r = rank.get()] {
      Times mine = GpuTurns(*r, *pointers[static_cast<std::size_t>(r->rank())], *nccl, id, options)();
      if (r->rank() == 0) times = std::move(mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return times;
}

nlohmann::json report(int ranks, const Options& options, const Times& times) {
  const double copy = bench::median(times.at("memcpy"));
  nlohmann::json rows = nlohmann::json::array();
  std::fprintf(stderr, "%d ranks, %d MiB\n%-26s %10s %8s %12s\n", ranks, options.mib, "", "ms", "mad",
               "of memcpy");
  for (const auto& [way, seconds] : times) {
    const double middle = bench::median(seconds);
    std::fprintf(stderr, "%-26s %10.2f %8.2f %12.2f\n", way.c_str(), 1e3 * middle, 1e3 * bench::mad(seconds),
                 copy / middle);
    rows.push_back(
        {{"way", way}, {"seconds", middle}, {"mad", bench::mad(seconds)}, {"of_memcpy", copy / middle}});
  }
  return {{"ranks", ranks}, {"mib", options.mib}, {"rounds", options.rounds}, {"ways", rows}};
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Collectives beside memcpy, and beside MPI's own under a launcher");
  app.add_option("--ranks", options.ranks,
                 "Numbers of threads; a launcher's processes are as many as it has started")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--gpus", options.gpus, "Numbers of GPUs, instead of threads")->delimiter(',');
  app.add_option("--mib", options.mib, "MiB that every rank gets, or gives")->capture_default_str();
  app.add_option("--rounds", options.rounds, "Turns of each way")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    nlohmann::json results = nlohmann::json::array();
    if (is_under_mpi()) {
      const auto ranks = make_mpi_ranks(1, {});
      const Times times = Turns(*ranks[0], options)();
      if (ranks[0]->rank() != 0) return 0;
      results.push_back(report(ranks[0]->size(), options, times));
      results.back()["by"] = ranks[0]->describe();
    } else if (!options.gpus.empty()) {
      for (const int n : options.gpus) {
        std::string by;
        results.push_back(report(n, options, on_gpus(n, options, by)));
        results.back()["by"] = by;
      }
    } else {
      for (const int n : options.ranks) {
        auto ranks = make_local_ranks(n, {});
        Times times;
        std::vector<std::thread> threads;
        for (auto& rank : ranks) {
          threads.emplace_back([&, r = rank.get()] {
            Times mine = Turns(*r, options)();
            if (r->rank() == 0) times = std::move(mine);
          });
        }
        for (std::thread& thread : threads) thread.join();
        results.push_back(report(n, options, times));
        results.back()["by"] = ranks[0]->describe();
      }
    }
    nlohmann::json out = bench::provenance();
    out["results"] = results;
    std::printf("%s\n", out.dump(2).c_str());
    return 0;
  } catch (const Error& e) {
    std::fprintf(stderr, "bench_comm: %s\n", e.what());
    return e.exit_code();
  }
}
