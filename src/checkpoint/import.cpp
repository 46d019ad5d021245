// Checkpoints of what others have trained.
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors_header.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/checkpoint/commit.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/checkpoint/directory_lock.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPart = 8 << 20;  // bytes that are read at a time

using Shape = TensorShapes::Shape;

std::string text_of(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// The tensors that a checkpoint needs, in the file.
std::vector<const SafeTensors::Entry*> find_all(const Checkpoint& like, const SafeTensors& file) {
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    throw Error(Errc::kUsage, file.path(), what, hint);
  };
  const TensorShapes shapes(like);
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
    const Shape& shape = shapes.of(tensor.name);
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
                              std::int64_t step, const std::function<void(double)>& progress) {
  const SafeTensors from(file, "the tensors of a checkpoint");
  const std::vector<const SafeTensors::Entry*> entries = find_all(like, from);
  const DirectoryLock lock("the directory of checkpoints", directory);
  const std::vector<CheckpointEntry> there = list_checkpoints(directory);
  CheckpointManifest m = like.manifest();
  m.format = 1;
  m.version = program_version(), m.time = now_text();
  m.number = there.empty() ? 1 : there.front().number + 1;
  m.step = m.updates = step, m.skipped = 0;
  m.loss = std::nan("");
  m.ranks = m.processes = m.shards = 1, m.stage = 0;
  m.pinned = 0;  // all of it is in the file
  m.index.reset(), m.validation.reset();
  nlohmann::ordered_json notes{{"format", "pt"}}, json;
  std::int64_t bytes = 0, all = 0, done = 0;
  for (const SafeTensors::Entry* entry : entries) all += entry->bytes;
  std::vector<char> part(static_cast<std::size_t>(kPart));
  // Each byte is read twice: for its hash, which stands before it, and to be written.
  const auto in_parts = [&](const SafeTensors::Entry& entry, const auto& work) {
    for (std::int64_t at = 0; at < entry.bytes; at += kPart) {
      const std::int64_t n = std::min(kPart, entry.bytes - at);
      from.read(entry, at, n, part.data());
      work(part.data(), n);
      done += n;
      if (progress) progress(static_cast<double>(done) / static_cast<double>(2 * all));
    }
  };
  for (const SafeTensors::Entry* entry : entries) {
    io::Hash hash;
    in_parts(*entry, [&](const char* data, std::int64_t n) { hash.update(data, n); });
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
  make_directories(files, directory);
  (void)remove_checkpoint_files(files, unfinished);
  if (const int failed = files.make_directory(unfinished); failed != 0)
    throw_io(unfinished, "cannot be created", failed);
  try {
    NewFile out(files, unfinished + "/" + m.files[0].name, m.files[0].bytes);
    out.write(header.data(), offset, 0);
    for (const SafeTensors::Entry* entry : entries) {
      in_parts(*entry, [&](const char* data, std::int64_t n) {
        out.write(data, n, offset);
        offset += n;
      });
    }
    out.sync_and_close();
    commit_checkpoint(files, unfinished, path, m.text());
  } catch (...) {
    (void)remove_checkpoint_files(files, unfinished);
    throw;
  }
  return path;
}

}  // namespace zg
