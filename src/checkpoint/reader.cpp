#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <queue>
#include <set>
#include <tuple>
#include <unordered_map>

#include "checkpoint/pins_reader.hpp"
#include "checkpoint/reader_state.hpp"
#include "checkpoint/sequential_io.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMostHeader = 100'000'000;  // bytes, as the format has it

// The text before the tensors' bytes, with its length.
std::string header_of(const std::string& path) {
  const InputFile file(path, "a file of a checkpoint");
  std::uint64_t length = 0;
  constexpr std::int64_t kWidth = sizeof length;
  if (file.bytes() < kWidth) damaged(path, fmt::format("is truncated: it has {} bytes", file.bytes()));
  file.read(&length, kWidth, 0);
  if (length > kMostHeader || length > static_cast<std::uint64_t>(file.bytes() - kWidth))
    damaged(path, fmt::format("has a header of {} bytes, in a file of {}", length, file.bytes()));
  std::string header(kWidth + length, '\0');
  file.read(header.data(), static_cast<std::int64_t>(header.size()), 0);
  return header;
}

// Parses a checkpoint's name, "0003-step-200".
std::optional<CheckpointEntry> entry_of(const fs::path& path) {
  const std::string name = path.filename();
  CheckpointEntry entry{path, 0, 0};
  long long number = -1, step = -1;
  int end = 0;
  if (std::sscanf(name.c_str(), "%lld-step-%lld%n", &number, &step, &end) != 2 || number < 0 || step < 0 ||
      number > kMostNumber || step > kMostNumber || checkpoint_name(number, step) != name)
    return std::nullopt;
  entry.number = number, entry.step = step;
  return entry;
}

template <class F>
void each_in(const std::string& directory, const F& f) {
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error))
    f(at->path());
  if (error && error != std::errc::no_such_file_or_directory)
    throw Error(Errc::kUsage, directory, "cannot be listed: " + error.message(),
                "name a directory of checkpoints");
}

// A file's note about one of its entries (kNoteForm).
struct Note {
  CheckpointBox box;
  std::int64_t phase = 0;  // place of the first element in its block of codes
  std::uint64_t hash = 0;
  bool part = false;  // the note has the long form
};

std::optional<Note> note_of(const std::string& text, std::int64_t count) {
  constexpr long long kMost = 1ll << 48;
  long long first = -1, lines = 1, stride = 0, phase = 0;
  unsigned long long hash = 0;
  const int found = std::sscanf(text.c_str(), kNoteForm, &first, &hash, &lines, &stride, &phase);
  if ((found != 2 && found != 5) || first < 0 || first > kMost || lines < 1 || lines > count + 1 ||
      phase < 0 || phase >= kQuantBlock)
    return std::nullopt;
  if (found == 5 && lines > 1 && (count % lines != 0 || stride < count / lines || stride > kMost / lines))
    return std::nullopt;
  return Note{{first, lines, count / lines, stride}, phase, hash, found == 5};
}

bool ends_in(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && std::string_view(text).substr(text.size() - end.size()) == end;
}

// "NAME[2]": NAME and "[2]".
std::pair<std::string, std::string> numbered(const std::string& name) {
  const std::size_t at = name.empty() || name.back() != ']' ? name.npos : name.rfind('[');
  if (at == name.npos) return {name, ""};
  return {name.substr(0, at), name.substr(at)};
}

// Calls f(at, from, count) for each run of elements that both boxes have: `at` counts in the order of the
// wanted box, `from` in that of the other one.
template <class F>
void for_overlaps(const CheckpointBox& want, const CheckpointBox& have, const F& f) {
  const auto end_of = [](const CheckpointBox& box) {
    return box.first + (box.lines - 1) * box.stride + box.width;
  };
  if (want.first >= end_of(have) || have.first >= end_of(want)) return;
  for (std::int64_t l = 0; l < want.lines; ++l) {
    const std::int64_t begin = want.first + l * want.stride, end = begin + want.width;
    const std::int64_t before = begin - have.first - have.width;
    for (std::int64_t k = have.lines == 1 || before < 0 ? 0 : before / have.stride; k < have.lines; ++k) {
      const std::int64_t start = have.first + k * have.stride;
      if (start >= end) break;
      const std::int64_t from = std::max(begin, start), to = std::min(end, start + have.width);
      if (from < to) f(l * want.width + from - begin, k * have.width + from - start, to - from);
    }
  }
}

