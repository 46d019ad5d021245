// Copies all tensors of a checkpoint into one file.
#include <nlohmann/json.hpp>
#include <tuple>

#include "train/checkpoint_header.hpp"
#include "train/checkpoint_state.hpp"
#include "train/checkpoint_writer.hpp"
#include "train/sequential_io.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPart = 8 << 20;  // bytes that are copied at a time

}  // namespace

// Copies the entries of all sources into one file, in the order in which the sources have their bytes, so
// that each byte is read and written once, one after the other.
class Checkpoint::Copy {
 public:
  explicit Copy(const Checkpoint& from) : from_(from) {
    for (const CheckpointTensor& tensor : from.tensors()) {
      int number = 0;
      for (const State::Stored& piece : from.state_->tensors.at(tensor.name)) {
        const std::string suffix = ++number > 1 ? fmt::format("[{}]", number) : "";
        const CheckpointBox& box = piece.box;
        add(piece, *piece.entry, tensor.name + suffix,
            fmt::format(" {} {} {}", box.lines, box.stride, piece.phase));
        if (piece.scales != nullptr)
          add(piece, *piece.scales, tensor.name + kScaleName + suffix, fmt::format(" 1 0 {}", piece.phase));
      }
    }
    std::sort(entries_.begin(), entries_.end(),
              [](const Entry& a, const Entry& b) { return a.place() < b.place(); });
  }

  CheckpointFile write(Files& files, const std::string& directory,
                       const std::function<void(std::int64_t)>& progress) {
    std::int64_t bytes = 0;
    for (const Entry& e : entries_) bytes += e.from->bytes;
    const std::string blank = header();  // its length does not depend on the hashes
    const auto begin = static_cast<std::int64_t>(blank.size());
    CheckpointFile written{"rank-00000.safetensors", begin + bytes, 0};
    SequentialWriter out(files, directory + "/" + written.name, written.bytes);
    out_ = &out;
    out.append(blank.data(), begin);
    const auto tell = [&](std::int64_t n) {
      done_ += n;
      if (progress) progress(done_);
    };
    for (const auto& source : from_.state_->files)
      source->pins ? copy_pinned(*source->pins, tell) : copy_file(*source->file, tell);
    ZG_ASSERT(next_ == entries_.size(), "{}: {} of {} pieces were copied", from_.path_, next_,
              entries_.size());
    out.finish();
    const std::string text = header();
    ZG_ASSERT_EQ(text.size(), blank.size());
    out.replace(text.data(), begin, 0);
    out.sync_and_close();
    written.header_hash = io::hash_of(text);
    return written;
  }

 private:
  struct Entry {
    const State::Stored* piece;
    const SafeTensors::Entry* from;
    std::string name, note;
    std::size_t source = 0;
    std::int64_t segment = 0, offset = 0;  // where the source has it, pinned or in the file
    io::Hash hash = {};
    std::tuple<std::size_t, std::int64_t, std::int64_t> place() const { return {source, segment, offset}; }
    bool is_split() const { return piece->pinned != nullptr && piece->pinned->high_segment >= 0; }
    std::int64_t end() const { return offset + (is_split() ? from->bytes / 2 : from->bytes); }
  };

  void add(const State::Stored& piece, const SafeTensors::Entry& from, std::string name, std::string note) {
    Entry e{&piece, &from, std::move(name), std::move(note)};
    const auto& files = from_.state_->files;
    e.source = static_cast<std::size_t>(
        std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.get() == piece.file; }) -
        files.begin());
    if (piece.pinned == nullptr) {
      e.offset = static_cast<const char*>(from.data) -
                 static_cast<const char*>(piece.file->file->entries().front().data);
    } else {
      e.segment = piece.pinned->segment;
      e.offset = &from == piece.scales ? piece.pinned->scales : piece.pinned->offset;
    }
    entries_.push_back(std::move(e));
  }

  std::string header() const {
    nlohmann::ordered_json notes{{"format", "pt"}}, json;
    std::int64_t at = 0;
    for (const Entry& e : entries_)
      notes[e.name] = fmt::format("{} {}{}", e.piece->box.first, io::hash_text(e.hash.value()), e.note);
    json["__metadata__"] = std::move(notes);
    for (const Entry& e : entries_) {
      json[e.name] = {
          {"dtype", e.from->dtype}, {"shape", {e.from->count()}}, {"data_offsets", {at, at + e.from->bytes}}};
      at += e.from->bytes;
    }
    return safetensors_header(json);
  }

  void put(Entry& e, const char* data, std::int64_t bytes) {
    e.hash.update(data, bytes);
    out_->append(data, bytes);
  }

  template <class Tell>
  void copy_file(const SafeTensors& file, const Tell& tell) {
    for (const SafeTensors::Entry& from : file.entries()) {
      Entry& e = entries_.at(next_++);
      ZG_ASSERT(e.from == &from, "{} is no piece of {}", from.name, file.path());
      const char* const data = static_cast<const char*>(from.data);
      for (std::int64_t at = 0; at < from.bytes; at += kPart) {
        const std::int64_t n = std::min(kPart, from.bytes - at);
        put(e, data + at, n);
        file.drop(data + at, n);
        tell(n);
      }
      from_.state_->verify_entry(file, from, e.hash.value());
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
        ++next_;
      }
      tell(bytes);
    };
    pins.read_all(take);
  }

  // Masters whose upper halves lie in another segment.
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
  std::vector<Entry> entries_;
  std::size_t next_ = 0;  // entry
  SequentialWriter* out_ = nullptr;
  std::int64_t done_ = 0;
};

CheckpointFile Checkpoint::copy_tensors(Files& files, const std::string& directory,
                                        const std::function<void(std::int64_t)>& progress) const {
  try {
    const CheckpointFile written = Copy(*this).write(files, directory, progress);
    check_still_there();
    return written;
  } catch (const Error&) {
    check_still_there();  // what was overwritten has other hashes
    throw;
  }
}

}  // namespace zg
