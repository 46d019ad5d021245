// What a checkpoint says of state that it pins in the drives' files: where each segment lies, with the
// checksums of its pieces, and which elements of which tensors are in it. One file a rank, JSON, in the
// checkpoint's directory.
//
//   DRIVE/ziggurat-<16 hex digits>.kept       the drive's file, which outlives its run
//   DRIVE/ziggurat-<16 hex digits>.kept-for   the directory of the checkpoints that it is kept for
//   CHECKPOINTS/ziggurat-<16 digits>.kept     empty: this is that directory, and not another at its path
//
// Several processes of a machine have a file on a drive each, in directories of their own in the drive's
// (drive_directory()); those of all of them are meant by a drive's directory here.
//
// A kept file may be removed when no checkpoint of that directory names it. Functions may be called from any
// thread; errors are Error(kUsage) for what is damaged, with the place, and Error(kIo).
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/files.hpp"
#include "ziggurat/io/drive_rates.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/step/layout.hpp"

namespace zg {

inline constexpr const char* kKeptEnd = ".kept";

// The directories of a machine's other processes, in a drive's directory: this, and a number from 1.
inline constexpr const char* kProcessDirectory = "ziggurat-process-";

// The file of a drive, in the order of StoredPiece::drive.
struct KeptFile {
  std::string directory, name;
  std::string path() const { return directory + "/" + name; }
  bool operator==(const KeptFile&) const = default;
};

struct PinnedSegment {
  std::string name;
  std::int64_t bytes = 0;
  io::StoredSlot stored = {};
};

// Elements of a logical tensor, in a segment, one after the other.
struct PinnedPiece {
  std::string tensor, dtype;
  std::int64_t segment = 0, offset = 0;  // index; bytes
  CheckpointBox box;
  // For split masters, whose lower halves these bytes are: segment and offset of the upper halves, which are
  // weights.
  std::int64_t high_segment = -1, high_offset = 0;
  // For codes: where their scales begin in the segment, and the place of the first element in its block.
  std::int64_t scales = -1, phase = 0;
  // Bytes of an element at `offset`.
  std::int64_t width() const;
  bool operator==(const PinnedPiece& o) const;
};

struct PinnedState {
  std::vector<KeptFile> files;
  std::vector<DriveRates> rates;  // of the drives, in that order; empty: not known
  std::vector<PinnedSegment> segments;
  std::vector<PinnedPiece> pieces;
  int rank = -1;  // whose it is, as the name of a checkpoint's file says; -1: it was read from none

  std::string text() const;
  std::int64_t bytes() const;  // of all segments
  // Whether this run's segments are just these, wherever they lie.
  bool has_form_of(const PinnedState& other) const;
};
std::string pins_name(int rank);  // of the rank's file
PinnedState parse_pinned(const std::string& text, const std::string& where);
// Reads such a file, which must be the one that the manifest knows.
PinnedState read_pinned(const std::string& path, const CheckpointFile& wanted);

// The segments and pieces of this rank, as pinned_segments() lists them; nothing is stored yet.
PinnedState pinned_form(const Layout& layout);

// The pins of all ranks of a checkpoint; for who looks what it keeps. Throws Error(kUsage) where one of its
// files is not as it was written: then nobody knows what it keeps.
std::vector<PinnedState> pins_in(const std::string& checkpoint);
// The files of drives that checkpoints in this directory pin.
std::vector<KeptFile> kept_by(const std::string& directory_of_checkpoints);

// Keeps the file of a drive, for the checkpoints of a directory: writes down for whom, which lasts when it
// returns, and renames it, which lasts when the drive's directory was synced. Returns the new name. Throws
// Error(kIo).
std::string keep_file(Files& files, const std::string& path, const std::string& directory_of_checkpoints);
// Removes a kept file if nobody has it open as a tier, and no checkpoint of its directory names it. Returns
// why it could not be removed although it should be; empty: nothing failed.
std::string release_kept(Files& files, const KeptFile& file);
// The same for all kept files in a drive's directory, as a run that starts there does. Says what it has
// removed, and of which files it cannot know whether they are needed.
void reclaim_kept(Files& files, const std::string& directory);
// Gives the file systems back what no checkpoint of the directory pins in these files, which the caller alone
// uses. Does nothing where that cannot be known.
void free_unpinned(const std::vector<KeptFile>& files, const std::string& directory_of_checkpoints);
// Whether the file is kept for the checkpoints of this directory.
bool is_kept_for(const KeptFile& file, const std::string& directory_of_checkpoints);
// What the kept files in a drive's directory take there for the checkpoints of a directory: all of them, or
// only those that none of its checkpoints names, which the next run removes.
enum class Kept { kAll, kUnneeded };
std::int64_t kept_bytes(const std::string& directory, const std::string& directory_of_checkpoints,
                        Kept which);

}  // namespace zg
