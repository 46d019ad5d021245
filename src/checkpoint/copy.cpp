// Copies all tensors of a checkpoint into new files.
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "checkpoint/reader_state.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "checkpoint/sequential_io.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/checkpoint/model_bits.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPart = 8 << 20;  // bytes that are copied at a time

}  // namespace

TensorShapes::TensorShapes(const Checkpoint& checkpoint) : path_(checkpoint.path()) {
  const Model model(model_of(checkpoint.manifest().bits, path_), DType::kF32, host_ops());
  for (const Unit& unit : model.units()) {
    for (const Param& param : unit.params) {
      shapes_[param.name] =
          param.vector ? Shape{param.whole_count()} : Shape{param.whole_rows, param.whole_cols};
    }
  }
}

const TensorShapes::Shape& TensorShapes::of(const std::string& tensor) const {
  auto found = shapes_.find(tensor);
  if (found == shapes_.end()) found = shapes_.find(tensor.substr(0, tensor.rfind('.')));
  if (found != shapes_.end()) return found->second;
  throw Error(Errc::kUsage, path_, fmt::format("has a tensor {}, which its model has not", tensor),
              "the checkpoint is damaged: name another one");
}

// Copies the entries of all sources in the order of the sources' bytes, so that each byte is read and written
// once, sequentially. A file ends before the entry that would make it too large.
class Checkpoint::Copy {
 public:
  Copy(const Checkpoint& from, Files& files, std::string directory, std::int64_t file_bytes)
      : from_(from), files_(files), directory_(std::move(directory)) {
    const TensorShapes shapes(from);
    for (const CheckpointTensor& tensor : from.tensors()) {
      const TensorShapes::Shape& shape = shapes.of(tensor.name);
      const std::int64_t count =
          std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
      if (State::gap_in(from.state_->tensors.at(tensor.name), count) >= 0) {
        damaged(from.path_,
                fmt::format("does not hold the {} elements of {}, each once", count, tensor.name));
      }
      const bool whole = from.state_->tensors.at(tensor.name).size() == 1;
      int number = 0;
      for (const State::Stored& piece : from.state_->tensors.at(tensor.name)) {
        const std::string suffix = ++number > 1 ? fmt::format("[{}]", number) : "";
        const CheckpointBox& box = piece.box;
        add(piece, *piece.entry, tensor.name + suffix,
            whole           ? shape
            : box.lines > 1 ? TensorShapes::Shape{box.lines, box.width}
                            : TensorShapes::Shape{box.width},
            fmt::format(" {} {} {}", box.lines, box.stride, piece.phase));
        if (piece.scales != nullptr) {
          add(piece, *piece.scales, tensor.name + kScaleName + suffix, {piece.scales->count()},
              fmt::format(" 1 0 {}", piece.phase));
        }
      }
    }
    std::sort(entries_.begin(), entries_.end(),
              [](const Entry& a, const Entry& b) { return a.place() < b.place(); });
    cut(file_bytes);
  }

  std::vector<CheckpointFile> write(const std::function<void(std::int64_t)>& progress) {
    const auto tell = [&](std::int64_t n) {
      done_ += n;
      if (progress) progress(done_);
    };
    if (entries_.empty()) return {};  // a checkpoint without tensors has no files
    begin_shard();
    for (const auto& source : from_.state_->files)
      source->pins ? copy_pinned(*source->pins, tell) : copy_file(*source->file, tell);
    ZG_ASSERT(next_ == entries_.size(), "{}: {} of {} pieces were copied", from_.path_, next_,
              entries_.size());
    return std::move(written_);
  }

 private:
  struct Entry {
    const State::Stored* piece;
    const SafeTensors::Entry* from;
    std::string name, note;
    TensorShapes::Shape shape;
    std::size_t source = 0;
    std::int64_t segment = 0, offset = 0;  // place in the source: in a pinned segment, or in the file
    io::Hash hash = {};
    std::tuple<std::size_t, std::int64_t, std::int64_t> place() const { return {source, segment, offset}; }
    bool is_split() const { return piece->pinned != nullptr && piece->pinned->high_segment >= 0; }
    std::int64_t end() const { return offset + (is_split() ? from->bytes / 2 : from->bytes); }
  };

