#include "io/core.hpp"

#include <algorithm>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/depth.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io {

namespace {

// More than 128 blocks are for callers who know their drive: of two disks that were measured with blocks of
// 128 KiB, one gains up to 7% with 256, and the other loses up to 18% (bench/README.md, the default queue
// depth).
int depth_of(std::int64_t bytes, std::int64_t block_size) {
  constexpr std::int64_t kLeast = 4, kMost = 128;
  return static_cast<int>(std::clamp(bytes / std::max<std::int64_t>(1, block_size), kLeast, kMost));
}

}  // namespace

int default_queue_depth(std::int64_t block_size) {
  return depth_of(kMostBytesInFlight, block_size);
}

std::int64_t bytes_in_flight(std::int64_t memory, std::int64_t drives) {
  return std::clamp(memory / 4 / std::max<std::int64_t>(1, drives), kBytesInFlight, kMostBytesInFlight);
}

int queue_depth_within(std::int64_t memory, std::int64_t drives, std::int64_t block_size) {
  return depth_of(bytes_in_flight(memory, drives), block_size);
}

EngineOptions with_depth(EngineOptions o) {
  if (o.queue_depth != 0) return o;
  o.queue_depth = default_queue_depth(o.block_size);
  return o;
}

EngineCore::EngineCore(Backend backend, const EngineOptions& options, std::vector<DriveSpec> drives,
                       std::string note, std::shared_ptr<void> keep)
    : backend_(backend), options_(with_depth(options)), note_(std::move(note)), keep_(std::move(keep)) {
  for (DriveSpec& spec : drives) {
    drives_.push_back(std::make_unique<Drive>());
    drives_.back()->spec = std::move(spec);
  }
  state_.engine = this;
  state_.wake_all = [this] {
    for (const auto& lane : lanes_) lane->wake();
  };
  try {
    make_lanes();
  } catch (const std::exception& e) {  // no memory, or no more threads
    for (const auto& lane : lanes_) lane->await_start();
    stop();
    const Error error = error_from(e);
    throw Error(error.code(), error.where(),
                fmt::format("{} I/O threads, and no more: {}", lanes_.size(), error.message()), error.hint());
  }
  start();
}

void EngineCore::make_lanes() {
  // Each queue needs a depth of at least 1.
  const int queues = std::min(options_.queues, options_.queue_depth);
  for (auto& drive : drives_) {
    drive->first_lane = lane_count_;
    drive->lanes = static_cast<std::uint32_t>(queues);
    lane_count_ += drive->all_lanes();
  }
  lanes_.reserve(lane_count_);
  for (auto& drive : drives_) {
    for (std::uint32_t q = 0; q < drive->lanes; ++q) make_lane(*drive, q);
    if (drive->spec.make_direct_queue) make_direct_lane(*drive);
  }
}

void EngineCore::make_lane(Drive& drive, std::uint32_t queue) {
  // The first queues take the remainder.
  const auto share = [&](int depth) {
    const auto all = static_cast<std::uint32_t>(depth);
    return static_cast<int>(all / drive.lanes + (queue < all % drive.lanes ? 1 : 0));
  };
  LaneOptions o;
  o.depth = share(options_.queue_depth);
  o.make_queue = [&drive, queue](int depth) { return drive.spec.make_queue(static_cast<int>(queue), depth); };
  add_lane(drive, std::move(o), static_cast<int>(queue),
           drive.lanes > 1 ? fmt::format(".{}", queue) : std::string());
}

// Whole pieces of a volume: each transfer has a cost of its own there, however large it is.
void EngineCore::make_direct_lane(Drive& drive) {
  LaneOptions o;
  o.block_size = std::max(options_.block_size, kMaxPieceBytes);
  o.depth = options_.direct_threads;
  o.make_queue = drive.spec.make_direct_queue;
  add_lane(drive, std::move(o), options_.queues, ".gpu");
}

