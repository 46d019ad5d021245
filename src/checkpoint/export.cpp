// Exports checkpoints: as copies, and as models for other programs.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "checkpoint/sequential_io.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/checkpoint/commit.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/checkpoint/directory_lock.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/checkpoint/model_bits.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/model/adapter_files.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

// Copies the files of a checkpoint, one after the other.
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

std::string index_of_new(const std::string& directory, const std::vector<CheckpointFile>& of) {
  try {
    return Checkpoint::index_of(directory, of);
  } catch (const Error& error) {
    throw Error(Errc::kIo, error.where(), "was written just now, and " + error.message(),
                "the drive or its file system does not keep what it is given");
  }
}

CheckpointFile write_index(Files& files, const std::string& directory,
                           const std::vector<CheckpointFile>& of) {
  const std::string text = index_of_new(directory, of);
  const CheckpointFile index{"index.json", static_cast<std::int64_t>(text.size()), io::hash_of(text)};
  NewFile file(files, directory + "/" + index.name, index.bytes);
  file.write(text.data(), index.bytes, 0);
  file.sync_and_close();
  return index;
}

bool has_pins(const CheckpointManifest& m) {
  return std::any_of(m.files.begin(), m.files.end(), [](const auto& file) { return file.is_pins(); });
}

}  // namespace

std::string export_checkpoint(Files& files, const Checkpoint& checkpoint, const std::string& directory,
                              const std::function<void(std::int64_t)>& progress, std::int64_t file_bytes) {
  const CheckpointManifest& m = checkpoint.manifest();
  const std::string path = directory + "/" + checkpoint_name(m.number, m.step);
  const std::string unfinished = path + kUnfinished + m.run;
  std::error_code error;
  if (fs::exists(path, error)) {
    throw Error(Errc::kUsage, path, "is there already",
                "name another directory, or remove it with ziggurat checkpoint discard");
  }
  make_directories(files, directory);
  const std::string name = checkpoint.path() + "/" + kManifestName;
  if (parse_manifest(read_text_file(name, "the manifest of a checkpoint"), name).text() != m.text())
    throw Error(Errc::kUsage, name, "was changed while it was read", "export again");
  (void)remove_checkpoint_files(files, unfinished);  // left by an export that was killed
  if (const int failed = files.make_directory(unfinished); failed != 0)
    throw_io(unfinished, "cannot be created", failed);
  try {
    CheckpointManifest copy = m;
    if (has_pins(m)) {
      copy.files = checkpoint.copy_tensors(files, unfinished, file_bytes, progress);
      copy.format = 2, copy.pinned = 0;
    } else {
      copy_files(files, checkpoint, unfinished, progress);
    }
    copy.index = write_index(files, unfinished, copy.files);
    commit_checkpoint(files, unfinished, path, copy.text());
  } catch (...) {
    (void)remove_checkpoint_files(files, unfinished);
    throw;
  }
  return path;
}

std::string export_checkpoint(const Checkpoint& checkpoint, const std::string& directory,
                              const std::function<void(std::int64_t)>& progress) {
  const DirectoryLock lock("the directory of copies", directory);
  return export_checkpoint(system_files(), checkpoint, directory, progress);
}

namespace {

// The directory of the base model of a run's adapters.
std::string base_of(const CheckpointManifest& manifest) {
  const auto config = nlohmann::json::parse(manifest.config, nullptr, false);
  const auto model = config.is_object() ? config.find("model") : config.end();
  if (!config.is_object() || model == config.end() || !model->is_object()) return "";
  const auto from = model->find("from");
  return from != model->end() && from->is_string() ? from->get<std::string>() : "";
}

// The adapters of a model, by name.
std::map<std::string, const Param*> adapters_of(const Model& model) {
  std::map<std::string, const Param*> all;
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      if (p.adapter) all[p.name] = &p;
    }
  }
  return all;
}

