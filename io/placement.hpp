// The places of extents: the free space of every drive, and the split of each extent over the drives.
//
// Threads: one at a time; the volume calls it under its lock. Invariant: pieces that are reserved never
// overlap, and each begins on a grain.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "io/extent_allocator.hpp"
#include "io/shares.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io {

// A run of an extent's bytes on one drive, which is transferred as one and has one checksum. Its space
// extends to the end of its last grain.
struct Piece {
  int drive = 0;
  std::int64_t offset = 0;    // in the drive's file
  std::int64_t bytes = 0;     // a multiple of the grain, except in the last piece of an extent
  std::int64_t position = 0;  // in the extent
  std::uint64_t checksum = 0;
};

class ExtentPlacement {
 public:
  // Longer runs become several pieces, so that the checksum of one is made while the next one moves.
  static constexpr std::int64_t kMaxPiece = kMaxPieceBytes;

  ExtentPlacement(const Engine& engine, const VolumeOptions& options);

  // A call that throws std::bad_alloc has changed nothing.

  // Reserves space for one slot of an extent; false when too little is free. Each slot number has a Splitter
  // of its own, so that what is written together, the same slot of many extents, is spread over the drives.
  bool reserve(std::int64_t bytes, int slot, std::vector<Piece>& pieces);
  void release(std::vector<Piece>& pieces);
  // Takes the place out of the free space; false if it is not free, or does not begin on a grain.
  bool take(const StoredPiece& place);
  // To be called before a slot is written again. Moves it to other space if the present split no longer fits
  // the shares and other drives have room; then its contents are lost and this returns true.
  bool move(std::int64_t bytes, int slot, std::vector<Piece>& pieces);

  // Counts what is being written to a slot number, for Splitter::shares_changed().
  void write_begins(std::int64_t bytes, int slot) { spread(slot).under_way += grains_of(bytes); }
  void write_ends(std::int64_t bytes, int slot) { spread(slot).under_way -= grains_of(bytes); }
  void sample(std::span<const DriveSample> samples, double wall_seconds);  // see Shares::sample()

  std::int64_t grains_of(std::int64_t bytes) const { return (bytes + grain_ - 1) / grain_; }
  std::int64_t free_bytes(int drive) const { return at(drive).free_grains() * grain_; }
  std::int64_t used_bytes(int drive) const { return at(drive).used() * grain_; }
  std::int64_t largest_bytes(int drive) const { return at(drive).largest() * grain_; }
  std::int64_t grain() const { return grain_; }
  const Shares& shares() const { return shares_; }

 private:
  struct Spread {  // of the extents in one slot number
    Splitter splitter;
    std::int64_t under_way = 0;  // grains being written
  };
  const ExtentAllocator& at(int drive) const { return drives_[static_cast<std::size_t>(drive)]; }
  std::int64_t used_grains() const;  // on all drives
  Spread& spread(int slot);
  void prepare_release(std::span<const Piece> pieces);
  void prepare_place(std::span<const std::int64_t> given, std::size_t released);
  void place(std::int64_t bytes, std::span<const std::int64_t> given, std::vector<Piece>& pieces);
  std::int64_t longest_piece() const { return std::max<std::int64_t>(1, kMaxPiece / grain_); }  // grains
  double imbalance(std::int64_t grains, std::span<const std::int64_t> held) const;
  bool is_on_overfull_drive(std::int64_t grains) const;
  bool split_by_need(std::int64_t grains);

  const std::int64_t grain_, stripe_;  // bytes, grains
  std::vector<ExtentAllocator> drives_;
  Shares shares_;
  std::vector<Spread> spreads_;  // by slot number
  Splitter by_need_;
  // Scratch. By drive, in grains: what the slot holds now, what is free for it, what it is given.
  std::vector<std::int64_t> held_, free_, given_;
  std::vector<GrainRun> runs_;
  std::vector<Piece> placed_;
  std::vector<double> before_, need_;
};

}  // namespace zg::io
