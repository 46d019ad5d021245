// Checkpoints: directories from which a run goes on as if it had not stopped. docs/checkpoint-files.md
// describes them.
//
//   checkpoints/0003-step-200/manifest.json            what bits depend on, and each file with its hash
//   checkpoints/0003-step-200/rank-00000.safetensors   what rank 0 held of all tensors
//   checkpoints/0003-step-200/rank-00000.pins          or where it lies in the files of the run's drives
//   copies/0003-step-200/state-00001-of-00003.safetensors   in an exported copy: what was pinned
//   copies/0003-step-200/index.json                    in any copy, for other programs: where each tensor is
//   checkpoints/0004-step-300.part-...                 one that is being written, or was when its run ended
//
// Numbers ascend, so the highest is the newest. A directory has its name only when all of it is on the drive.
// Files hold logical tensors, as pieces: consecutive elements of a parameter or of a moment, in the engine's
// order (matrices are [out, in]), or boxes of a matrix. State that a run keeps on drives stays in the drives'
// files, which then outlive the run; a checkpoint names the places, and its run writes to others until no
// checkpoint names them. Functions may be called from any thread; errors are
// Error(kUsage) for what is damaged, with the file, and Error(kIo).
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/optim/loss_scale.hpp"

namespace zg {

class Files;

struct CheckpointFile {
  std::string name;
  std::int64_t bytes = 0;
  // XXH3 of the header, which has those of all tensors; of one that says where state is pinned, of all of it.
  std::uint64_t header_hash = 0;
  // Whether it says where state is pinned in the drives' files, and has no tensors itself.
  bool is_pins() const;
};

// What an evaluation has found, after so many steps.
struct Validation {
  std::int64_t step = 0;
  double loss = 0;
};

struct CheckpointManifest {
  static constexpr std::int64_t kFormat = 3;  // this program reads it and all before it
  // 1 where all pieces are consecutive elements, 2 where some are boxes, 3 where state is pinned in drives'
  // files: an older program refuses these alone.
  std::int64_t format = 1;
  std::string version;                      // of the program that wrote it
  std::string time;                         // UTC, "2026-11-23T05:54:24Z"
  std::string run;                          // 16 digits, the same in all checkpoints of a run
  std::int64_t number = 0, step = 0;        // step: steps done; the next batch is that of this step
  std::int64_t updates = 0, skipped = 0;    // of these steps
  std::optional<LossScaler::State> scaler;  // with fp16
  double loss = 0;                          // of the last step; not finite where that was skipped
  std::optional<Validation> validation;     // the last one of the run so far
  int ranks = 1, processes = 1, shards = 1, stage = 0;  // of the run that wrote it
  // What bits depend on: keys of the configuration and the like, with their values as texts.
  std::vector<std::pair<std::string, std::string>> bits;
  std::string config;  // as resolved
  std::vector<CheckpointFile> files;
  std::int64_t pinned = 0;  // bytes of state that lie in the drives' files; format 3
  // An exported copy's file that says, for other programs, where each tensor is; header_hash is of all of it.
  std::optional<CheckpointFile> index;

