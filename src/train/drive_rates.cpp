#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "train/drives.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPage = io::Engine::alignment();
constexpr std::int64_t kArea = 128 * kMiB;    // of each file
constexpr std::int64_t kMemory = 64 * kMiB;   // for all drives
constexpr std::int64_t kChunk = kMiB;         // of one transfer, at least
constexpr std::int64_t kEnough = 128 * kMiB;  // of each drive
constexpr double kLongEnough = 0.5;           // seconds, for slow ones

// Keeps one drive busy. Each slot has its own chunks of the file, so that no two transfers overlap.
// Threads: run by one; completions on the drive's I/O threads.
class DriveMeter final : public io::Completion {
 public:
  DriveMeter(io::Engine& engine, int drive, std::int64_t block_size, std::int64_t memory)
      : engine_(engine), drive_(drive) {
    const std::int64_t area = std::min(kArea, engine.drive_bytes(drive)) / kPage * kPage;
    ZG_ASSERT_GE(area, kPage);
    // But a few at a time, in a small file too.
    chunk_ = std::max(kPage, std::min({std::max(kChunk, block_size), area / 4, memory / 4}) / kPage * kPage);
    chunks_ = area / chunk_;
    const std::int64_t slots = std::min(chunks_, memory / chunk_);
    next_.resize(static_cast<std::size_t>(slots));
    memory_.reserve(slots * chunk_);
    // Noise that no drive can compress.
    const NamedRandom random(static_cast<std::uint64_t>(drive), "drive rates");
    for (std::int64_t i = 0; i < slots * chunk_; i += static_cast<std::int64_t>(sizeof(Philox4))) {
      const Philox4 block = random.block(static_cast<std::uint64_t>(i));
      std::memcpy(memory_.data() + i, &block, sizeof(block));
    }
  }

  // Every chunk once, or again and again until stop().
  enum class Rounds { kOnce, kEndless };
  void start(io::Op op, Rounds rounds) {
    op_ = op;
    once_ = rounds == Rounds::kOnce;
    moved_ = 0;
    stopped_ = false;
    in_flight_ = next_.size();
    begin_ = end_ = Clock::now();
    for (std::size_t slot = 0; slot < next_.size(); ++slot) {
      next_[slot] = static_cast<std::int64_t>(slot);
      submit(slot, next_[slot]);
    }
  }
  void stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  bool has_enough() {
    std::lock_guard lock(mutex_);
    return failure_.error != 0 || moved_ >= kEnough;
  }
  // Bytes per second until the last one.
  double finish() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return in_flight_ == 0; });
    if (!failure_.ok()) {
      throw Error(Errc::kIo, engine_.report(drive_).path,
                  fmt::format("{} the tier's file failed: {}", op_ == io::Op::kRead ? "reading" : "writing",
                              errno_text(failure_.error)));
    }
    return static_cast<double>(moved_) / std::max(1e-9, seconds_between(begin_, end_));
  }

 private:
  void submit(std::size_t slot, std::int64_t chunk) {
    (void)engine_.submit({.op = op_,
                          .drive = drive_,
                          .offset = chunk * chunk_,
                          .data = memory_.data() + static_cast<std::int64_t>(slot) * chunk_,
                          .bytes = chunk_,
                          .completion = this,
                          .tag = slot});
  }

  void on_complete(io::Ticket, std::uint64_t tag, io::Result result) override {
    const auto slot = static_cast<std::size_t>(tag);
    std::int64_t chunk = 0;
    {
      std::lock_guard lock(mutex_);
      if (!result.ok() && failure_.ok()) failure_ = result;
      moved_ += result.bytes;
      end_ = Clock::now();
      chunk = next_[slot] + static_cast<std::int64_t>(next_.size());
      const bool wraps = chunk >= chunks_;
      if (wraps) chunk = static_cast<std::int64_t>(slot);
      next_[slot] = chunk;
      if (stopped_ || !failure_.ok() || (wraps && once_)) {
        if (--in_flight_ == 0) idle_.notify_one();
        return;
      }
    }
    submit(slot, chunk);
  }

  io::Engine& engine_;
  const int drive_;
  std::int64_t chunk_ = 0, chunks_ = 0;
  Buffer memory_;
  io::Op op_ = io::Op::kWrite;
  bool once_ = false;
  std::mutex mutex_;
  std::condition_variable idle_;
  // Of each slot, the chunk that it moves.
  std::vector<std::int64_t> next_;
  std::size_t in_flight_ = 0;
  std::int64_t moved_ = 0;
  bool stopped_ = false;
  io::Result failure_;
  Clock::time_point begin_, end_;
};

using DriveMeters = std::vector<std::unique_ptr<DriveMeter>>;

// All at once, since drives may share a bus, or be one.
std::vector<double> run(DriveMeters& meters, io::Op op, DriveMeter::Rounds rounds) {
  const auto begin = Clock::now();
  for (auto& meter : meters) meter->start(op, rounds);
  if (rounds == DriveMeter::Rounds::kEndless) {
    const auto all_have_enough = [&] {
      return std::all_of(meters.begin(), meters.end(), [](auto& s) { return s->has_enough(); });
    };
    while (!all_have_enough() && seconds_between(begin, Clock::now()) < kLongEnough)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (auto& meter : meters) meter->stop();
  }
  std::vector<double> rates;
  std::exception_ptr failure;
  for (auto& meter : meters) {  // all of them: none may be left under way
    try {
      rates.push_back(meter->finish());
    } catch (const Error&) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  return rates;
}

}  // namespace

std::vector<DriveRates> measure_drives(io::Engine& engine, std::int64_t block_size) {
  const int count = engine.drive_count();
  DriveMeters meters;
  for (int d = 0; d < count; ++d)
    meters.push_back(
        std::make_unique<DriveMeter>(engine, d, block_size, std::max(4 * kChunk, kMemory / count)));
  // The first pass over a new file also pays for its metadata; a tier writes the same places again and again.
  (void)run(meters, io::Op::kWrite, DriveMeter::Rounds::kOnce);
  const std::vector<double> write = run(meters, io::Op::kWrite, DriveMeter::Rounds::kEndless);
  const std::vector<double> read = run(meters, io::Op::kRead, DriveMeter::Rounds::kEndless);
  std::vector<DriveRates> rates;
  for (std::size_t d = 0; d < write.size(); ++d) rates.push_back({.read = read[d], .write = write[d]});
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