// Reads runs of a piece's bytes in a file, in ascending order. Short runs are served from a buffer, to save
// system calls.
class ShortRuns {
 public:
  ShortRuns(const SafeTensors* file, const SafeTensors::Entry& entry) : file_(file), entry_(entry) {}

  void read(std::int64_t at, std::int64_t bytes, char* out) {
    if (bytes >= kBuffer) return file_->read(entry_, at, bytes, out);
    if (at < at_ || at + bytes > at_ + static_cast<std::int64_t>(buffer_.size())) {
      buffer_.resize(static_cast<std::size_t>(std::min(kBuffer, entry_.bytes - at)));
      at_ = at;
      file_->read(entry_, at, static_cast<std::int64_t>(buffer_.size()), buffer_.data());
    }
    std::memcpy(out, buffer_.data() + (at - at_), static_cast<std::size_t>(bytes));
  }

 private:
  static constexpr std::int64_t kBuffer = 16 << 10;

  const SafeTensors* const file_;
  const SafeTensors::Entry& entry_;
  std::int64_t at_ = 0;
  std::vector<char> buffer_;
};

}  // namespace

std::string checkpoint_name(std::int64_t number, std::int64_t step) {
  return fmt::format("{:04}-step-{}", number, step);
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& directory) {
  std::vector<CheckpointEntry> all;
  each_in(directory, [&](const fs::path& path) {
    if (const auto entry = entry_of(path)) all.push_back(*entry);
  });
  std::sort(all.begin(), all.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return std::pair(a.number, a.step) > std::pair(b.number, b.step);
  });
  return all;
}

std::vector<std::string> unfinished_checkpoints(const std::string& directory) {
  std::vector<std::string> all;
  each_in(directory, [&](const fs::path& path) {
    const std::string name = path.filename();
    const std::size_t end = name.find(kUnfinished);
    if (end != name.npos && entry_of(path.parent_path() / name.substr(0, end))) all.push_back(path);
  });
  std::sort(all.begin(), all.end());
  return all;
}

void Checkpoint::State::add(const std::string& path, const CheckpointFile& wanted) {
  std::error_code error;
  const auto bytes = fs::file_size(path, error);
  if (error == std::errc::no_such_file_or_directory) damaged(path, "is missing");
  if (error) throw Error(Errc::kUsage, path, "cannot be examined: " + error.message(), kDamagedHint);
  if (static_cast<std::int64_t>(bytes) != wanted.bytes)
    damaged(path, fmt::format("has {} bytes, {} expected", bytes, wanted.bytes));
  if (wanted.is_pins()) return add_pins(path, wanted);
  if (io::hash_of(header_of(path)) != wanted.header_hash)
    damaged(path, "has a header with another XXH3 than its manifest says: it was changed");
  files.push_back(std::make_unique<Source>());
  files.back()->fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (files.back()->fd < 0)
    throw Error(Errc::kUsage, path, "cannot be opened: " + errno_text(errno), kDamagedHint);
  files.back()->file = std::make_unique<SafeTensors>(path, "a file of a checkpoint");
  const SafeTensors& file = *files.back()->file;
  std::unordered_map<std::string, std::string> notes(file.metadata().begin(), file.metadata().end());
  for (const SafeTensors::Entry& entry : file.entries()) {
    const auto text = notes.find(entry.name);
    const auto note = text == notes.end() ? std::nullopt : note_of(text->second, entry.count());
    if (!note) damaged(path, fmt::format("does not say which piece of {} it has", entry.name));
    hashes[&entry] = note->hash;
    Stored piece{note->box, files.back().get(), &entry};
    const auto [name, number] = note->part ? numbered(entry.name) : std::pair(entry.name, std::string());
    if (note->part && ends_in(name, kScaleName)) continue;  // belongs to its codes
    if (note->part && entry.dtype == "U8") {
      const std::int64_t blocks = (note->phase + entry.count() + kQuantBlock - 1) / kQuantBlock;
      piece.phase = note->phase;
      piece.scales = file.find(name + kScaleName + number);
      if (piece.scales == nullptr || piece.scales->dtype != "F32" || piece.scales->count() != blocks)
        damaged(path, fmt::format("has codes of {} without their {} scales", entry.name, blocks));
    }
    tensors[name].push_back(piece);
  }
}

