// Where extents lie: the free space of every drive, and how each extent is cut over them.
//
// Threads: none of its own; the volume calls it under its lock. Invariant: pieces that were reserved and not
// released never overlap, and each begins on a grain.
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

// A run of an extent's bytes on one drive; what is transferred, and checksummed, at once. Its space is its
// own to the end of the last grain.
struct Piece {
  int drive = 0;
  std::int64_t offset = 0;    // in the drive's file
  std::int64_t bytes = 0;     // multiple of the grain, but for the last of an extent
  std::int64_t position = 0;  // in the extent
  std::uint64_t checksum = 0;
};

class Placement {
 public:
  // Longer runs are several pieces, so that checksums are made while the next piece moves.
  static constexpr std::int64_t kMaxPiece = kMaxPieceBytes;

  Placement(const Engine& engine, const VolumeOptions& options);

  // What throws for want of memory has changed nothing.

  // Space for one slot of an extent; false when less is free. Slots of the same number take turns among the
  // drives, apart from those of others: what is written together, the same slot of many extents, is spread.
  bool reserve(std::int64_t bytes, int slot, std::vector<Piece>& pieces);
  void release(std::vector<Piece>& pieces);
  // Before a slot is written anew: other space, if its drives no longer suit the shares and others have room.
  // The contents are lost if this is true.
  bool move(std::int64_t bytes, int slot, std::vector<Piece>& pieces);

  // What is being written to this slot number, for Cutter::shares_changed.
  void write_begins(std::int64_t bytes, int slot) { turns(slot).under_way += grains_of(bytes); }
  void write_ends(std::int64_t bytes, int slot) { turns(slot).under_way -= grains_of(bytes); }
  void sample(std::span<const DriveSample> samples, double wall_seconds);  // as Shares::sample()

  std::int64_t grains_of(std::int64_t bytes) const { return (bytes + grain_ - 1) / grain_; }
  std::int64_t free_bytes(int drive) const { return at(drive).free_grains() * grain_; }
  std::int64_t used_bytes(int drive) const { return at(drive).used() * grain_; }
  std::int64_t largest_bytes(int drive) const { return at(drive).largest() * grain_; }
  std::int64_t grain() const { return grain_; }
  const Shares& shares() const { return shares_; }

 private:
  struct Turns {
    Cutter cutter;
    std::int64_t under_way = 0;  // grains
  };
  const ExtentAllocator& at(int drive) const { return drives_[static_cast<std::size_t>(drive)]; }
  Turns& turns(int slot);
  void make_ready_to_release(std::span<const Piece> pieces);
  void make_ready_to_place(std::span<const std::int64_t> given, std::size_t released);
  void place(std::int64_t bytes, std::span<const std::int64_t> given, std::vector<Piece>& pieces);
  std::int64_t longest_piece() const { return std::max<std::int64_t>(1, kMaxPiece / grain_); }  // grains
  double lopsidedness(std::int64_t grains, std::span<const std::int64_t> held) const;
  bool burdens(std::int64_t grains) const;
  bool cut_by_need(std::int64_t grains);

  const std::int64_t grain_, stripe_;  // bytes, grains
  std::vector<ExtentAllocator> drives_;
  Shares shares_;
  std::vector<Turns> turns_;  // by slot number
  Cutter by_need_;
  // Scratch:
  std::vector<std::int64_t> held_, free_, given_;
  std::vector<GrainRun> runs_;
  std::vector<Piece> placed_;
  std::vector<double> before_, need_;
};

}  // namespace zg::io
