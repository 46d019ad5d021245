// Checkpoints: directories from which a run goes on as if it had not stopped. docs/training.md describes
// them.
//
//   checkpoints/0003-step-200/manifest.json            what bits depend on, and each file with its hash
//   checkpoints/0003-step-200/rank-00000.safetensors   what rank 0 held of all tensors
//   checkpoints/0004-step-300.part-...                 one that is being written, or was when its run ended
//
// Numbers ascend, so the highest is the newest. A directory has its name only when all of it is on the drive.
// Files hold logical tensors, as pieces: consecutive elements of a parameter or of a moment, in the engine's
// order (matrices are [out, in]). Functions may be called from any thread; errors are Error(kUsage) for what
// is damaged, with the file, and Error(kIo).
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

struct CheckpointFile {
  std::string name;
  std::int64_t bytes = 0;
  // XXH3 of the header, which has those of all tensors.
  std::uint64_t header_hash = 0;
};

struct CheckpointManifest {
  static constexpr std::int64_t kFormat = 1;  // this program reads it and all before it
  std::string version;                        // of the program that wrote it
  std::string time;                           // UTC, "2026-11-23T05:54:24Z"
  std::string run;                            // 16 digits, the same in all checkpoints of a run
  std::int64_t number = 0, step = 0;          // step: steps done; the next batch is that of this step
  std::int64_t updates = 0, skipped = 0;      // of these steps
  std::optional<LossScaler::State> scaler;    // with fp16
  double loss = 0;                            // of the last step; not finite where that was skipped
  int ranks = 1, processes = 1, shards = 1, stage = 0;  // of the run that wrote it
  // What bits depend on: keys of the configuration and the like, with their values as texts.
  std::vector<std::pair<std::string, std::string>> bits;
  std::string config;  // as resolved
  std::vector<CheckpointFile> files;

  std::int64_t bytes() const;  // of all files
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

// What a checkpoint must hold: a parameter, or a moment of one.
struct CheckpointTensor {
  std::string name;
  std::string dtype;  // as safetensors calls it
  std::int64_t count = 0;
};

// An open checkpoint: its manifest and its files, mapped.
class Checkpoint {
 public:
  // Checks the manifest, and of each file size and header; not yet the tensors' bytes.
  explicit Checkpoint(const std::string& directory);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const { return path_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  // Reads all bytes and compares their hashes. `progress` is called with the bytes done.
  void verify(const std::function<void(std::int64_t done)>& progress = {}) const;
  // Checks that the pieces hold these tensors, each element once, and no others.
  void expect(const std::vector<CheckpointTensor>& tensors) const;
  // Copies elements [first, first + count) of a tensor that expect() has found.
  void read(const std::string& tensor, std::int64_t first, std::int64_t count, void* out) const;

  struct Piece {
    std::string tensor, dtype, file;
    std::int64_t first = 0, count = 0;
  };
  std::vector<Piece> pieces() const;  // by tensor and first element

 private:
  struct State;
  std::string path_;
  CheckpointManifest manifest_;
  std::unique_ptr<State> state_;
};

// Removes a checkpoint, or the remains of one. Until it is gone it has another name, so that none is ever
// seen in part.
void discard_checkpoint(const std::string& path);

// The newest one in a directory that is valid, all hashes compared; none: there is no checkpoint at all.
// Tells what is passed over and why. Throws Error(kUsage) where there are some, but none is valid.
std::optional<Checkpoint> newest_valid(const std::string& directory,
                                       const std::function<void(const std::string&)>& tell,
                                       const std::function<void(std::int64_t done)>& progress = {});

}  // namespace zg