void Checkpoint::State::add_pins(const std::string& path, const CheckpointFile& wanted) {
  files.push_back(std::make_unique<Source>());
  files.back()->pins = std::make_unique<PinnedReader>(read_pinned(path, wanted), path);
  PinnedReader& pins = *files.back()->pins;
  for (const PinnedPiece& p : pins.state().pieces) {
    const std::int64_t count = p.box.count(), blocks = (p.phase + count + kQuantBlock - 1) / kQuantBlock;
    const std::int64_t width = p.high_segment >= 0 ? 4 : p.width();
    pinned_entries.push_back({.name = p.tensor, .dtype = p.dtype, .shape = {count}, .bytes = count * width});
    Stored piece{p.box, files.back().get(), &pinned_entries.back()};
    piece.pinned = &p;
    if (p.scales >= 0) {
      pinned_entries.push_back({.name = p.tensor, .dtype = "F32", .shape = {blocks}, .bytes = 4 * blocks});
      piece.scales = &pinned_entries.back(), piece.phase = p.phase;
    }
    tensors[p.tensor].push_back(piece);
  }
}

std::int64_t Checkpoint::State::gap_in(const Pieces& pieces, std::int64_t count) {
  using Line = std::tuple<std::int64_t, std::size_t, std::int64_t>;  // first element, piece, line of it
  std::priority_queue<Line, std::vector<Line>, std::greater<>> lines;
  for (std::size_t i = 0; i < pieces.size(); ++i) lines.emplace(pieces[i].box.first, i, 0);
  std::int64_t end = 0;
  while (!lines.empty()) {
    const auto [first, i, line] = lines.top();
    lines.pop();
    const CheckpointBox& box = pieces[i].box;
    if (first != end) return std::min(first, end);
    end += box.width;
    if (line + 1 < box.lines) lines.emplace(first + box.stride, i, line + 1);
  }
  return end == count ? -1 : std::min(end, count);
}

