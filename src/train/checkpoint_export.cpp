// Copies of checkpoints elsewhere, and models of them for others.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "train/checkpoint_bits.hpp"
#include "train/checkpoint_header.hpp"
#include "train/checkpoint_writer.hpp"
#include "train/sequential_io.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

// The files of a checkpoint, one after the other.
void copy_files(Files& files, const Checkpoint& checkpoint, const std::string& directory,
                const std::function<void(std::int64_t)>& progress) {
  std::unique_ptr<SequentialWriter> file;
  const CheckpointFile* current = nullptr;
  const auto close = [&] {
    if (file) file->finish(), file->sync_and_close();
    file.reset();
  };
  checkpoint.verify(progress,
                    [&](const CheckpointFile& of, std::int64_t, const void* data, std::int64_t bytes) {
                      if (&of != current) {
                        close();
                        file = std::make_unique<SequentialWriter>(files, directory + "/" + of.name, of.bytes);
                        current = &of;
                      }
                      file->append(data, bytes);
                    });
  close();
}

bool has_pins(const CheckpointManifest& m) {
  return std::any_of(m.files.begin(), m.files.end(), [](const auto& file) { return file.is_pins(); });
}

}  // namespace

std::string export_checkpoint(Files& files, const Checkpoint& checkpoint, const std::string& directory,
                              const std::function<void(std::int64_t)>& progress) {
  const CheckpointManifest& m = checkpoint.manifest();
  const std::string path = directory + "/" + checkpoint_name(m.number, m.step);
  const std::string unfinished = path + kUnfinished + m.run;
  std::error_code error;
  if (fs::exists(path, error)) {
    throw Error(Errc::kUsage, path, "is there already",
                "name another directory, or remove it with ziggurat checkpoint discard");
  }
  fs::create_directories(directory, error);
  if (error) throw_io(directory, "cannot be created", error.value());
  // As it lies there, and not as this program would write it.
  const std::string name = checkpoint.path() + "/" + kManifestName;
  const std::string manifest = read_text_file(name, "the manifest of a checkpoint");
  if (parse_manifest(manifest, name).text() != m.text())
    throw Error(Errc::kUsage, name, "was changed while it was read", "export again");
  (void)remove_directory(files, unfinished);  // of an export that was killed
  if (const int failed = files.make_directory(unfinished); failed != 0)
    throw_io(unfinished, "cannot be created", failed);
  try {
    std::string written = manifest;
    if (has_pins(m)) {
      CheckpointManifest copy = m;
      copy.files = {checkpoint.copy_tensors(files, unfinished, progress)};
      copy.format = 2, copy.pinned = 0;
      written = copy.text();
    } else {
      copy_files(files, checkpoint, unfinished, progress);
    }
    commit_checkpoint(files, unfinished, path, written);
  } catch (...) {
    (void)remove_directory(files, unfinished);
    throw;
  }
  return path;
}

std::string export_checkpoint(const Checkpoint& checkpoint, const std::string& directory,
                              const std::function<void(std::int64_t)>& progress) {
  return export_checkpoint(system_files(), checkpoint, directory, progress);
}

void export_model(const Checkpoint& checkpoint, const std::string& directory,
                  const std::function<void(std::int64_t)>& progress) {
  const Model model(model_of(checkpoint.manifest().bits, checkpoint.path()), DType::kF32, host_ops());
  std::vector<CheckpointTensor> masters;
  for (const Unit& unit : model.units()) {
    for (const Param& param : unit.params) masters.push_back({param.name, "F32", param.whole_count()});
  }
  checkpoint.expect(masters, Checkpoint::Others::kAny);
  checkpoint.verify(progress);
  replace_directory(directory, [&](const std::string& fresh) {
    save_hf(fresh, model, DType::kF32,
            [&](const Unit&, const Param& param, std::int64_t begin, std::int64_t end, float* out) {
              read_values(checkpoint, param.name, 0, {begin, 1, end - begin, 0}, out);
            });
    checkpoint.check_still_there();
  });
}

}  // namespace zg