// `queue` numbers the lanes of a drive, so that injected faults differ.
void EngineCore::add_lane(Drive& drive, LaneOptions o, int queue, const std::string& suffix) {
  const auto number = static_cast<int>(drive.first_lane / drive.all_lanes());
  o.name = drive.spec.name + suffix;
  o.thread_name = fmt::format("zg-io{}{}", number, suffix);
  o.bytes = drive.spec.bytes;
  if (o.block_size == 0) o.block_size = options_.block_size;
  o.index = static_cast<std::uint32_t>(lanes_.size());
  o.count = lane_count_;
  o.cpus = drive.spec.cpus;
  o.trace = options_.trace;
  if (injects_anything(options_.faults)) {
    o.make_queue = [this, make = std::move(o.make_queue), number, queue](int depth) {
      return make_fault_queue(make(depth), depth, options_.faults, number, queue);
    };
  }
  lanes_.push_back(std::make_unique<Lane>(std::move(o), state_, drive.busy));
}

void EngineCore::start() {
  const Error* failed = nullptr;
  for (const auto& lane : lanes_) {
    const Error* error = lane->await_start();
    if (failed == nullptr) failed = error;
  }
  if (failed == nullptr) return;
  stop();
  throw Error(failed->code(), failed->where(), failed->message(), failed->hint());
}

void EngineCore::stop() {
  state_.stopping = true;
  state_.wake_all();
  for (const auto& lane : lanes_) lane->join();
}

const EngineCore::Drive& EngineCore::at(int drive) const {
  ZG_ASSERT(drive >= 0 && drive < drive_count(), "drive {} of {}", drive, drive_count());
  return *drives_[static_cast<std::size_t>(drive)];
}

Ticket EngineCore::submit(const Transfer& transfer) {
  at(transfer.drive);
  ZG_ASSERT_GE(transfer.offset, 0);
  ZG_ASSERT_GE(transfer.bytes, 0);
  Drive& drive = *drives_[static_cast<std::size_t>(transfer.drive)];
  if (transfer.on_device) {
    ZG_ASSERT(drive.all_lanes() > drive.lanes, "{} reaches no memory but the host's", drive.spec.name);
    const auto at = reinterpret_cast<std::int64_t>(transfer.data);
    ZG_ASSERT_EQ((transfer.offset | transfer.bytes | at) % alignment(), 0);
    return lanes_[drive.first_lane + drive.lanes]->submit(transfer);
  }
  std::uint32_t lane = 0;
  // Writes with unaligned ends all go through the first lane, where two that share a page take turns.
  const bool ragged = transfer.op == Op::kWrite && (transfer.offset | transfer.bytes) % alignment() != 0;
  if (drive.lanes > 1 && !ragged) lane = drive.turn.fetch_add(1, std::memory_order_relaxed) % drive.lanes;
  return lanes_[drive.first_lane + lane]->submit(transfer);
}

Result EngineCore::wait(Ticket ticket) {
  ZG_ASSERT(!Lane::on_io_thread_of(this), "wait() on an I/O thread waits for itself");
  return lane_of(ticket).wait(ticket);
}

// Registers (bytes > 0) or unregisters memory with all queues at the same time; the first refusal, or empty.
// The lanes for device memory are left out: they have no use for it, and may be waiting for the device, which
// may itself be waiting for the caller.
std::string EngineCore::run_on_host_lanes(void* data, std::int64_t bytes) {
  const auto on_all = [&](auto&& call) {
    for (const auto& drive : drives_) {
      for (std::uint32_t i = 0; i < drive->lanes; ++i) call(*lanes_[drive->first_lane + i]);
    }
  };
  on_all([&](Lane& lane) { lane.begin_command(data, bytes); });
  std::string refusal;
  on_all([&](Lane& lane) {
    const std::string of_this = lane.end_command();
    if (refusal.empty()) refusal = of_this;
  });
  return refusal;
}

