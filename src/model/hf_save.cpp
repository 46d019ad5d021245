#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "model/hf_text.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
// Elements read at a time: 4 MiB as fp32, and up to as much again for the file's format.
constexpr std::int64_t kTile = kMiB;

// A parameter's place in a file shard. Parameters that files store as one tensor follow one another, in one
// shard.
struct Placed {
  const Unit* unit;
  const Param* param;
  std::int64_t begin, bytes;  // place in the shard's data
  // Only the first parameter of a tensor has an entry in the header; the entry covers the bytes of all of
  // them.
  bool first() const { return param->file_row == 0; }
  std::int64_t tensor_bytes() const {
    return param->file_rows > 0 ? bytes / param->whole_rows * param->file_rows : bytes;
  }
};
struct Shard {
  std::string name;
  std::vector<Placed> tensors;
  std::int64_t bytes = 0;
};

std::vector<Shard> plan_shards(const Model& model, std::int64_t width, std::int64_t shard_bytes) {
  std::vector<Shard> shards(1);
  for (const Unit& unit : model.units()) {
    for (const Param& param : unit.params) {
      const std::int64_t bytes = param.whole_count() * width;
      const Placed placed{&unit, &param, 0, bytes};
      const bool full = shards.back().bytes + placed.tensor_bytes() > shard_bytes;
      if (placed.first() && !shards.back().tensors.empty() && full) shards.emplace_back();
      Shard& shard = shards.back();
      shard.tensors.push_back(placed);
      shard.tensors.back().begin = shard.bytes;
      shard.bytes += bytes;
    }
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = shards.size() == 1
                         ? kSingleName
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }
  return shards;
}

// The shard's header: its length, and its text padded so that the data begins at a multiple of 8 bytes.
std::string header_of(const Shard& shard, DType dtype) {
  ordered_json header;
  header["__metadata__"]["format"] = "pt";
  for (const Placed& t : shard.tensors) {
    if (!t.first()) continue;
    const Param& p = *t.param;
    ordered_json& entry = header[p.name_in_files()];
    entry["dtype"] = dtype == DType::kBF16 ? "BF16" : "F32";
    if (p.vector) {
      entry["shape"] = {p.whole_cols};
    } else {
      const std::int64_t rows = p.file_rows > 0 ? p.file_rows : p.whole_rows;
      entry["shape"] = {p.conv1d ? p.whole_cols : rows, p.conv1d ? rows : p.whole_cols};
    }
    entry["data_offsets"] = {t.begin, t.begin + t.tensor_bytes()};
  }
  std::string text = header.dump();
  text.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(text.size()), 8)), ' ');
  const std::uint64_t length = text.size();
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + text;
}

std::string index_of(const std::vector<Shard>& shards) {
  ordered_json index;
  std::int64_t total = 0;
  for (const Shard& shard : shards) total += shard.bytes;
  index["metadata"]["total_size"] = total;
  for (const Shard& shard : shards) {
    for (const Placed& t : shard.tensors) index["weight_map"][t.param->name_in_files()] = shard.name;
  }
  return index.dump(2) + "\n";
}

// Converts and writes parameters through two buffers of fixed size.
class TensorWriter {
 public:
  TensorWriter(DType dtype, const ReadParam& read)
      : dtype_(dtype), read_(read), in_(kTile), out_(kTile * width()) {}

  void write(OutputFile& file, std::int64_t at, const Placed& t) {
    t.param->conv1d ? write_transposed(file, at, t) : write_straight(file, at, t);
  }

 private:
  std::int64_t width() const { return static_cast<std::int64_t>(size_of(dtype_)); }

  void store(std::int64_t i, float value) {
    if (dtype_ == DType::kBF16) {
      const bf16 rounded(value);
      std::memcpy(out_.data() + i * 2, &rounded, 2);
    } else {
      std::memcpy(out_.data() + i * 4, &value, 4);
    }
  }

