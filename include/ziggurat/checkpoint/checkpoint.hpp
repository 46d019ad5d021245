// Checkpoints: directories from which a run continues as if it had not stopped. docs/checkpoint-files.md
// describes them.
//
//   checkpoints/0003-step-200/manifest.json            settings on which bits depend, and each file's hash
//   checkpoints/0003-step-200/rank-00000.safetensors   the elements of all tensors that rank 0 held
//   checkpoints/0003-step-200/rank-00000.pins          or where they lie in the files of the run's drives
//   copies/0003-step-200/state-00001-of-00003.safetensors   in an exported copy: the state that was pinned
//   copies/0003-step-200/index.json                    in any copy, for other programs: where each tensor is
//   checkpoints/0004-step-300.part-...                 one that is being written, or was when its run ended
//
// Checkpoint numbers ascend, so the highest is the newest. A directory gets its final name only when all of
// it is on the drive. Files hold logical tensors, as pieces: consecutive elements of a parameter or of a
// moment, in the engine's order (matrices are [out, in]), or boxes of a matrix. State that a run keeps on
// drives stays in the drives' files, which then outlive the run. A checkpoint names its places there, and the
// run writes elsewhere as long as some checkpoint names them. Any thread may call the functions. They throw
// Error(kUsage), which names the file, for damaged checkpoints, and Error(kIo).
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
  // XXH3 of the file's header, which has the hashes of all tensors. For a pins file, XXH3 of the whole file.
  std::uint64_t header_hash = 0;
  // Whether this is a pins file: it says where state is pinned in the drives' files, and has no tensors.
  bool is_pins() const;
};

// The loss of an evaluation, and the number of steps done before it.
struct Validation {
  std::int64_t step = 0;
  double loss = 0;
};

struct CheckpointManifest {
  static constexpr std::int64_t kFormat = 3;  // this program reads this format and all earlier ones
  // 1 if all pieces are consecutive elements, 2 if some are boxes, 3 if state is pinned in drives' files. The
  // lowest format that fits is written, so an older program refuses only checkpoints that it cannot read.
  std::int64_t format = 1;
  std::string version;                      // version of the program that wrote it
  std::string time;                         // UTC, "2026-11-23T05:54:24Z"
  std::string run;                          // 16 digits, the same in all checkpoints of a run
  std::int64_t number = 0, step = 0;        // step: steps done, which is also the index of the next batch
  std::int64_t updates = 0, skipped = 0;    // how many of these steps updated weights, or were skipped
  std::optional<LossScaler::State> scaler;  // fp16 only
  std::vector<float> choice_biases;         // StepExecutor::choice_biases()
  double loss = 0;                          // loss of the last step; not finite if it was skipped
  std::optional<Validation> validation;     // the run's last evaluation so far
  int ranks = 1, processes = 1, shards = 1, stage = 0;  // of the run that wrote it; stage: ZeRO stage
  // Settings on which bits depend: keys of the configuration and the like, with their values as text.
  std::vector<std::pair<std::string, std::string>> bits;
  std::string config;  // the resolved configuration, as JSON
  std::vector<CheckpointFile> files;
  std::int64_t pinned = 0;  // bytes of state that lie in the drives' files; format 3
  // In an exported copy: the file that tells other programs where each tensor is. Its header_hash is the hash
  // of the whole file.
  std::optional<CheckpointFile> index;

  std::int64_t bytes() const;  // of all files, without state that is pinned elsewhere
  // JSON that ends with the hash of all text before it.
  std::string text() const;
};
// Throws Error(kUsage) at `where` for a text that differs from what text() wrote.
CheckpointManifest parse_manifest(const std::string& text, const std::string& where);

inline constexpr const char* kManifestName = "manifest.json";

// A checkpoint found in a directory by its name. It need not be valid.
struct CheckpointEntry {
  std::string path;
  std::int64_t number = 0, step = 0;
};
// Newest first. Empty if the directory does not exist.
std::vector<CheckpointEntry> list_checkpoints(const std::string& directory);
// The paths of checkpoints that were not completed, or not completely removed.
std::vector<std::string> unfinished_checkpoints(const std::string& directory);
std::string checkpoint_name(std::int64_t number, std::int64_t step);

