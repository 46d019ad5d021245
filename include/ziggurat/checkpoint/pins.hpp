// A checkpoint's record of the state that it pins in the drives' files: where each segment lies, with the
// checksums of its pieces, and which elements of which tensors are in it. It is a JSON file for each rank, in
// the checkpoint's directory.
//
//   DRIVE/ziggurat-<16 hex digits>.kept       the drive's file, which outlives its run
//   DRIVE/ziggurat-<16 hex digits>.kept-for   the directory of the checkpoints that it is kept for
//   CHECKPOINTS/ziggurat-<16 digits>.kept     empty; marks that directory, if another takes its path
//
// Each process of a machine has its own file on a drive. With several processes, each file lies in the
// process's own directory inside the drive's (drive_directory()). Functions here that take a drive's
// directory include the directories of all processes in it.
//
// A kept file may be removed when no checkpoint of that directory names it. Any thread may call the
// functions. They throw Error(kUsage), which names the place, for damaged files, and Error(kIo).
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

// The name of another process's directory in a drive's directory is this and a number from 1.
inline constexpr const char* kProcessDirectory = "ziggurat-process-";

// A drive's file. Lists of them are indexed by StoredPiece::drive.
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

// Elements of a logical tensor that lie one after the other in a segment.
struct PinnedPiece {
  std::string tensor, dtype;
  std::int64_t segment = 0, offset = 0;  // the segment's index; bytes from its begin
  CheckpointBox box;
  // Split masters only, whose lower halves are the bytes at `offset`: segment and offset of the upper halves,
  // which are the weights.
  std::int64_t high_segment = -1, high_offset = 0;
  // Codes only: where their scales begin in the segment, and the first element's place in its block.
  std::int64_t scales = -1, phase = 0;
  // Bytes of an element at `offset`.
  std::int64_t width() const;
  bool operator==(const PinnedPiece& o) const;
};

struct PinnedState {
  std::vector<KeptFile> files;
  std::vector<DriveRates> rates;  // rates of the drives, in the order of `files`; empty: not known
  std::vector<PinnedSegment> segments;
  std::vector<PinnedPiece> pieces;
  int rank = -1;  // the rank in the name of the file that was read; -1: not read from a checkpoint's file

  std::string text() const;
  std::int64_t bytes() const;  // of all segments
  // Whether both have the same segments and pieces, wherever these lie on the drives.
  bool has_form_of(const PinnedState& other) const;
};
std::string pins_name(int rank);  // the name of the rank's file
PinnedState parse_pinned(const std::string& text, const std::string& where);
// Reads a pins file, whose size and hash must be the manifest's.
PinnedState read_pinned(const std::string& path, const CheckpointFile& wanted);

// The segments and pieces of this rank, as pinned_segments() lists them; nothing is stored yet.
PinnedState pinned_form(const Layout& layout);

// The pins of all ranks of a checkpoint, to find out which drives' files it needs. Throws Error(kUsage) if
// one of its files was changed, since then that is unknown.
std::vector<PinnedState> pins_in(const std::string& checkpoint);
// The drives' files in which checkpoints of this directory pin state.
std::vector<KeptFile> kept_by(const std::string& directory_of_checkpoints);

// Keeps a drive's file for the checkpoints of a directory. Records that directory, durably by the time the
// function returns, and renames the file, which is durable once the drive's directory is synced. Returns the
// new name. Throws Error(kIo).
std::string keep_file(Files& files, const std::string& path, const std::string& directory_of_checkpoints);
// Removes a kept file if no run has it open as its tier, and no checkpoint of its directory names it. Returns
// why a file that should be removed could not be; empty: nothing failed.
std::string release_kept(Files& files, const KeptFile& file);
// Calls release_kept() for all kept files in a drive's directory, when a run starts there. Logs which files
// were removed, and for which it is unknown whether they are needed.
void reclaim_kept(Files& files, const std::string& directory);
// Frees the space in these files that no checkpoint of the directory pins. Only the caller may use the files.
// Does nothing if it is unknown which space is pinned.
void free_unpinned(const std::vector<KeptFile>& files, const std::string& directory_of_checkpoints);
// Whether the file is kept for the checkpoints of this directory.
bool is_kept_for(const KeptFile& file, const std::string& directory_of_checkpoints);
// The bytes that files kept for the checkpoints of a directory take in a drive's directory: of all these
// files, or only of the files that no checkpoint names, which the next run removes.
enum class Kept { kAll, kUnneeded };
std::int64_t kept_bytes(const std::string& directory, const std::string& directory_of_checkpoints,
                        Kept which);

}  // namespace zg
