#include "model/weight_files.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::hf {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

OutputFile write_text(const std::string& path, const std::string& text) {
  OutputFile file(path, static_cast<std::int64_t>(text.size()));
  file.write_at(0, text.data(), static_cast<std::int64_t>(text.size()));
  file.sync();
  return file;
}

// "model-00001-of-00002.safetensors" and the like.
bool is_shard_name(const std::string& name) {
  constexpr std::string_view kPattern = "model-#####-of-#####.safetensors";
  return name.size() == kPattern.size() &&
         std::equal(name.begin(), name.end(), kPattern.begin(),
                    [](char c, char p) { return p == '#' ? c >= '0' && c <= '9' : c == p; });
}

// Creates the directory if need be. If the save fails before anything is in it, the destructor removes it
// again.
class SaveDirectory {
 public:
  explicit SaveDirectory(const std::string& path) : path_(path) {
    std::error_code error;
    created_ = fs::create_directories(path_, error);
    if (error) {
      throw Error(Errc::kIo, path_, "cannot be created: " + errno_text(error.value()),
                  "check the path and its permissions");
    }
    if (!fs::is_directory(path_, error)) {
      throw Error(Errc::kIo, path_, "is no directory", "name a directory, or a path that does not exist yet");
    }
  }
  ~SaveDirectory() {
    if (created_) ::rmdir(path_.c_str());  // which fails if the directory is not empty
  }
  SaveDirectory(const SaveDirectory&) = delete;
  SaveDirectory& operator=(const SaveDirectory&) = delete;

  void remove_stale_weights(const std::set<std::string>& keep) const {
    std::vector<std::string> stale;
    std::error_code error;
    for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string();
      const bool ours = name == kSingleName || name == kIndexName || is_shard_name(name);
      if (ours && keep.count(name) == 0) stale.push_back(name);
    }
    if (error) throw Error(Errc::kIo, path_, "cannot be listed: " + errno_text(error.value()));
    for (const std::string& name : stale) {
      const std::string path = path_ + "/" + name;
      if (::unlink(path.c_str()) == 0 || errno == ENOENT) continue;
      throw Error(Errc::kIo, path, "belongs to an earlier save and cannot be removed: " + errno_text(errno),
                  "remove it, it would be loaded instead of the new weights");
    }
  }

 private:
  std::string path_;
  bool created_ = false;
};

// Bytes of an element of the types that are written.
std::int64_t width_of(const std::string& dtype) {
  return dtype == "I64" ? 8 : dtype == "F32" || dtype == "I32" ? 4 : dtype == "BF16" ? 2 : 1;
}

}  // namespace

WeightFiles::Place WeightFiles::add(const std::vector<FileTensor>& group) {
  std::int64_t bytes = 0;
  for (const FileTensor& t : group) bytes += t.bytes;
  if (!shards_.back().tensors.empty() && shards_.back().bytes + bytes > shard_bytes_) shards_.emplace_back();
  Shard& shard = shards_.back();
  const Place first{shards_.size() - 1, shard.tensors.size()};
  shard.tensors.insert(shard.tensors.end(), group.begin(), group.end());
  shard.bytes += bytes;
  return first;
}

std::string WeightFiles::header_of(Shard& shard) const {
  std::vector<std::size_t> order(shard.tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return width_of(shard.tensors[a].dtype) > width_of(shard.tensors[b].dtype);
  });
  ordered_json header;
  header["__metadata__"]["format"] = "pt";
  std::int64_t at = 0;
  for (const std::size_t i : order) {
    FileTensor& t = shard.tensors[i];
    t.begin = at;
    at += t.bytes;
    ordered_json& entry = header[t.name];
    entry["dtype"] = t.dtype;
    entry["shape"] = t.shape;
    entry["data_offsets"] = {t.begin, at};
  }
  // The text is padded so that the data begins at a multiple of 8 bytes.
  std::string text = header.dump();
  text.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(text.size()), 8)), ' ');
  const std::uint64_t length = text.size();
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  out += text;
  for (FileTensor& t : shard.tensors) t.begin += static_cast<std::int64_t>(out.size());
  return out;
}

std::string WeightFiles::index() const {
  ordered_json index;
  std::int64_t total = 0;
  for (const Shard& shard : shards_) total += shard.bytes;
  index["metadata"]["total_size"] = total;
  for (const Shard& shard : shards_) {
    for (const FileTensor& t : shard.tensors) index["weight_map"][t.name] = shard.name;
  }
  return index.dump(2) + "\n";
}

void WeightFiles::save(const std::string& directory, const std::string& config, const WriteShard& write) {
  const SaveDirectory target(directory);
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].name = shards_.size() == 1
                          ? kSingleName
                          : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards_.size());
  }
  std::vector<OutputFile> files;  // declared after `target`, so that they are removed before the directory is
  std::set<std::string> names;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    Shard& shard = shards_[i];
    const std::string header = header_of(shard);
    const auto header_bytes = static_cast<std::int64_t>(header.size());
    OutputFile& file = files.emplace_back(directory + "/" + shard.name, header_bytes + shard.bytes);
    names.insert(shard.name);
    file.write_at(0, header.data(), header_bytes);
    write(file, i);
    file.sync();
  }
  files.push_back(write_text(directory + "/config.json", config));
  if (shards_.size() > 1) {
    files.push_back(write_text(directory + "/" + kIndexName, index()));
    names.insert(kIndexName);
  }
  for (OutputFile& file : files) file.commit();
  target.remove_stale_weights(names);
  sync_directory(directory);
}

}  // namespace zg::hf
