// Extents over all drives of an engine: named runs of bytes, striped without RAID, with checksums and version
// slots. What a tiered store keeps its segments in.
//
//   create()  reserves space for an extent, in each of its slots
//   write()   replaces the contents of one slot: its pieces go to all drives, each by its share
//   read()    brings them back, and compares their checksums (XXH3) with those made when they were written
//
// In parts, for who passes the bytes on to another link, or has them from one: a read tells of each piece as
// soon as it is there and right (ExtentCompletion::on_piece), and a staged write (ExtentTransfer::ready)
// takes each piece as soon as its bytes are there (Volume::ready). A piece has at most kMaxPieceBytes, or a
// grain.
//
// Shares: of the drives' bandwidth; given by the caller, or learned from what they deliver while they work. A
// drive that becomes slow gets less of what is written from then on (an extent moves when it is next written,
// if other drives have space; it is written whole anyway); one that fails is named by the result.
// Versions: a slot's old contents are forgotten when a write to it begins; other slots are never touched by
// it. A write that fails or is cut off leaves its slot without contents.
// Space: an extent is cut over as many free runs as it needs, largest first, in grains, so a reservation
// succeeds exactly if enough grains are free, and no piece is ever smaller than one: fragmentation can slow,
// not stop.
//
// Threads: any thread may call anything (the waiting calls: not from a completion); completions are called on
// I/O threads, never within the call that began the transfer, without locks held, and under the rules of
// io::Completion. (Where memory has run out, that of a staged write may be called within the last ready(), or
// abandon().) Of one slot, a write and any other transfer must not overlap; any number of reads may.
// Memory: reading and writing allocate nothing once as many transfers as now have been under way before (a
// write that moves its extent may). Where memory runs out they throw std::bad_alloc: then nothing was begun,
// and the slot of a write has no contents.
// Invariant: the completion of every transfer begun is called exactly once.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct ExtentId {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;  // 0: names nothing
  explicit operator bool() const { return generation != 0; }
};

struct [[nodiscard]] ExtentResult {
  // An errno. EBADMSG: a checksum is wrong; ENODATA: the slot has no contents; ECANCELED: the write was
  // abandoned; none ever means anything else.
  int error = 0;
  int drive = -1;           // where; -1: none
  std::int64_t offset = 0;  // of the piece that failed, in that drive's file
  int cause = 0;            // what the engine said where that is no errno for the above; 0: the same
  bool ok() const { return error == 0; }
};

class ExtentCompletion {
 public:
  virtual void on_extent(ExtentId extent, std::uint64_t tag, ExtentResult result) = 0;
  // Of a read: these bytes of the extent are in memory, and their checksum is right. Each byte comes once at
  // most; all have come before an on_extent() that is ok. Pieces come in any order, from several threads at
  // once, and none during or after on_extent(). One that failed does not come.
  virtual void on_piece(ExtentId /*extent*/, std::uint64_t /*tag*/, std::int64_t /*first*/,
                        std::int64_t /*bytes*/) {}

 protected:
  ~ExtentCompletion() = default;
};

struct ExtentSpec {
  std::string name;        // for messages
  std::int64_t bytes = 0;  // > 0
  int slots = 1;           // 1: writes replace the only copy; 2: the other slot keeps the version before
};

struct ExtentTransfer {
  ExtentId extent;
  int slot = 0;
  void* data = nullptr;  // all bytes of the extent; not changed by a write
  // They are in memory of the engine's DirectStorage; address, and the extent's bytes and grains, are multiples of
  // Engine::alignment().
  bool on_device = false;
  Priority priority = Priority::kDemand;
  std::int64_t version = 0;                // write: what version() says when it is done; 0 or more
  ExtentCompletion* completion = nullptr;  // required
  std::uint64_t tag = 0;
  // A write, staged if 0 or more: so many of the first bytes may be read now, and the rest as ready() says.
  // It must be brought to its end, by ready() of all bytes or by abandon(), and does not complete before.
  std::int64_t ready = -1;
};

