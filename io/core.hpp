// The engine proper, over any queues: the drives' lanes, and what concerns all of them.
//
// Threads: any may call; the lanes have their own (lane.hpp).
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
  std::string name;        // "nvme0": messages and lanes of the trace
  std::string path = {};   // of its directory
  std::int64_t bytes = 0;  // transfers must end within
  double endurance_bytes = 0;
  int numa_node = -1;          // -1: unknown
  std::vector<int> cpus = {};  // where its I/O threads run; empty: anywhere
  // The drive's queue of this index and depth; called on its I/O thread. May throw Error.
  std::function<std::unique_ptr<Queue>(int queue, int depth)> make_queue;
  // The one for memory of a device; null: it has none.
  std::function<std::unique_ptr<Queue>(int depth)> make_direct_queue = {};
};

// With the depth that was not stated.
EngineOptions resolved(EngineOptions options);

class EngineCore final : public Engine {
 public:
  // `note` is added to describe(): what was fallen back to, and why. `keep` lives as long as the
  // queues (the open files). Throws what make_queue throws.
  EngineCore(Backend backend, const EngineOptions& options, std::vector<DriveSpec> drives,
             std::string note = {}, std::shared_ptr<void> keep = {});
  ~EngineCore() override;
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  Ticket submit(const Transfer& transfer) override;
  void promote(Ticket ticket, Priority priority) override;
  bool poll(Ticket ticket, Result& result) override;
  Result wait(Ticket ticket) override;
  void register_memory(void* data, std::int64_t bytes) override;
  void unregister_memory(void* data) override;
  int drive_count() const override { return static_cast<int>(drives_.size()); }
  std::int64_t drive_bytes(int drive) const override { return at(drive).spec.bytes; }
  LinkCounters counters(int drive) const override;
  DriveReport report(int drive) const override;
  Backend backend() const override { return backend_; }
  DirectStorage* direct() const override { return options_.direct.get(); }
  std::string describe() const override;
  std::string state() const override;

 private:
  struct Drive {
    DriveSpec spec;
    std::uint32_t first_lane = 0, lanes = 1;  // for the host's memory; the one for a device's comes after them
    std::uint32_t all_lanes() const { return lanes + (spec.make_direct_queue ? 1 : 0); }
    std::atomic<std::uint32_t> turn{0};
    BusyClock busy;
  };
  const Drive& at(int drive) const;
  void make_lanes();
  void make_lane(Drive& drive, std::uint32_t queue);
  void make_direct_lane(Drive& drive);
  void add_lane(Drive& drive, LaneOptions options, const std::string& suffix);
  void start();
  void stop();
  Lane& lane_of(Ticket ticket);
  std::string run_on_all(void* data, std::int64_t bytes);

  const Backend backend_;
  const EngineOptions options_;
  const std::string note_;
  const std::shared_ptr<void> keep_;
  EngineState state_;
  mutable std::mutex mutex_;  // guards registered_ and refusal_
  std::map<void*, std::int64_t> registered_;
  std::string refusal_;
  std::mutex registration_mutex_;  // one registration at a time; taken before mutex_
  std::vector<std::unique_ptr<Drive>> drives_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::uint32_t lane_count_ = 0;  // of them, once all are made: tickets are told apart by it
};

}  // namespace zg::io
