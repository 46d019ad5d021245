// The engine, over any kind of queue: it gives each drive its lanes, hands transfers to them, and does what
// concerns all lanes.
//
// Threads: any thread may call; each lane has a thread of its own (lane.hpp).
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/lane.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct DriveSpec {
  std::string name;        // "nvme0": for messages and the trace
  std::string path = {};   // its directory
  std::int64_t bytes = 0;  // size of its file
  double endurance_bytes = 0;
  int numa_node = -1;          // -1: unknown
  std::vector<int> cpus = {};  // cores of its I/O threads; empty: any
  // Makes the drive's queue of this index, for so many blocks in flight. Called on the queue's I/O thread;
  // may throw Error.
  std::function<std::unique_ptr<Queue>(int queue, int depth)> make_queue;
  // Likewise the queue for device memory; null: the drive has none.
  std::function<std::unique_ptr<Queue>(int depth)> make_direct_queue = {};
  // See Engine. Empty: memory, which has no file.
  std::function<std::string()> file = {};
  std::function<int()> sync = {};
  std::function<void(const std::string& name, bool kept)> renamed = {};
};

// The same options with a depth, if they have none.
EngineOptions with_depth(EngineOptions options);

class EngineCore final : public Engine {
 public:
  // `note` is added to describe(): which fallbacks were taken, and why. `keep` (the open files) lives as long
  // as the queues. Throws what make_queue throws.
  EngineCore(Backend backend, const EngineOptions& options, std::vector<DriveSpec> drives,
             std::string note = {}, std::shared_ptr<void> keep = {});
  ~EngineCore() override { stop(); }
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  Ticket submit(const Transfer& transfer) override;
  void promote(Ticket ticket, Priority priority) override { lane_of(ticket).promote(ticket, priority); }
  bool poll(Ticket ticket, Result& result) override { return lane_of(ticket).poll(ticket, result); }
  Result wait(Ticket ticket) override;
  void register_memory(void* data, std::int64_t bytes) override;
  void unregister_memory(void* data) override;
  int drive_count() const override { return static_cast<int>(drives_.size()); }
  std::int64_t drive_bytes(int drive) const override { return at(drive).spec.bytes; }
  LinkCounters counters(int drive) const override;
  DriveReport report(int drive) const override;
  Backend backend() const override { return backend_; }
  DirectStorage* direct() const override { return options_.direct.get(); }
  std::string file(int drive) const override { return at(drive).spec.file ? at(drive).spec.file() : ""; }
  int sync(int drive) override { return at(drive).spec.sync ? at(drive).spec.sync() : 0; }
  void renamed(int drive, const std::string& name, bool kept) override {
    if (at(drive).spec.renamed) at(drive).spec.renamed(name, kept);
  }
  std::string describe() const override;
  std::string state() const override;

 private:
  struct Drive {
    DriveSpec spec;
    std::uint32_t first_lane = 0, lanes = 1;  // for host memory; the lane for device memory follows them
    std::uint32_t all_lanes() const { return lanes + (spec.make_direct_queue ? 1 : 0); }
    std::atomic<std::uint32_t> turn{0};  // counts transfers, which the lanes take in turn
    BusyClock busy;
  };
  const Drive& at(int drive) const;
  void make_lanes();
  void make_lane(Drive& drive, std::uint32_t queue);
  void make_direct_lane(Drive& drive);
  void add_lane(Drive& drive, LaneOptions options, int queue, const std::string& suffix);
  void start();
  void stop();
  Lane& lane_of(Ticket ticket) { return *lanes_[ticket.slot % lanes_.size()]; }
  template <class Call>
  void for_each_lane(const Drive& drive, Call&& call) const {
    for (std::uint32_t i = 0; i < drive.all_lanes(); ++i) call(*lanes_[drive.first_lane + i]);
  }
  std::string run_on_host_lanes(void* data, std::int64_t bytes);

  const Backend backend_;
  const EngineOptions options_;
  const std::string note_;
  const std::shared_ptr<void> keep_;
  EngineState state_;
  mutable std::mutex mutex_;                  // guards registered_ and refusal_
  std::map<void*, std::int64_t> registered_;  // bytes by address; 0: the system refused
  std::string refusal_;                       // the first reason
  std::mutex registration_mutex_;             // one registration at a time; taken before mutex_
  std::vector<std::unique_ptr<Drive>> drives_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::uint32_t lane_count_ = 0;  // of all drives; ticket numbers are taken modulo it to find the lane
};

}  // namespace zg::io