void EngineCore::register_memory(void* data, std::int64_t bytes) {
  ZG_ASSERT(!Lane::on_io_thread_of(this), "register_memory() on an I/O thread waits for itself");
  ZG_ASSERT(data != nullptr && bytes > 0, "{} bytes at {}", bytes, data);
  std::lock_guard registration(registration_mutex_);
  ZG_ASSERT(registered_.find(data) == registered_.end(), "{} is registered already", data);
  const std::string refusal = run_on_host_lanes(data, bytes);
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    registered_[data] = refusal.empty() ? bytes : 0;
    first = refusal_.empty() && !refusal.empty();
    if (first) refusal_ = refusal;
  }
  if (first && options_.registered)
    log::info("I/O buffers are not registered, which costs some CPU time: {}", refusal);
}

void EngineCore::unregister_memory(void* data) {
  ZG_ASSERT(!Lane::on_io_thread_of(this), "unregister_memory() on an I/O thread waits for itself");
  std::lock_guard registration(registration_mutex_);
  ZG_ASSERT(registered_.find(data) != registered_.end(), "{} is not registered", data);
  run_on_host_lanes(data, 0);
  std::lock_guard lock(mutex_);
  registered_.erase(data);
}

LinkCounters EngineCore::counters(int drive) const {
  const Drive& d = at(drive);
  LinkCounters c;
  for_each_lane(d, [&](const Lane& lane) { lane.counters().add_to(c); });
  d.busy.add_to(c);
  return c;
}

DriveReport EngineCore::report(int drive) const {
  const Drive& d = at(drive);
  DriveReport r{.name = d.spec.name,
                .path = d.spec.path,
                .numa_node = d.spec.numa_node,
                .endurance_bytes = d.spec.endurance_bytes,
                .counters = {}};
  for_each_lane(d, [&](const Lane& lane) { lane.counters().add_to(r); });
  d.busy.add_to(r.counters);
  return r;
}

std::string DriveReport::endurance_text() const {
  if (endurance_bytes <= 0) return {};
  return fmt::format("{}: {} written, {:.2g}% of its endurance of {}", name,
                     format_bytes(counters.write_bytes),
                     100 * static_cast<double>(counters.write_bytes) / endurance_bytes,
                     format_bytes(static_cast<std::int64_t>(endurance_bytes)));
}

std::string EngineCore::describe() const {
  std::string text = fmt::format("{} (depth {}", io::name_of(backend_), options_.queue_depth);
  if (options_.queues > 1) text += fmt::format(", {} queues", options_.queues);
  text += fmt::format(", {} blocks", format_bytes(options_.block_size));
  if (!lanes_.empty()) text += ", " + lanes_[0]->features();
  std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& [data, size] : registered_) bytes += size;
  if (backend_ == Backend::kUring && bytes > 0)
    text += fmt::format(", registered buffers of {}", format_bytes(bytes));
  if (!refusal_.empty()) text += ", buffers not registered: " + refusal_;
  if (options_.direct != nullptr)
    text += fmt::format(", {} with {} threads a drive", options_.direct->describe(), options_.direct_threads);
  if (!note_.empty()) text += ", " + note_;
  return text + ")";
}

std::string EngineCore::state() const {
  std::string text;
  for (int d = 0; d < drive_count(); ++d) {
    const DriveReport r = report(d);
    double last = -1;  // seconds since a block completed on any lane; negative: none has
    for_each_lane(at(d), [&](const Lane& lane) {
      const double s = lane.counters().seconds_since_last_block();
      if (s >= 0) last = last < 0 ? s : std::min(last, s);
    });
    text += fmt::format(
        "{}{}: {} of {} blocks in flight, waiting: {} demand, {} prefetch, {} write-back; last block done {}",
        text.empty() ? "" : "\n", r.name, r.in_flight, r.depth, r.waiting[0], r.waiting[1], r.waiting[2],
        ago_text(last));
  }
  return text;
}

}  // namespace zg::io