  // Entries [first, end), which are written to one file.
  struct Shard {
    std::size_t first = 0, end = 0;
    std::int64_t bytes = 0;
  };

  void add(const State::Stored& piece, const SafeTensors::Entry& from, std::string name,
           TensorShapes::Shape shape, std::string note) {
    Entry e{&piece, &from, std::move(name), std::move(note), std::move(shape)};
    const auto& files = from_.state_->files;
    e.source = static_cast<std::size_t>(
        std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.get() == piece.file; }) -
        files.begin());
    if (piece.pinned == nullptr) {
      e.offset = from.offset - piece.file->file->entries().front().offset;
    } else {
      e.segment = piece.pinned->segment;
      e.offset = &from == piece.scales ? piece.pinned->scales : piece.pinned->offset;
    }
    entries_.push_back(std::move(e));
  }

  // Divides the entries into files. Codes and their scales go to the same file.
  void cut(std::int64_t most) {
    std::unordered_map<const State::Stored*, std::size_t> last;  // entry of the piece
    for (std::size_t i = 0; i < entries_.size(); ++i) last[entries_[i].piece] = i;
    std::size_t open = 0;  // the last entry of the pieces so far
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::int64_t bytes = entries_[i].from->bytes;
      if (shards_.empty() || (i > open && shards_.back().bytes + bytes > most)) shards_.push_back({i, i, 0});
      shards_.back().end = i + 1;
      shards_.back().bytes += bytes;
      open = std::max(open, last[entries_[i].piece]);
    }
  }

  // The header of the current file. Its length does not depend on the hashes.
  std::string header() const {
    const Shard& shard = shards_[written_.size()];
    nlohmann::ordered_json notes{{"format", "pt"}}, tensors;
    std::int64_t at = 0;
    for (std::size_t i = shard.first; i < shard.end; ++i) {
      const Entry& e = entries_[i];
      notes[e.name] = fmt::format("{} {}{}", e.piece->box.first, io::hash_text(e.hash.value()), e.note);
      tensors[e.name] = {
          {"dtype", e.from->dtype}, {"shape", e.shape}, {"data_offsets", {at, at + e.from->bytes}}};
      at += e.from->bytes;
    }
    nlohmann::ordered_json json{{"__metadata__", std::move(notes)}};
    json.update(tensors);
    return safetensors_header(json);
  }

  void begin_shard() {
    const std::string blank = header();
    header_bytes_ = static_cast<std::int64_t>(blank.size());
    file_ = {fmt::format("state-{:05}-of-{:05}.safetensors", written_.size() + 1, shards_.size()),
             header_bytes_ + shards_[written_.size()].bytes, 0};
    out_.emplace(files_, directory_ + "/" + file_.name, file_.bytes);
    out_->append(blank.data(), header_bytes_);
  }

  void end_shard() {
    out_->finish();
    const std::string text = header();
    ZG_ASSERT_EQ(static_cast<std::int64_t>(text.size()), header_bytes_);
    out_->replace(text.data(), header_bytes_, 0);
    out_->sync_and_close();
    out_.reset();
    file_.header_hash = io::hash_of(text);
    written_.push_back(file_);
  }

  void end_entry() {
    if (++next_ < shards_[written_.size()].end) return;
    end_shard();
    if (next_ < entries_.size()) begin_shard();
  }

  void put(Entry& e, const char* data, std::int64_t bytes) {
    e.hash.update(data, bytes);
    out_->append(data, bytes);
  }

  template <class Tell>
  void copy_file(const SafeTensors& file, const Tell& tell) {
    for (const SafeTensors::Entry& from : file.entries()) {
      Entry& e = entries_.at(next_);
      ZG_ASSERT(e.from == &from, "{} is no piece of {}", from.name, file.path());
      for (std::int64_t at = 0; at < from.bytes; at += kPart) {
        const std::int64_t n = std::min(kPart, from.bytes - at);
        part_.resize(static_cast<std::size_t>(kPart));
        file.read(from, at, n, part_.data());
        put(e, part_.data(), n);
        tell(n);
      }
      from_.state_->verify_entry(file, from, e.hash.value());
      end_entry();
    }
  }

  template <class Tell>
  void copy_pinned(const PinnedReader& pins, const Tell& tell) {
    const auto take = [&](std::int64_t segment, std::int64_t offset, const char* data, std::int64_t bytes) {
      const std::int64_t end = offset + bytes;
      while (next_ < entries_.size()) {
        Entry& e = entries_[next_];
        if (e.piece->file->pins.get() != &pins || e.segment != segment || e.offset >= end) break;
        const std::int64_t first = std::max(offset, e.offset), last = std::min(end, e.end());
        if (!e.is_split()) {
          put(e, data + (first - offset), last - first);
        } else if (first == e.offset) {
          copy_split(pins, e);
        }
        if (e.end() > end) break;
        end_entry();
      }
      tell(bytes);
    };
    pins.read_all(take);
  }

  // Copies split masters, whose upper halves lie in another segment.
  void copy_split(const PinnedReader& pins, Entry& e) {
    const std::int64_t count = e.piece->box.count(), most = kPart / 4;
    std::vector<char> values(static_cast<std::size_t>(4 * std::min(count, most)));
    for (std::int64_t at = 0; at < count; at += most) {
      const std::int64_t n = std::min(most, count - at);
      pins.read(*e.piece->pinned, at, n, values.data());
      put(e, values.data(), 4 * n);
    }
  }

  const Checkpoint& from_;
  Files& files_;
  const std::string directory_;
  std::vector<Entry> entries_;
  std::vector<Shard> shards_;
  std::vector<CheckpointFile> written_;  // complete files; the next shard is being written
  CheckpointFile file_;
  std::int64_t header_bytes_ = 0;
  std::optional<SequentialWriter> out_;
  std::size_t next_ = 0;  // entry
  std::int64_t done_ = 0;
  std::vector<char> part_;
};

