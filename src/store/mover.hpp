// Carries out what a MoveGraph starts: allocates and frees memory of the two arenas, copies between host and
// device on two streams, reads from and writes to the drives.
//
// Threads: every function is called under the store's mutex, which guards all members and the graph. Copies
// and transfers end on other threads, which then take the mutex. So no thread may hold it while it waits for
// one of them. Therefore memory that an arena has to take from the system, and to register with drives and
// devices, is taken by a separate thread that does not hold the mutex.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "store/move_graph.hpp"
#include "store/nvme_copies.hpp"
#include "store/segment_state.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

// The events of a Mover. Called under the store's mutex, also by threads that move data.
class MoverEvents {
 public:
  // A move or a use has ended, and the nodes that waited for it alone have started.
  virtual void finished(Action::Kind kind) = 0;
  virtual void failed(const Error& error) = 0;
  virtual void no_memory(Tier tier, const Error& error) = 0;  // the system refused memory within the budget

 protected:
  ~MoverEvents() = default;
};

class Mover final : public MoveDriver, private io::ExtentCompletion {
 public:
  static MoveRules rules(const TensorStore::Options& options);  // of its graph
  // The references, and the pointers in `options`, outlive the mover. In `states` the mover sets where the
  // memory of each copy is.
  Mover(const TensorTable& table, const TensorStore::Options& options, const SegmentStates& states,
        std::mutex& mutex, MoveGraph& graph, MoverEvents& events);
  ~Mover();  // no move is under way on a link; frees all memory

  // The table now has this many segments. Throws Error(kIo) where the drives have no room for a new one; that
  // segment and those after it then have no extent.
  void grow(std::int32_t segments);
  void pass_use(ActionNode& use, Stream& stream, const Event& ended);  // the lease was passed to the stream
  // Makes the consumer's stream wait for the copies, and for the uses on other streams, that this granted use
  // comes after and that are under way.
  void make_stream_wait(const ActionNode& use) const;
  void end(ActionNode& node);  // a copy, or a use

  LinkStatistics link(Link link) const;
  NvmeCopies* nvme() const { return nvme_.get(); }  // null: there is no NVMe tier

 private:
  // What the mover knows of a node that is under way.
  struct UnderWay {
    Event ended;           // a copy that the device was given whole, a use that was passed to a stream
    std::int8_t slot = 0;  // a transfer of drives: the slot of its version
  };
  struct Busy {
    double seconds = 0;  // until the link last came to rest
    Clock::time_point since;
  };

  Memory take_memory(const ActionNode& node) override;
  void free_memory(const ActionNode& node) override;
  bool begin(ActionNode& copy, const ActionNode* fed_by) override;
  bool fed_whole(ActionNode& copy) override;
  void hurry(const ActionNode& copy) override;
  void on_extent(io::ExtentId extent, std::uint64_t tag, io::ExtentResult result) override;
  void on_piece(io::ExtentId extent, std::uint64_t tag, std::int64_t first, std::int64_t bytes) override;

  Arena& arena(Tier tier) const { return tier == Tier::kDevice ? options_.device->arena() : *options_.host; }
  UnderWay& under_way(const ActionNode& node) { return under_way_[node.number]; }
  void take_from_system(const ActionNode& node);
  void note_memory(const ActionNode& node, void* data);
  void release(SegmentId segment, Tier tier);
  void note_busy(Link link);
  void transfer(ActionNode& copy, const ActionNode* fed_by);
  void copy_piece(const ActionNode& copy, std::int64_t first, std::int64_t bytes);
  bool end_with_stream(ActionNode& copy);
  void copied(const ActionNode& copy, std::int64_t first, std::int64_t bytes);
  void end_transfer(ActionNode& copy, io::ExtentResult result);

  const TensorTable& table_;
  const TensorStore::Options& options_;
  const SegmentStates& states_;
  std::mutex& mutex_;  // the store's
  MoveGraph& graph_;
  MoverEvents& events_;
  std::int32_t segments_ = 0;
  bool hooked_ = false;              // the mover has set the host arena's hooks
  std::int64_t host_bytes_ = 0;      // bytes of the host arena that segments have
  StableArray<UnderWay> under_way_;  // by ActionNode::number
  std::array<Busy, kLinks> busy_;
  std::unique_ptr<Stream> copy_stream_[2];
  std::unique_ptr<NvmeCopies> nvme_;
  std::atomic<int> inside_{0};  // I/O threads that are inside on_extent() or on_piece()
  HostStream memory_thread_;    // takes memory from the system
};

}  // namespace zg
