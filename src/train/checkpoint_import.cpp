// Checkpoints of what others have trained.
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "train/checkpoint_bits.hpp"
#include "train/checkpoint_header.hpp"
#include "train/checkpoint_writer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

using Shape = std::vector<std::int64_t>;

// The shape of each parameter, by its name.
std::map<std::string, Shape> shapes_of(const Checkpoint& like) {
  const Model model(model_of(like.manifest().bits, like.path()), DType::kF32, host_ops());
  std::map<std::string, Shape> shapes;
  for (const Unit& unit : model.units()) {
    for (const Param& param : unit.params) {
      shapes[param.name] =
          param.vector ? Shape{param.whole_count()} : Shape{param.whole_rows, param.whole_cols};
    }
  }
  return shapes;
}

// The shape of a parameter, or of a moment, whose name is the parameter's with a suffix.
const Shape& shape_of(const std::map<std::string, Shape>& shapes, const std::string& tensor,
                      const Checkpoint& like) {
  auto found = shapes.find(tensor);
  if (found == shapes.end()) found = shapes.find(tensor.substr(0, tensor.rfind('.')));
  if (found != shapes.end()) return found->second;
  throw Error(Errc::kUsage, like.path(), fmt::format("has a tensor {}, which its model has not", tensor),
              "the checkpoint is damaged: name another one");
}

std::string text_of(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// The tensors that a checkpoint needs, in the file.
std::vector<const SafeTensors::Entry*> find_all(const Checkpoint& like, const SafeTensors& file) {
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    throw Error(Errc::kUsage, file.path(), what, hint);
  };
  const std::map<std::string, Shape> shapes = shapes_of(like);
  std::vector<const SafeTensors::Entry*> all;
  for (const CheckpointTensor& tensor : like.tensors()) {
    if (tensor.dtype != "F32") {
      throw Error(Errc::kUsage, like.path(),
                  fmt::format("keeps {} as {}; others' tensors are taken in F32", tensor.name, tensor.dtype),
                  "name a checkpoint of a run with optimizer.state=fp32 or split");
    }
    const SafeTensors::Entry* const entry = file.find(tensor.name);
    if (entry == nullptr) {
      refuse(fmt::format("has no tensor {}", tensor.name),
             "tools/checkpoint_doors.py writes such files; moments that are unknown may be zero");
    }
    const Shape& shape = shape_of(shapes, tensor.name, like);
    if (entry->dtype != "F32" || entry->shape != shape) {
      const bool turned = entry->shape == Shape(shape.rbegin(), shape.rend()) && shape.size() == 2;
      refuse(fmt::format("has {} as {} in {}, {} in F32 expected", tensor.name, text_of(entry->shape),
                         entry->dtype, text_of(shape)),
             turned ? "matrices are [out, in]: transpose it"
                    : "the model must be that of " + like.path() + ", and its matrices [out, in]");
    }
    all.push_back(entry);
  }
  for (const SafeTensors::Entry& entry : file.entries()) {
    if (std::find(all.begin(), all.end(), &entry) == all.end())
      refuse(fmt::format("has a tensor {}, which {} has not", entry.name, like.path()),
             "the model must be the same, and the optimizer");
  }
  return all;
}

}  // namespace

std::string import_checkpoint(const Checkpoint& like, const std::string& file, const std::string& directory,
                              std::int64_t step) {
  const SafeTensors from(file);
  const std::vector<const SafeTensors::Entry*> entries = find_all(like, from);
  const std::vector<CheckpointEntry> there = list_checkpoints(directory);
  CheckpointManifest m = like.manifest();
  m.format = 1;
  m.version = program_version(), m.time = now_text();
  m.number = there.empty() ? 1 : there.front().number + 1;
  m.step = m.updates = step, m.skipped = 0;
  m.loss = std::nan("");
  m.ranks = m.processes = m.shards = 1, m.stage = 0;
  nlohmann::ordered_json notes{{"format", "pt"}}, json;
  std::int64_t bytes = 0;
  for (const SafeTensors::Entry* entry : entries) {
    io::Hash hash;
    hash.update(entry->data, entry->bytes);
    from.drop(entry->data, entry->bytes);
    notes[entry->name] = fmt::format("0 {}", io::hash_text(hash.value()));
  }
  json["__metadata__"] = std::move(notes);
  for (const SafeTensors::Entry* entry : entries) {
    json[entry->name] = {
        {"dtype", entry->dtype}, {"shape", entry->shape}, {"data_offsets", {bytes, bytes + entry->bytes}}};
    bytes += entry->bytes;
  }
  const std::string header = safetensors_header(json);
  auto offset = static_cast<std::int64_t>(header.size());
  m.files = {{"rank-00000.safetensors", offset + bytes, io::hash_of(header)}};
  const std::string path = directory + "/" + checkpoint_name(m.number, m.step);
  const std::string unfinished = path + kUnfinished + m.run;
  Files& files = system_files();
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) throw_io(directory, "cannot be created", error.value());
  (void)remove_directory(files, unfinished);
  if (const int failed = files.make_directory(unfinished); failed != 0)
    throw_io(unfinished, "cannot be created", failed);
  try {
    NewFile out(files, unfinished + "/" + m.files[0].name, m.files[0].bytes);
    out.write(header.data(), offset, 0);
    for (const SafeTensors::Entry* entry : entries) {
      out.write(entry->data, entry->bytes, offset);
      from.drop(entry->data, entry->bytes);
      offset += entry->bytes;
    }
    out.sync_and_close();
    commit_checkpoint(files, unfinished, path, m.text());
  } catch (...) {
    (void)remove_directory(files, unfinished);
    throw;
  }
  return path;
}

}  // namespace zg