// Merges the parameter's adapter, if it has one, into elements [begin, end) of the parameter.
void add_adapter_of(const Checkpoint& checkpoint, const ModelConfig& model,
                    const std::map<std::string, const Param*>& adapters, const Param& param,
                    std::int64_t begin, std::int64_t end, float* out) {
  const auto adapter = adapter_of(model, param);
  if (!adapter || begin == end) return;
  const auto a = adapters.find(adapter->name + ".lora_A.weight");
  if (a == adapters.end()) return;
  const std::int64_t rank = model.lora.rank, first = begin / param.cols,
                     rows = (end - 1) / param.cols + 1 - first;
  std::vector<float> all_a(static_cast<std::size_t>(a->second->count())),
      rows_b(static_cast<std::size_t>(rows * rank));
  read_values(checkpoint, a->first, 0, {0, 1, a->second->count(), 0}, all_a.data());
  read_values(checkpoint, adapter->name + ".lora_B.weight", 0,
              {(adapter->first_row + first) * rank, 1, rows * rank, 0}, rows_b.data());
  add_adapter({.a = all_a.data(),
               .b = rows_b.data(),
               .rank = rank,
               .cols = param.cols,
               .factor = model.lora.factor()},
              begin, end, out);
}

}  // namespace

void export_model(const Checkpoint& checkpoint, const std::string& directory,
                  const std::function<void(std::int64_t)>& progress, ExportedModel what) {
  const Model model(model_of(checkpoint.manifest().bits, checkpoint.path()), DType::kF32, host_ops());
  const bool adapted = model.config().lora.on(), merged = what == ExportedModel::kMerged;
  if (merged && !adapted) {
    throw Error(Errc::kUsage, checkpoint.path(), "is of a run that trains no adapters, which could be merged",
                "export it without --merged");
  }
  const BitKeys& bits = checkpoint.manifest().bits;
  if (merged &&
      std::any_of(bits.begin(), bits.end(), [](const auto& key) { return key.first == kBaseKey; })) {
    throw Error(Errc::kUsage, checkpoint.path(),
                "has the adapters alone: its run kept the model that they belong to in codes (lora.base)",
                "export it without --merged, and then merge the adapters into that model (ziggurat merge)");
  }
  std::vector<CheckpointTensor> masters;
  for (const Unit& unit : model.units()) {
    for (const Param& param : unit.params) {
      if (param.adapter || merged || !adapted) masters.push_back({param.name, "F32", param.whole_count()});
    }
  }
  checkpoint.expect(masters, Checkpoint::Others::kAny);
  checkpoint.verify(progress);
  const auto adapters = adapters_of(model);
  const std::vector<float>& biases = checkpoint.manifest().choice_biases;
  const std::int64_t experts = model.config().experts.count;
  if (model.config().experts.choice_bias &&
      static_cast<std::int64_t>(biases.size()) != model.config().layers * experts)
    throw Error(Errc::kUsage, checkpoint.path(),
                fmt::format("has {} choice biases of routers, and not {} for each of {} layers",
                            biases.size(), experts, model.config().layers),
                "the checkpoint is damaged: export another one");
  const auto read = [&](const Unit& unit, const Param& param, std::int64_t begin, std::int64_t end,
                        float* out) {
    if (param.offset < 0)
      return void(std::copy_n(biases.begin() + unit.layer * experts + begin, end - begin, out));
    read_values(checkpoint, param.name, 0, {begin, 1, end - begin, 0}, out);
    if (merged) add_adapter_of(checkpoint, model.config(), adapters, param, begin, end, out);
  };
  replace_directory(directory, [&](const std::string& fresh) {
    if (adapted && !merged) {
      save_adapters(fresh, model, base_of(checkpoint.manifest()), read);
    } else {
      ModelConfig plain = model.config();
      plain.lora = {};
      save_hf(fresh, Model(plain, DType::kF32, host_ops()), DType::kF32, read);
    }
    checkpoint.check_still_there();
  });
}

}  // namespace zg
