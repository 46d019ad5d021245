// Extents over all drives of an engine: named runs of bytes, striped over the drives, with checksums and
// version slots. A tiered store keeps its segments in them.
//
//   create()  reserves space for an extent, in each of its slots
//   write()   replaces the contents of one slot; each drive gets a part of the pieces according to its share
//   read()    reads the pieces back, and compares their checksums (XXH3) with those made when they were
//             written
//
// Piece by piece: callers that pass the bytes on over another link, or receive them from one, need not wait
// for the whole extent. A read reports each piece as soon as it is in memory and verified
// (ExtentCompletion::on_piece). A staged write (ExtentTransfer::ready) begins each piece as soon as its bytes
// are there (Volume::mark_ready). A piece has at most kMaxPieceBytes, or one grain if that is more.
//
// Shares: how much of what is written each drive gets. They follow the drives' bandwidths, which the caller
// gives, or which are learned from what the drives deliver. A drive that becomes slow gets less of everything
// written from then on: an extent moves when it is next written, since it is written whole anyway, provided
// that other drives have space. When a drive fails, the result names it.
// Versions: a write drops the old contents of its slot when it begins, and never touches other slots. A write
// that fails or is interrupted leaves its slot without contents. A slot may be pinned: its contents then stay
// as they are, at the same places, until it is unpinned as often. Who knows the places (stored_pieces()) can
// read them in the drives' files when the volume is gone, and a later volume over the same files can adopt
// them.
// Space: it is given in grains. An extent takes as many free runs as it needs, the largest first, so a
// reservation succeeds exactly if enough grains are free, and no piece is smaller than a grain. So
// fragmentation can make transfers slower, but cannot make a reservation fail.
//
// Threads: any thread may call anything, but no completion may call a waiting function. Completions are
// called on I/O threads, without locks held, never inside the call that began the transfer, and under the
// rules of io::Completion. (Only when memory has run out, the completion of a staged write may be called
// inside the last mark_ready(), or inside abandon().) A write of a slot must not overlap any other transfer
// of that slot; reads may overlap each other.
//
// Memory: read() and write() allocate nothing once as many transfers have been under way together before
// (but a write that moves its extent may). When memory runs out they throw std::bad_alloc; then no transfer
// was begun, and the slot of a write has no contents.
//
// Invariant: every transfer begun calls its completion exactly once.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct ExtentId {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;  // 0: no extent
  explicit operator bool() const { return generation != 0; }
};

struct [[nodiscard]] ExtentResult {
  // An errno. These three come from the volume and mean only this: EBADMSG, a checksum is wrong; ENODATA, the
  // slot has no contents; ECANCELED, the write was abandoned.
  int error = 0;
  int drive = -1;           // of the piece that failed; -1: no piece
  std::int64_t offset = 0;  // of that piece, in the drive's file
  int cause = 0;  // the engine's errno, where it is one of those three and `error` is therefore EIO; else 0
  bool ok() const { return error == 0; }
};

class ExtentCompletion {
 public:
  virtual void on_extent(ExtentId extent, std::uint64_t tag, ExtentResult result) = 0;
  // For reads: the bytes [first, first + bytes) of the extent are in memory and their checksum is right.
  // Called at most once for each byte, in any order, by several threads at once, but never during or after
  // on_extent(). All bytes have been reported before an on_extent() that is ok; a piece that failed never is.
  virtual void on_piece(ExtentId /*extent*/, std::uint64_t /*tag*/, std::int64_t /*first*/,
                        std::int64_t /*bytes*/) {}

 protected:
  ~ExtentCompletion() = default;
};

// A run of an extent's bytes in a drive's file.
struct StoredPiece {
  int drive = 0;
  std::int64_t offset = 0;  // in the drive's file
  std::int64_t bytes = 0;
  std::uint64_t checksum = 0;  // XXH3 of these bytes
  bool operator==(const StoredPiece&) const = default;
};
// The contents of a slot: its bytes one after the other.
struct StoredSlot {
  std::int64_t version = 0;
  std::vector<StoredPiece> pieces;
  int pins = 0;  // of adopted contents, at once
};

struct ExtentSpec {
  std::string name;        // for messages
  std::int64_t bytes = 0;  // > 0
  int slots = 1;           // 1: a write replaces the only version; 2: the other slot keeps the one before
  // Contents that the drives' files have already, of the first slots; at places that Volume::take() has
  // taken.
  std::vector<StoredSlot> adopted = {};
};

struct ExtentTransfer {
  ExtentId extent;
  int slot = 0;
  void* data = nullptr;  // all bytes of the extent; not changed by a write
  // `data` is device memory, which the engine's DirectStorage reaches. Then the address, the extent's size
  // and the grain must be multiples of Engine::alignment().
  bool on_device = false;
  Priority priority = Priority::kDemand;
  std::int64_t version = 0;                // of a write: what version() returns after it; 0 or more
  ExtentCompletion* completion = nullptr;  // required
  std::uint64_t tag = 0;
  // 0 or more makes a write staged: now only its first `ready` bytes may be read, the others when
  // mark_ready() says so. It does not complete before it is ended, which must be by mark_ready() of all bytes
  // or by abandon().
  std::int64_t ready = -1;
};