// A tensor that a checkpoint must hold: a parameter, or a moment of one, not split among ranks.
struct CheckpointTensor {
  std::string name;
  std::string dtype;  // safetensors' name of the type; "U8": 8-bit codes with their scales
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
  // Checks the manifest, and the size and header of each file, but not yet the tensors' bytes. Opens the
  // drives' files in which the checkpoint pins state.
  explicit Checkpoint(const std::string& directory);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const { return path_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  // Reads all bytes and compares their hashes. `progress` is called with the bytes done. `take` is called
  // with all bytes of each file of the manifest, in order, but not with pinned state.
  using Sink = std::function<void(const CheckpointFile& file, std::int64_t offset, const void* data,
                                  std::int64_t bytes)>;
  void verify(const std::function<void(std::int64_t done)>& progress = {}, const Sink& take = {}) const;
  // Checks that the pieces hold each element of these tensors once, and with kNone no other tensors. The
  // types may differ.
  enum class Others { kNone, kAny };
  void expect(const std::vector<CheckpointTensor>& tensors, Others others = Others::kNone) const;

  // The tensors, by name. The functions below may be called only for tensors that expect() found complete.
  std::vector<CheckpointTensor> tensors() const;
  const std::string& dtype_of(const std::string& tensor) const;
  // Copies the elements of a box as they are stored, line after line.
  void read(const std::string& tensor, const CheckpointBox& box, void* out) const;
  void read(const std::string& tensor, std::int64_t first, std::int64_t count, void* out) const {
    read(tensor, {first, 1, count, 0}, out);
  }
  // read() for a "U8" tensor: writes the codes, and one scale for each code.
  void read_codes(const std::string& tensor, const CheckpointBox& box, std::uint8_t* codes,
                  float* scales) const;

  // Writes all tensors, including pinned ones, into new files in `directory`. A file has at most `file_bytes`
  // bytes unless a single tensor, or segment of a drive, is larger. Compares all hashes meanwhile, and calls
  // `progress` as verify() does. Throws Error(kUsage) if the checkpoint is damaged or its run has removed it
  // since, Error(kIo).
  std::vector<CheckpointFile> copy_tensors(Files& files, const std::string& directory,
                                           std::int64_t file_bytes,
                                           const std::function<void(std::int64_t done)>& progress = {}) const;
  // The text of an exported copy's index.json, which lists each tensor's pieces in these files of
  // `directory`. Throws Error(kUsage) if a file's header does not have the hash in `files`.
  static std::string index_of(const std::string& directory, const std::vector<CheckpointFile>& files);
  // Throws Error(kUsage) if the run has removed the checkpoint since it was opened, and so may have
  // overwritten pinned state. To be called after the last byte was read, before the bytes are used.
  void check_still_there() const;
  // Drops the mappings of all files, so that removing a file frees its space. Afterwards only path() and
  // manifest() may be called.
  void close();

  struct Piece {
    std::string tensor, dtype, file;
    CheckpointBox box;
  };
  std::vector<Piece> pieces() const;  // sorted by tensor and first element
  // The paths of the drives' files in which state is pinned; empty if none is.
  std::vector<std::string> drive_files() const;

 private:
  struct State;
  class Copy;
  void verify_index() const;
  std::string path_;
  CheckpointManifest manifest_;
  std::unique_ptr<State> state_;
};

// Removes a checkpoint, or the remains of one. Also removes the drives' files in which it pins state if no
// other checkpoint of its directory does and no run uses them. Renames the checkpoint first, so that no
// incomplete one is ever seen under a checkpoint's name.
void discard_checkpoint(const std::string& path);

// Writes a copy into `directory`, which may be on another file system, and returns its path. The copy
// contains all tensors, including those that are pinned in drives' files. All bytes are compared with their
// hashes meanwhile, and the copy gets its final name only when all of it is on the drive. Throws
// Error(kUsage) if the checkpoint is damaged, or one of that name exists there; Error(kIo).
std::string export_checkpoint(const Checkpoint& checkpoint, const std::string& directory,
                              const std::function<void(std::int64_t done)>& progress = {});
// Writes the fp32 master weights as a Hugging Face directory, without a tokenizer, since checkpoints have
// none. Verifies all bytes first, with `progress`. If the run trains adapters, writes only these, in PEFT's
// format, or, with kMerged, the model with the adapters merged into its weights. Throws Error(kUsage) for
// kMerged if the run trains no adapters.
enum class ExportedModel { kAsTrained, kMerged };
void export_model(const Checkpoint& checkpoint, const std::string& directory,
                  const std::function<void(std::int64_t done)>& progress = {},
                  ExportedModel what = ExportedModel::kAsTrained);

// Makes a checkpoint after `step` steps from the tensors of a safetensors file. The file must have all
// tensors of the checkpoint `like` under the same names, not split, in F32, vectors as [n], matrices as [out,
// in]. All else, including the loss scale, is taken from `like`, a checkpoint of a run with the same
// configuration. The new checkpoint gets its own name in `directory`; returns its path. `progress` is called
// with the share that is done, in [0, 1]. Throws Error(kUsage) for a tensor that is missing or has another
// shape or type; Error(kIo).
std::string import_checkpoint(const Checkpoint& like, const std::string& file, const std::string& directory,
                              std::int64_t step, const std::function<void(double share)>& progress = {});

// Throws Error(kUsage) if a run cannot continue from this path, because there is no checkpoint or it is
// damaged. Does not read the tensors' bytes, so it misses damage there.
void check_resume(const std::string& path);

// The newest valid checkpoint in these directories, with all hashes compared; none if there is no checkpoint
// at all. If several directories have a copy of a checkpoint, the first directory's is tried first. Calls
// `tell` with each checkpoint that is skipped because it is damaged or cannot be read, and with the reason.
// Throws Error(kUsage) if there are checkpoints but none is valid.
std::optional<Checkpoint> newest_valid(const std::vector<std::string>& directories,
                                       const std::function<void(const std::string&)>& tell,
                                       const std::function<void(std::int64_t done)>& progress = {});

}  // namespace zg