Checkpoint::Checkpoint(const std::string& directory) : path_(directory), state_(std::make_unique<State>()) {
  const std::string name = directory + "/" + kManifestName;
  std::error_code error;
  if (!fs::exists(name, error)) {
    throw Error(Errc::kUsage, directory, fmt::format("is no checkpoint: there is no {} in it", kManifestName),
                "name a checkpoint's directory, e.g. runs/quickstart/checkpoints/0001-step-100");
  }
  manifest_ = parse_manifest(read_text_file(name, "the manifest of a checkpoint"), name);
  for (const CheckpointFile& file : manifest_.files) state_->add(directory + "/" + file.name, file);
  for (auto& [tensor, stored] : state_->tensors) {
    std::sort(stored.begin(), stored.end(),
              [](const auto& a, const auto& b) { return a.box.first < b.box.first; });
  }
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

void Checkpoint::State::verify_entry(const SafeTensors& file, const SafeTensors::Entry& entry,
                                     std::uint64_t found) const {
  if (const std::uint64_t wanted = hashes.at(&entry); found != wanted) {
    damaged(file.path(), fmt::format("has {} with XXH3 {}, {} expected: it was changed", entry.name,
                                     io::hash_text(found), io::hash_text(wanted)));
  }
}

void Checkpoint::verify_index() const {
  const std::string path = path_ + "/" + manifest_.index->name;
  std::error_code error;
  if (!fs::exists(path, error)) damaged(path, "is missing");
  const std::string text = read_text_file(path, "the index of a checkpoint");
  if (static_cast<std::int64_t>(text.size()) != manifest_.index->bytes ||
      io::hash_of(text) != manifest_.index->header_hash)
    damaged(path, "has another size or XXH3 than its manifest says: it was changed");
}

void Checkpoint::verify(const std::function<void(std::int64_t)>& progress, const Sink& take) const {
  if (manifest_.index) verify_index();
  std::int64_t done = 0;
  const auto tell = [&](std::int64_t bytes) {
    done += bytes;
    if (progress) progress(done);
  };
  for (std::size_t i = 0; i < state_->files.size(); ++i) {
    const State::Source& source = *state_->files[i];
    if (source.pins) {
      try {
        source.pins->read_all([&](std::int64_t, std::int64_t, const char*, std::int64_t n) { tell(n); });
      } catch (const Error&) {
        check_still_there();
        throw;
      }
      continue;
    }
    const SafeTensors& file = *source.file;
    const CheckpointFile& known = manifest_.files[i];
    const std::string header = header_of(file.path());
    if (io::hash_of(header) != known.header_hash) damaged(file.path(), "was changed while it was read");
    const auto first = static_cast<std::int64_t>(header.size());
    if (take) take(known, 0, header.data(), first);
    ReadAhead ahead({{source.fd, first, known.bytes - first, file.path()}});
    auto entry = file.entries().begin();
    io::Hash hash;
    std::int64_t hashed = 0;  // bytes of the entry
    while (const auto chunk = ahead.next()) {
      if (take) take(known, first + chunk->offset, chunk->data, chunk->bytes);
      for (std::int64_t at = 0; at < chunk->bytes;) {
        ZG_ASSERT(entry != file.entries().end(), "{} has bytes of no tensor", file.path());
        const std::int64_t n = std::min(chunk->bytes - at, entry->bytes - hashed);
        hash.update(chunk->data + at, n);
        at += n, hashed += n;
        if (hashed < entry->bytes) break;
        state_->verify_entry(file, *entry, std::exchange(hash, io::Hash()).value());
        ++entry, hashed = 0;
      }
      tell(chunk->bytes);
    }
  }
}

void Checkpoint::expect(const std::vector<CheckpointTensor>& wanted, Others others) const {
  static const std::set<std::string> kTypes{"F64", "F32", "F16", "BF16", "U8"};
  std::set<std::string> found;
  const auto pieces_of = [&](const std::string& name) -> const State::Pieces& {
    const auto it = state_->tensors.find(name);
    if (it == state_->tensors.end()) {
      throw Error(Errc::kUsage, path_, fmt::format("has no tensor {}, which this run needs", name),
                  "the configuration differs from that of the checkpoint");
    }
    found.insert(name);
    return it->second;
  };
  const auto require = [&](const std::string& name, std::int64_t count, const std::string& dtype) {
    const State::Pieces& pieces = pieces_of(name);
    for (const State::Stored& piece : pieces) {
      if (piece.entry->dtype != dtype)
        damaged(piece.file->path(), fmt::format("has {} as {}, not as {}", name, piece.entry->dtype, dtype));
    }
    if (const std::int64_t gap = State::gap_in(pieces, count); gap >= 0) {
      damaged(path_, fmt::format("has not just the {} elements of {}: its pieces end or differ at element {}",
                                 count, name, gap));
    }
  };
  for (const CheckpointTensor& tensor : wanted) {
    const State::Pieces& pieces = pieces_of(tensor.name);
    const std::string& dtype = pieces.front().entry->dtype;
    if (kTypes.count(dtype) == 0 || (dtype == "U8" && !tensor.moment))
      damaged(pieces.front().file->path(), fmt::format("has {} as {}", tensor.name, dtype));
    const bool blocks = dtype == "U8" && !State::has_own_blocks(pieces);
    for (const State::Stored& piece : pieces) {
      if (dtype == "U8" && !blocks && piece.scales == nullptr)
        damaged(piece.file->path(), fmt::format("has codes of {} without their scales", tensor.name));
    }
    const std::int64_t count = blocks ? round_up(tensor.count, kQuantBlock) : tensor.count;
    require(tensor.name, count, dtype);
    if (blocks) require(tensor.name + kScaleName, count / kQuantBlock, "F32");
  }
  if (others == Others::kAny) return;
  for (const auto& [name, stored] : state_->tensors) {
    if (found.count(name) > 0) continue;
    throw Error(Errc::kUsage, stored.front().file->path(),
                fmt::format("has a tensor {}, for which this run has no place", name),
                "the configuration differs from that of the checkpoint");
  }
}

std::vector<CheckpointTensor> Checkpoint::tensors() const {
  std::vector<CheckpointTensor> all;
  for (const auto& [name, pieces] : state_->tensors) {
    std::int64_t count = 0;
    for (const State::Stored& piece : pieces) count += piece.box.count();
    const std::string& dtype = pieces.front().entry->dtype;
    all.push_back({name, dtype, count, dtype == "U8"});
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return all;
}

const std::string& Checkpoint::dtype_of(const std::string& tensor) const {
  return state_->tensors.at(tensor).front().entry->dtype;
}

void Checkpoint::read(const std::string& tensor, const CheckpointBox& box, void* out) const {
  char* const to = static_cast<char*>(out);
  for (const State::Stored& piece : state_->tensors.at(tensor)) {
    const std::int64_t width = piece.width();
    ShortRuns runs(piece.file->file.get(), *piece.entry);
    for_overlaps(box, piece.box, [&](std::int64_t at, std::int64_t from, std::int64_t count) {
      if (piece.pinned != nullptr) return piece.file->pins->read(*piece.pinned, from, count, to + at * width);
      runs.read(from * width, count * width, to + at * width);
    });
  }
}

void Checkpoint::read_codes(const std::string& tensor, const CheckpointBox& box, std::uint8_t* codes,
                            float* scales) const {
  const State::Pieces& pieces = state_->tensors.at(tensor);
  read(tensor, box, codes);
  if (State::has_own_blocks(pieces)) {
    std::vector<float> blocks;
    for (const State::Stored& piece : pieces) {
      for_overlaps(box, piece.box, [&](std::int64_t at, std::int64_t from, std::int64_t count) {
        const std::int64_t first = (piece.phase + from) / kQuantBlock;
        const std::int64_t number = (piece.phase + from + count - 1) / kQuantBlock - first + 1;
        blocks.resize(static_cast<std::size_t>(number));
        if (piece.pinned != nullptr) {
          piece.file->pins->read_scales(*piece.pinned, first, number, blocks.data());
        } else {
          piece.file->file->read(*piece.scales, 4 * first, 4 * number, blocks.data());
        }
        for (std::int64_t i = 0; i < count; ++i)
          scales[at + i] = blocks[static_cast<std::size_t>((piece.phase + from + i) / kQuantBlock - first)];
      });
    }
    return;
  }
  std::vector<float> of_blocks;
  for (std::int64_t l = 0; l < box.lines; ++l) {
    const std::int64_t first = box.first + l * box.stride, block = first / kQuantBlock;
    of_blocks.resize(static_cast<std::size_t>((first + box.width - 1) / kQuantBlock - block + 1));
    read(tensor + kScaleName, block, static_cast<std::int64_t>(of_blocks.size()), of_blocks.data());
    for (std::int64_t i = 0; i < box.width; ++i)
      scales[l * box.width + i] = of_blocks[static_cast<std::size_t>((first + i) / kQuantBlock - block)];
  }
}

std::vector<std::string> Checkpoint::drive_files() const {
  std::set<std::string> all;
  for (const auto& source : state_->files) {
    if (!source->pins) continue;
    for (const KeptFile& file : source->pins->state().files) all.insert(file.path());
  }
  return {all.begin(), all.end()};
}

// A run renames a checkpoint before it overwrites the state that the checkpoint had pinned.
void Checkpoint::check_still_there() const {
  if (manifest_.pinned == 0) return;
  const std::string name = path_ + "/" + kManifestName;
  std::error_code error;
  if (fs::exists(name, error) && read_text_file(name, "the manifest of a checkpoint") == manifest_.text())
    return;
  throw Error(Errc::kUsage, path_, "was removed by its run while it was read",
              "take the newest one, or let the run keep more (checkpoint.keep)");
}

void Checkpoint::close() {
  state_ = std::make_unique<State>();
}

std::vector<Checkpoint::Piece> Checkpoint::pieces() const {
  std::vector<Piece> all;
  for (const auto& [name, stored] : state_->tensors) {
    for (const State::Stored& piece : stored)
      all.push_back({name, piece.entry->dtype, piece.file->path(), piece.box});
  }
  std::sort(all.begin(), all.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.tensor, a.box.first) < std::pair(b.tensor, b.box.first);
  });
  return all;
}