  std::int64_t bytes() const;  // of all files, without what is pinned elsewhere
  // JSON that ends with the hash of all before it.
  std::string text() const;
};
// Throws Error(kUsage) at `where` for a text that is not just as it was written.
CheckpointManifest parse_manifest(const std::string& text, const std::string& where);

inline constexpr const char* kManifestName = "manifest.json";

// A checkpoint that lies in a directory, by its name. It need not be valid.
struct CheckpointEntry {
  std::string path;
  std::int64_t number = 0, step = 0;
};
// Newest first. A directory that is not there has none.
std::vector<CheckpointEntry> list_checkpoints(const std::string& directory);
// The remains of checkpoints that were not completed, or whose removal was not.
std::vector<std::string> unfinished_checkpoints(const std::string& directory);
std::string checkpoint_name(std::int64_t number, std::int64_t step);

// What a checkpoint must hold: a parameter, or a moment of one, by its whole elements.
struct CheckpointTensor {
  std::string name;
  std::string dtype;  // as safetensors calls it; "U8": codes of eight bits with their scales
  std::int64_t count = 0;
  bool moment = false;
};

// Elements of a tensor: `lines` runs of `width` neighbours, whose first elements lie `stride` apart.
struct CheckpointBox {
  std::int64_t first = 0, lines = 1, width = 0, stride = 0;
  std::int64_t count() const { return lines * width; }
};

// An open checkpoint: its manifest and its files, mapped.
class Checkpoint {
 public:
  // Checks the manifest, and of each file size and header; not yet the tensors' bytes. Opens the drives'
  // files in which it pins state.
  explicit Checkpoint(const std::string& directory);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const { return path_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  // Reads all bytes and compares their hashes. `progress` is called with the bytes done; `take` with all
  // bytes of each file of the manifest, in order, and nothing of what is pinned.
  using Sink = std::function<void(const CheckpointFile& file, std::int64_t offset, const void* data,
                                  std::int64_t bytes)>;
  void verify(const std::function<void(std::int64_t done)>& progress = {}, const Sink& take = {}) const;
  // Checks that the pieces hold these tensors, each element once, and with kNone no others. They may be of
  // other types.
  enum class Others { kNone, kAny };
  void expect(const std::vector<CheckpointTensor>& tensors, Others others = Others::kNone) const;

  // The tensors, by name. Those below are for tensors that are whole, as expect() finds out.
  std::vector<CheckpointTensor> tensors() const;
  const std::string& dtype_of(const std::string& tensor) const;
  // Copies a box's elements as they are stored, line after line.
  void read(const std::string& tensor, const CheckpointBox& box, void* out) const;
  void read(const std::string& tensor, std::int64_t first, std::int64_t count, void* out) const {
    read(tensor, {first, 1, count, 0}, out);
  }
  // The same with "U8": the codes, and for each of them its scale.
  void read_codes(const std::string& tensor, const CheckpointBox& box, std::uint8_t* codes,
                  float* scales) const;

  // Writes all tensors, also those that are pinned in drives' files, into new files in `directory`, of
  // `file_bytes` at most where a single tensor, or segment of a drive, is not larger. Compares all hashes on
  // the way, with `progress` as verify() has it. Throws Error(kUsage) where the checkpoint is damaged or its
  // run has removed it since, Error(kIo).
  std::vector<CheckpointFile> copy_tensors(Files& files, const std::string& directory,
                                           std::int64_t file_bytes,
                                           const std::function<void(std::int64_t done)>& progress = {}) const;
  // The text of an exported copy's index.json: of each tensor, its pieces in these files of `directory`.
  // Throws Error(kUsage) where a file's header is not what `files` says.
  static std::string index_of(const std::string& directory, const std::vector<CheckpointFile>& files);
  // Throws Error(kUsage) where its run has removed the checkpoint since, and so may have written to what was
  // pinned: to be called after the last byte was read, before it is used.
  void check_still_there() const;
  // Drops the mappings of all files, so that a file that is removed frees its space; of the rest only
  // path() and manifest() may be called then.
  void close();

  struct Piece {
    std::string tensor, dtype, file;
    CheckpointBox box;
  };
  std::vector<Piece> pieces() const;  // by tensor and first element
  // The paths of the drives' files in which state is pinned; none: there is nothing pinned.
  std::vector<std::string> drive_files() const;

 private:
  struct State;
  class Copy;
  void verify_index() const;
  std::string path_;
  CheckpointManifest manifest_;
  std::unique_ptr<State> state_;
};

// Removes a checkpoint, or the remains of one, and those drives' files that no other checkpoint of its
// directory pins state in, unless a run uses them. Until it is gone it has another name, so that none is ever
// seen in part.
void discard_checkpoint(const std::string& path);

// Writes a copy into `directory`, which may be on another file system, and returns its path. The copy has all
// tensors in it, also those that are pinned in drives' files. All bytes are
// compared with their hashes on the way, and the copy has its name only when all of it is on the drive.
// Throws Error(kUsage) where the checkpoint is damaged, or one of its name is there; Error(kIo).
std::string export_checkpoint(const Checkpoint& checkpoint, const std::string& directory,
                              const std::function<void(std::int64_t done)>& progress = {});
// Writes the master weights in fp32 as a Hugging Face directory, without a tokenizer, which checkpoints have
// not. Before that all bytes are verified, with `progress`. Of a run that trains adapters these alone, as
// PEFT writes them, or, kMerged, the model with them merged into its weights. Throws Error(kUsage) for
// kMerged where the run trains none.
enum class ExportedModel { kAsTrained, kMerged };
void export_model(const Checkpoint& checkpoint, const std::string& directory,
                  const std::function<void(std::int64_t done)>& progress = {},
                  ExportedModel what = ExportedModel::kAsTrained);

// Makes a checkpoint after `step` steps of the tensors of a safetensors file: what the checkpoint `like` has,
// by its names, whole, vectors as [n], matrices as [out, in], in F32. All else is as in `like`, another run's
// of that configuration, the loss scale too. It gets its own name in `directory`; returns its path.
// `progress` is told the share that is done, in [0, 1]. Throws Error(kUsage) for a tensor that is missing or
// of another shape or type; Error(kIo).
std::string import_checkpoint(const Checkpoint& like, const std::string& file, const std::string& directory,
                              std::int64_t step, const std::function<void(double share)>& progress = {});

// Throws Error(kUsage) where a run cannot go on from this path, as far as that shows without reading all of
// it: there is no checkpoint, or it is damaged.
void check_resume(const std::string& path);

// The newest one in these directories that is valid, all hashes compared; none: there is no checkpoint at
// all. Of copies of one checkpoint that in the first directory comes first. Tells what is passed over and
// why: it is damaged, or cannot be read. Throws Error(kUsage) where there are some, but none is valid.
std::optional<Checkpoint> newest_valid(const std::vector<std::string>& directories,
                                       const std::function<void(const std::string&)>& tell,
                                       const std::function<void(std::int64_t done)>& progress = {});

}  // namespace zg
