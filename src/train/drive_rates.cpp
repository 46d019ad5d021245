#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "train/drives.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/memory.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPage = io::Engine::alignment();
constexpr std::int64_t kArea = 512 * kMiB;   // bytes of each file that are used, at most
constexpr std::int64_t kMemory = 64 * kMiB;  // buffers for all drives, at most
constexpr std::int64_t kChunk = kMiB;        // bytes of a transfer, at least
// Bytes transferred on each drive for each kind of load: kPasses over the area, but within these limits, and
// on a slow drive for at most kLongEnough seconds.
constexpr std::int64_t kLeastEnough = 128 * kMiB;
constexpr std::int64_t kMostEnough = 2 * kGiB;
constexpr int kPasses = 4;
constexpr double kLongEnough = 0.8;

// Keeps one drive busy. Each slot has its own chunks of the file, so that no two transfers overlap.
// Threads: one thread calls it; completions run on the drive's I/O threads.
class DriveMeter final : public io::Completion {
 public:
  // Divides the memory into equal parts, one for each slot.
  DriveMeter(io::Engine& engine, int drive, std::int64_t block_size, char* memory, std::int64_t bytes,
             double read_share)
      : engine_(engine), drive_(drive), read_share_(read_share), memory_(memory) {
    const std::int64_t area = std::min(kArea, engine.drive_bytes(drive)) / kPage * kPage;
    ZG_ASSERT_GE(area, kPage);
    enough_ = std::clamp(kPasses * area, kLeastEnough, kMostEnough);
    // Keeps a few transfers in flight even in a small file.
    chunk_ = std::max(kPage, std::min({std::max(kChunk, block_size), area / 4, bytes / 4}) / kPage * kPage);
    chunks_ = area / chunk_;
    const std::int64_t slots = std::min(chunks_, bytes / chunk_);
    slots_.resize(static_cast<std::size_t>(slots));
    // Random bytes, which no drive can compress.
    const NamedRandom random(static_cast<std::uint64_t>(drive), "drive rates");
    for (std::int64_t i = 0; i < slots * chunk_; i += static_cast<std::int64_t>(sizeof(Philox4))) {
      const Philox4 block = random.block(static_cast<std::uint64_t>(i));
      std::memcpy(memory_ + i, &block, sizeof(block));
    }
  }

  enum class Load { kFirstWrite, kWrite, kRead, kMixed };
  // Transfers until stop(); kFirstWrite ends also when all chunks were written once. Chunks that were not
  // written by then are not used afterwards.
  void start(Load load) {
    load_ = load;
    moved_ = 0;
    stopped_ = false;
    in_flight_ = slots_.size();
    begin_ = end_ = Clock::now();
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      slots_[slot] = {};
      submit(slot);
    }
  }
  void stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  bool has_enough() {
    std::lock_guard lock(mutex_);
    return failure_.error != 0 || in_flight_ == 0 || moved_ >= enough_;
  }
  // Bytes per second, until the last transfer ended.
  double finish() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return in_flight_ == 0; });
    if (!failure_.ok()) {
      throw Error(Errc::kIo, engine_.report(drive_).path,
                  fmt::format("{} the tier's file failed: {}",
                              failed_ == io::Op::kRead ? "reading" : "writing", errno_text(failure_.error)));
    }
    if (load_ == Load::kFirstWrite) {
      std::int64_t rounds = chunks_;
      for (const Slot& slot : slots_) rounds = std::min(rounds, slot.done);
      chunks_ = std::min(chunks_, rounds * static_cast<std::int64_t>(slots_.size()));
    }
    return static_cast<double>(moved_) / std::max(1e-9, seconds_between(begin_, end_));
  }

 private:
  struct Slot {
    std::int64_t done = 0;  // transfers
    io::Op op = io::Op::kWrite;
  };
  // The chunks of all slots are interleaved.
  std::int64_t chunks_of(std::size_t slot) const {
    const auto n = static_cast<std::int64_t>(slots_.size());
    return (chunks_ - static_cast<std::int64_t>(slot) + n - 1) / n;
  }
  // In a mixture, the reads are spread evenly over the transfers of a slot, and shifted from slot to slot.
  io::Op op_of(std::size_t slot) const {
    if (load_ != Load::kMixed) return load_ == Load::kRead ? io::Op::kRead : io::Op::kWrite;
    const double at = static_cast<double>(slots_[slot].done) +
                      static_cast<double>(slot) / static_cast<double>(slots_.size());
    return std::floor((at + 1) * read_share_) > std::floor(at * read_share_) ? io::Op::kRead : io::Op::kWrite;
  }

  void submit(std::size_t slot) {
    const std::int64_t chunk = static_cast<std::int64_t>(slot) +
                               slots_[slot].done % chunks_of(slot) * static_cast<std::int64_t>(slots_.size());
    slots_[slot].op = op_of(slot);
    (void)engine_.submit({.op = slots_[slot].op,
                          .drive = drive_,
                          .offset = chunk * chunk_,
                          .data = memory_ + static_cast<std::int64_t>(slot) * chunk_,
                          .bytes = chunk_,
                          .completion = this,
                          .tag = slot});
  }

  void on_complete(io::Ticket, std::uint64_t tag, io::Result result) override {
    const auto slot = static_cast<std::size_t>(tag);
    {
      std::lock_guard lock(mutex_);
      if (!result.ok() && failure_.ok()) failure_ = result, failed_ = slots_[slot].op;
      moved_ += result.bytes;
      end_ = Clock::now();
      const bool whole = ++slots_[slot].done == chunks_of(slot);
      if (stopped_ || !failure_.ok() || (whole && load_ == Load::kFirstWrite)) {
        if (--in_flight_ == 0) idle_.notify_one();
        return;
      }
    }
    submit(slot);
  }

  io::Engine& engine_;
  const int drive_;
  const double read_share_;
  std::int64_t chunk_ = 0, chunks_ = 0, enough_ = 0;
  char* const memory_;
  Load load_ = Load::kWrite;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::vector<Slot> slots_;  // each is accessed only by the thread that starts or completes its transfer
  std::size_t in_flight_ = 0;
  std::int64_t moved_ = 0;
  bool stopped_ = false;
  io::Result failure_;
  io::Op failed_ = io::Op::kWrite;
  Clock::time_point begin_, end_;
};