// The largest piece, which is transferred and checked as one (a grain, if that is larger).
inline constexpr std::int64_t kMaxPieceBytes = 4 << 20;

struct SpaceReport {
  std::int64_t bytes = 0;           // size of the drive's file
  std::int64_t used = 0;            // by extents, in whole grains
  std::int64_t largest = 0;         // size of the largest free run
  double share = 0;                 // of what is written from now on, in [0, 1]
  bool shares_are_learned = false;  // false: they are still the given ones
};

struct VolumeOptions {
  // Bandwidths of the drives in any unit, by which extents are spread. Empty: equal, until they are learned.
  std::vector<double> shares = {};
  bool adapt = true;                 // the shares follow what the drives deliver
  std::int64_t grain = 64 * 1024;    // bytes; the unit in which space is given, a multiple of 4096
  std::int64_t stripe = 512 * 1024;  // bytes; each drive gets at least this much of an extent, or nothing
  bool verify = true;                // make and compare checksums
};

class Volume {
 public:
  virtual ~Volume() = default;  // waits for its transfers; a staged write that was not ended is a bug

  // Takes places of the drives' files out of the free space, so that extents can adopt what lies there.
  // Throws Error(kUsage) for a place that is not free or not in the file.
  virtual void take(std::span<const StoredPiece> places) = 0;
  // Reserves space. Throws Error(kIo), with what is needed and what is free on each drive, when it is too
  // little.
  virtual ExtentId create(const ExtentSpec& spec) = 0;
  virtual void destroy(ExtentId extent) = 0;  // none of its transfers may be under way

  // The completion gets one result for the whole extent; of several failures it names one.
  virtual void write(const ExtentTransfer& transfer) = 0;
  virtual void read(const ExtentTransfer& transfer) = 0;
  // The same, and wait for it; `completion` and `tag` are ignored. Not in a completion.
  virtual ExtentResult write_and_wait(ExtentTransfer transfer) = 0;
  virtual ExtentResult read_and_wait(ExtentTransfer transfer) = 0;
  // For the staged write of a slot: its first `bytes` bytes may be read now. Successive calls must not lower
  // `bytes`; the one with the extent's size ends the staging. After a failure nothing more is read, and that
  // last call lets the write complete.
  virtual void mark_ready(ExtentId extent, int slot, std::int64_t bytes) = 0;
  // For the staged write of a slot: no more bytes come. When the pieces that have begun are done, the write
  // completes with ECANCELED, or with an earlier failure, and leaves the slot without contents.
  virtual void abandon(ExtentId extent, int slot) = 0;
  // Makes the transfers of a slot more urgent: the pieces that wait, and those that are yet to begin.
  virtual void promote(ExtentId extent, int slot, Priority priority) = 0;

  // The version that the slot holds; -1: none (never written, being written, or the last write failed).
  virtual std::int64_t version(ExtentId extent, int slot) const = 0;
  // The slot with the highest version; -1: no slot has contents.
  virtual int newest_slot(ExtentId extent) const = 0;
  // Drops the contents; the space stays reserved. No transfer of the slot may be under way.
  virtual void invalidate(ExtentId extent, int slot) = 0;

  // The slot that a write should take: of those that are not pinned, one without contents, or else the one
  // with the lowest version; -1: all are pinned.
  virtual int slot_to_write(ExtentId extent) const = 0;
  // Pins the slot, which has contents: it may not be written or invalidated until it is unpinned as often.
  virtual void pin(ExtentId extent, int slot) = 0;
  virtual void unpin(ExtentId extent, int slot) = 0;
  // Where the slot's contents lie, with their checksums (0 without VolumeOptions::verify). No write of the
  // slot may be under way.
  virtual std::vector<StoredPiece> stored_pieces(ExtentId extent, int slot) const = 0;

  // Bytes that cross the link when the extent is written or read once, in whole pages.
  virtual std::int64_t transfer_bytes(ExtentId extent) const = 0;
  virtual SpaceReport space(int drive) const = 0;
  // A message for people: "reading block.3.master: piece of 512.0 KiB at 1048576 of nvme1 (/mnt/b):
  // Input/output error (errno 5)"; for a result that is ok, "reading block.3.master: done".
  virtual std::string explain(ExtentId extent, Op op, const ExtentResult& result) const = 0;
  // The places of the slot's pieces: "nvme0 [0, 524288) ...".
  virtual std::string describe_layout(ExtentId extent, int slot) const = 0;
};

// The engine must outlive the volume, and nothing else may use its drives. Throws Error(kUsage) for invalid
// options.
std::unique_ptr<Volume> make_volume(Engine& engine, const VolumeOptions& options);

// XXH3 (64 bit), with the widest vectors that the processor has; the value is the same on every machine.
std::uint64_t checksum(const void* data, std::int64_t bytes);

}  // namespace zg::io