// What is transferred and checked at once, at most (one grain, where that is more).
inline constexpr std::int64_t kMaxPieceBytes = 4 << 20;

struct SpaceReport {
  std::int64_t bytes = 0;    // of the file
  std::int64_t used = 0;     // by extents, whole grains
  std::int64_t largest = 0;  // the longest free run
  double share = 0;          // of what is written next, in [0, 1]
  bool shares_are_learned = false;
};

struct VolumeOptions {
  // Bandwidths of the drives, in any unit: extents are spread by them. Empty: learned, equal to begin with.
  std::vector<double> shares = {};
  bool adapt = true;                 // shares follow what the drives deliver
  std::int64_t grain = 64 * 1024;    // space is given in multiples of it; multiple of 4096
  std::int64_t stripe = 512 * 1024;  // an extent gives each drive at least this much, or nothing
  bool verify = true;                // checksums
};

class Volume {
 public:
  virtual ~Volume() = default;  // waits for its transfers; a staged write left without an end is a bug

  // Reserves. Throws Error(kIo) with what is needed and free on each drive when there is no room.
  virtual ExtentId create(const ExtentSpec& spec) = 0;
  virtual void destroy(ExtentId extent) = 0;  // none of its transfers may be under way

  // A completion's result is for the extent as a whole; of several failures it names one.
  virtual void write(const ExtentTransfer& transfer) = 0;
  virtual void read(const ExtentTransfer& transfer) = 0;
  // The same, and wait; `completion` and `tag` are not used.
  virtual ExtentResult write_and_wait(ExtentTransfer transfer) = 0;
  virtual ExtentResult read_and_wait(ExtentTransfer transfer) = 0;
  // Of the staged write of a slot: its first `bytes` bytes may be read now. Grows; with the extent's size the
  // write is as any other. After a failure no more is read, and the last call lets the write complete.
  virtual void ready(ExtentId extent, int slot, std::int64_t bytes) = 0;
  // No more bytes come. The write completes when the parts that were begun are done, with ECANCELED or with
  // what had failed, and leaves the slot without contents.
  virtual void abandon(ExtentId extent, int slot) = 0;
  // Makes the waiting parts of a transfer under way more urgent, and those that are still to come.
  virtual void promote(ExtentId extent, int slot, Priority priority) = 0;

  // What the slot holds; -1: nothing (never written, being written, or a write failed).
  virtual std::int64_t version(ExtentId extent, int slot) const = 0;
  // The slot with the highest version; -1: none has contents.
  virtual int newest(ExtentId extent) const = 0;
  // Forgets the contents; the space stays reserved. No transfer of the slot may be under way.
  virtual void invalidate(ExtentId extent, int slot) = 0;

  // Bytes that cross the link when the extent is written or read once: whole pages.
  virtual std::int64_t transfer_bytes(ExtentId extent) const = 0;
  virtual SpaceReport space(int drive) const = 0;
  // For people: "reading block.3.master: piece of 512.0 KiB at 1048576 of nvme1 (/mnt/b): Input/output error
  // (errno 5)". Of a result that is ok, "reading block.3.master: done".
  virtual std::string explain(ExtentId extent, Op op, const ExtentResult& result) const = 0;
  // Where the slot's pieces lie: "nvme0 [0, 524288) ...".
  virtual std::string layout(ExtentId extent, int slot) const = 0;
};

// The engine must outlive the volume, and nobody else may use its drives. Throws Error(kUsage) for options
// that make no sense.
std::unique_ptr<Volume> make_volume(Engine& engine, const VolumeOptions& options);

// XXH3 (64 bit), with the widest vectors the processor has; every machine gives the same value.
std::uint64_t checksum(const void* data, std::int64_t bytes);

}  // namespace zg::io