using DriveMeters = std::vector<std::unique_ptr<DriveMeter>>;

// Measures all drives at the same time, since drives may share a bus or be the same device.
std::vector<double> run(DriveMeters& meters, DriveMeter::Load load) {
  const auto begin = Clock::now();
  for (auto& meter : meters) meter->start(load);
  const auto all_have_enough = [&] {
    return std::all_of(meters.begin(), meters.end(), [](auto& s) { return s->has_enough(); });
  };
  while (!all_have_enough() && seconds_between(begin, Clock::now()) < kLongEnough)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (auto& meter : meters) meter->stop();
  std::vector<double> rates;
  std::exception_ptr failure;
  for (auto& meter : meters) {  // all of them, so that no transfer is left in flight
    try {
      rates.push_back(meter->finish());
    } catch (const Error&) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  return rates;
}

// Memory as in a run: in huge pages, and registered with the engine while this exists.
class MeterMemory {
 public:
  MeterMemory(io::Engine& engine, std::int64_t bytes)
      : engine_(engine),
        memory_(
            make_host_memory({.name = "memory to measure drives with", .budget = round_up(bytes, 2 * kMiB)})),
        data_(memory_->allocate(bytes)),
        bytes_(bytes) {
    ZG_ASSERT(data_ != nullptr);
    engine_.register_memory(data_, bytes_);
  }
  ~MeterMemory() {
    engine_.unregister_memory(data_);
    memory_->release(data_, bytes_);
  }
  MeterMemory(const MeterMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  io::Engine& engine_;
  std::unique_ptr<HostMemory> memory_;
  void* data_;
  std::int64_t bytes_;
};

}  // namespace

std::vector<DriveRates> measure_drives(io::Engine& engine, std::int64_t block_size, double read_share,
                                       std::int64_t most_memory) {
  const int count = engine.drive_count();
  const std::int64_t each = round_up(std::max(4 * kChunk, std::min(kMemory, most_memory) / count), kPage);
  const MeterMemory memory(engine, each * count);
  DriveMeters meters;
  for (int d = 0; d < count; ++d)
    meters.push_back(
        std::make_unique<DriveMeter>(engine, d, block_size, memory.data() + d * each, each, read_share));
  using Load = DriveMeter::Load;
  const std::vector<double> first_write = run(meters, Load::kFirstWrite), write = run(meters, Load::kWrite),
                            read = run(meters, Load::kRead), mixed = run(meters, Load::kMixed);
  std::vector<DriveRates> rates;
  for (std::size_t d = 0; d < write.size(); ++d)
    rates.push_back({.read = read[d], .write = write[d], .mixed = mixed[d], .first_write = first_write[d]});
  return rates;
}

std::vector<double> programmed_rates(const std::vector<io::DriveOptions>& drives,
                                     const io::RamModel& common) {
  std::vector<double> rates;
  for (const io::DriveOptions& drive : drives) {
    rates.push_back(io::mean_bytes_per_second(drive.ram.value_or(common)));
    if (rates.back() == 0) return {};
  }
  return rates;
}

}  // namespace zg
