// The implementation of Volume: the table of extents, and their transfers over the engine's drives.
//
// Threads: mutex_ guards the table, the placement and the lists of operations. The engine's submit() is
// called with it, completions are called without it. The completion of a piece runs on the I/O thread of its
// drive and makes the checksum there; the last one of an operation finishes the operation. While an operation
// is under way, its slot's pieces stay where they are, and only the completions of a write change them, each
// its own checksum.
// Invariant: an operation is in exactly one list: the free list, or its slot's while it is under way.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "io/drive_sampler.hpp"
#include "io/placement.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io {

class StripedVolume final : public Volume {
 public:
  StripedVolume(Engine& engine, const VolumeOptions& options);
  ~StripedVolume() override;
  StripedVolume(const StripedVolume&) = delete;
  StripedVolume& operator=(const StripedVolume&) = delete;

  void take(std::span<const StoredPiece> places) override;
  ExtentId create(const ExtentSpec& spec) override;
  void destroy(ExtentId extent) override;
  void write(const ExtentTransfer& transfer) override { start(Op::kWrite, transfer); }
  void read(const ExtentTransfer& transfer) override { start(Op::kRead, transfer); }
  ExtentResult write_and_wait(ExtentTransfer t) override { return start_and_wait(Op::kWrite, t); }
  ExtentResult read_and_wait(ExtentTransfer t) override { return start_and_wait(Op::kRead, t); }
  void mark_ready(ExtentId extent, int slot, std::int64_t bytes) override;
  void abandon(ExtentId extent, int slot) override;
  void promote(ExtentId extent, int slot, Priority priority) override;
  std::int64_t version(ExtentId extent, int slot) const override;
  int newest_slot(ExtentId extent) const override;
  void invalidate(ExtentId extent, int slot) override;
  int slot_to_write(ExtentId extent) const override;
  void pin(ExtentId extent, int slot) override;
  void unpin(ExtentId extent, int slot) override;
  std::vector<StoredPiece> stored_pieces(ExtentId extent, int slot) const override;
  std::int64_t transfer_bytes(ExtentId extent) const override;
  SpaceReport space(int drive) const override;
  std::string explain(ExtentId extent, Op op, const ExtentResult& result) const override;
  std::string describe_layout(ExtentId extent, int slot) const override;

  // More extents, or transfers under way, than this are a bug of the caller.
  static constexpr std::size_t kMaxExtents = std::size_t{1} << 24, kMaxOperations = std::size_t{1} << 20;

 private:
  struct Operation;
  enum class State : std::uint8_t { kEmpty, kWriting, kFull };
  struct Slot {
    std::vector<Piece> pieces;
    State state = State::kEmpty;
    std::int64_t version = -1;
    int pins = 0;                     // with pins it is full
    Operation* operations = nullptr;  // under way
    void adopt(const ExtentSpec& spec, const StoredSlot& stored);
  };
  struct Extent {
    std::string name;
    std::int64_t bytes = 0;
    std::vector<Slot> slots;  // none: the entry is free
    std::uint32_t generation = 1;
  };
  // One transfer of an extent. Each part is an engine transfer of one piece, whose index is the tag; or of no
  // piece (kNoPiece). Called under the lock, but for on_complete() and check().
  struct Operation final : Completion {
    explicit Operation(StripedVolume& of) : volume(of) {}
    void on_complete(Ticket, std::uint64_t tag, Result result) override {
      volume.part_done(*this, static_cast<std::uint32_t>(tag), result);
    }
    void submit_pieces(std::uint32_t end);
    void submit_nothing();
    std::uint32_t pieces_within(std::int64_t bytes) const;
    bool check(std::uint32_t piece);
    ExtentResult outcome() const;
    StripedVolume& volume;
    Op op = Op::kRead;
    ExtentTransfer transfer;
    Slot* slot = nullptr;
    std::vector<Ticket> tickets;
    bool staged = false;                    // a write whose last bytes are not ready yet
    std::uint32_t next_piece = 0;           // the first piece that was not submitted
    std::atomic<std::int64_t> left{0};      // parts not completed; all that were not submitted count as one
    std::atomic<std::uint64_t> failure{0};  // the first (see failure_of); 0: none
    Operation* next = nullptr;              // in its list
    Operation* previous = nullptr;
  };
  // The operations, which are used again and again; keeps the invariant above. Called under the lock.
  class Operations {
   public:
    explicit Operations(StripedVolume& volume) : volume_(volume) {}
    Operation& take(Op op, const ExtentTransfer& transfer, Slot& slot);
    void give_back(Operation& operation);

   private:
    StripedVolume& volume_;
    std::deque<Operation> all_;  // never shrinks
    Operation* free_ = nullptr;
  };

  void part_done(Operation& operation, std::uint32_t piece, Result result);
  void finish(Operation& operation);
  void start(Op op, const ExtentTransfer& transfer);
  Operation& staged_write(ExtentId extent, int slot);
  void end_early(Operation& operation, std::unique_lock<std::mutex>& lock);
  void give_up(Operation& operation);
  ExtentResult start_and_wait(Op op, ExtentTransfer& transfer);

  Extent& at(ExtentId id);
  const Extent& at(ExtentId id) const { return const_cast<StripedVolume*>(this)->at(id); }
  Slot& at(ExtentId id, int slot);
  const Slot& at(ExtentId id, int slot) const { return const_cast<StripedVolume*>(this)->at(id, slot); }
  void reserve(const ExtentSpec& spec, std::vector<Slot>& slots);
  [[noreturn]] void throw_no_room(const ExtentSpec& spec) const;

  Engine& engine_;
  const bool verify_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;  // an operation and its completion have ended
  ExtentPlacement placement_;
  DriveSampler sampler_;
  std::deque<Extent> extents_;  // never shrinks, so that slots stay where they are
  std::vector<std::uint32_t> free_extents_;
  Operations operations_{*this};
  std::int64_t under_way_ = 0, staged_ = 0;  // operations; those of them that are staged
};

}  // namespace zg::io