  void write_straight(OutputFile& file, std::int64_t at, const Placed& t) {
    const std::int64_t count = t.param->whole_count();
    for (std::int64_t i = 0; i < count; i += kTile) {
      const std::int64_t n = std::min(kTile, count - i);
      read_(*t.unit, *t.param, i, i + n, in_.data());
      for (std::int64_t j = 0; j < n; ++j) store(j, in_[static_cast<std::size_t>(j)]);
      file.write_at(at + i * width(), out_.data(), n * width());
    }
  }

  // Writes a parameter [rows, cols] to a file as [cols, rows]. A tile of whole rows is read, transposed, and
  // written with one write for each row of the file, or with a single write when the tile is the whole
  // matrix.
  void write_transposed(OutputFile& file, std::int64_t at, const Placed& t) {
    const std::int64_t rows = t.param->whole_rows, cols = t.param->whole_cols;
    const std::int64_t tile_cols = std::min(cols, kTile),
                       tile_rows = std::clamp<std::int64_t>(kTile / cols, 1, rows);
    for (std::int64_t r = 0; r < rows; r += tile_rows) {
      // A row has several tiles only if it is larger than a tile.
      for (std::int64_t c = 0; c < cols; c += tile_cols) {
        const std::int64_t nr = std::min(tile_rows, rows - r), nc = std::min(tile_cols, cols - c);
        read_(*t.unit, *t.param, r * cols + c, (r + nr - 1) * cols + c + nc, in_.data());
        turn(nr, nc);
        if (nr == rows) {
          file.write_at(at + c * rows * width(), out_.data(), nr * nc * width());
          continue;
        }
        for (std::int64_t j = 0; j < nc; ++j) {
          file.write_at(at + ((c + j) * rows + r) * width(), out_.data() + j * nr * width(), nr * width());
        }
      }
    }
  }

  // Transposes in_ [nr, nc] to out_ [nc, nr], in blocks that stay in the L1 cache.
  void turn(std::int64_t nr, std::int64_t nc) {
    constexpr std::int64_t kBlock = 32;
    for (std::int64_t r0 = 0; r0 < nr; r0 += kBlock) {
      for (std::int64_t c0 = 0; c0 < nc; c0 += kBlock) {
        for (std::int64_t c = c0; c < std::min(nc, c0 + kBlock); ++c) {
          for (std::int64_t r = r0; r < std::min(nr, r0 + kBlock); ++r) {
            store(c * nr + r, in_[static_cast<std::size_t>(r * nc + c)]);
          }
        }
      }
    }
  }

  DType dtype_;
  const ReadParam& read_;
  std::vector<float> in_;
  std::vector<char> out_;
};

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

}  // namespace

void save_hf(const std::string& directory, const Model& model, DType dtype, const ReadParam& read,
             std::int64_t shard_bytes) {
  ZG_ASSERT(dtype == DType::kF32 || dtype == DType::kBF16, "{}", name_of(dtype));
  ZG_ASSERT_GE(shard_bytes, 1);
  const SaveDirectory target(directory);
  const std::vector<Shard> shards =
      plan_shards(model, static_cast<std::int64_t>(size_of(dtype)), shard_bytes);

  std::vector<OutputFile> files;  // declared after `target`, so that they are removed before the directory is
  std::set<std::string> names;
  TensorWriter writer(dtype, read);
  for (const Shard& shard : shards) {
    const std::string header = header_of(shard, dtype);
    const auto header_bytes = static_cast<std::int64_t>(header.size());
    OutputFile& file = files.emplace_back(directory + "/" + shard.name, header_bytes + shard.bytes);
    names.insert(shard.name);
    file.write_at(0, header.data(), header_bytes);
    for (const Placed& t : shard.tensors) writer.write(file, header_bytes + t.begin, t);
    file.sync();
  }
  files.push_back(write_text(directory + "/config.json", write_hf_config(model.config(), dtype)));
  if (shards.size() > 1) {
    files.push_back(write_text(directory + "/" + kIndexName, index_of(shards)));
    names.insert(kIndexName);
  }
  for (OutputFile& file : files) file.commit();
  target.remove_stale_weights(names);
  sync_directory(directory);
}

}  // namespace zg