std::optional<Checkpoint> newest_valid(const std::vector<std::string>& directories,
                                       const std::function<void(const std::string&)>& tell,
                                       const std::function<void(std::int64_t)>& progress) {
  std::vector<CheckpointEntry> all;
  for (const std::string& directory : directories) {
    const std::vector<CheckpointEntry> here = list_checkpoints(directory);
    all.insert(all.end(), here.begin(), here.end());
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const CheckpointEntry& a, const CheckpointEntry& b) { return a.number > b.number; });
  std::string first;
  for (const CheckpointEntry& entry : all) {
    try {
      Checkpoint checkpoint(entry.path);
      checkpoint.verify(progress);
      return checkpoint;
    } catch (const Error& error) {
      // A file that a drive cannot read is treated as damaged.
      if (error.code() != Errc::kUsage && error.code() != Errc::kIo) throw;
      const std::string why = fmt::format("{}: {}", error.where(), error.message());
      tell(fmt::format("{} is passed over: {}", entry.path, why));
      if (first.empty()) first = why;
    }
  }
  if (all.empty()) return std::nullopt;
  throw Error(Errc::kUsage, fmt::format("{}", fmt::join(directories, " and ")),
              fmt::format("none of the {} checkpoint{} there is valid; of the newest, {}", all.size(),
                          all.size() == 1 ? "" : "s", first),
              "remove them (ziggurat checkpoint discard) to start anew");
}

}  // namespace zg