std::vector<CheckpointFile> Checkpoint::copy_tensors(
    Files& files, const std::string& directory, std::int64_t file_bytes,
    const std::function<void(std::int64_t)>& progress) const {
  try {
    std::vector<CheckpointFile> written = Copy(*this, files, directory, file_bytes).write(progress);
    check_still_there();
    return written;
  } catch (const Error&) {
    check_still_there();  // hashes also differ if the run has overwritten the state since
    throw;
  }
}

std::string Checkpoint::index_of(const std::string& directory, const std::vector<CheckpointFile>& files) {
  State state;
  for (const CheckpointFile& file : files) state.add(directory + "/" + file.name, file);
  std::map<std::string, State::Pieces> tensors(state.tensors.begin(), state.tensors.end());
  std::string lines;
  for (auto& [name, pieces] : tensors) {
    std::sort(pieces.begin(), pieces.end(),
              [](const auto& a, const auto& b) { return a.box.first < b.box.first; });
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const State::Stored& piece : pieces) {
      const CheckpointBox& box = piece.box;
      nlohmann::ordered_json json{{"file", piece.file->path().substr(directory.size() + 1)},
                                  {"entry", piece.entry->name},
                                  {"first", box.first},
                                  {"elements", box.count()}};
      if (box.lines > 1) json["lines"] = box.lines, json["stride"] = box.stride;
      if (piece.scales != nullptr) json["scales"] = piece.scales->name, json["phase"] = piece.phase;
      list.push_back(std::move(json));
    }
    const nlohmann::ordered_json json{{"dtype", pieces.front().entry->dtype}, {"pieces", std::move(list)}};
    lines +=
        fmt::format("{}    {}: {}", lines.empty() ? "" : ",\n", nlohmann::json(name).dump(), json.dump());
  }
  return "{\n  \"tensors\": {\n" + lines + "\n  }\n}\n";
}

}  // namespace zg
