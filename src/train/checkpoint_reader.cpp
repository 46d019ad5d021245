#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <unordered_map>

#include "train/checkpoint_header.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/train/checkpoint.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

constexpr const char* kHint = "the checkpoint is damaged: resume from another one";
constexpr std::int64_t kPart = 8 << 20;  // bytes that are read at a time

[[noreturn]] void damaged(const std::string& where, const std::string& what) {
  throw Error(Errc::kUsage, where, what, kHint);
}

// The text before the tensors' bytes, with its length.
std::string header_of(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error(Errc::kUsage, path, "cannot be opened: " + errno_text(errno), kHint);
  const auto read = [&](char* to, std::size_t bytes, off_t at) {
    while (bytes > 0) {
      const ssize_t n = ::pread(fd, to, bytes, at);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      to += n, bytes -= static_cast<std::size_t>(n), at += n;
    }
    return true;
  };
  std::uint64_t length = 0;
  std::string header(sizeof length, '\0');
  struct stat st {};
  bool good = ::fstat(fd, &st) == 0 && read(header.data(), sizeof length, 0);
  std::memcpy(&length, header.data(), sizeof length);
  good = good && length <= static_cast<std::uint64_t>(st.st_size);
  if (good) {
    header.resize(sizeof length + length);
    good = read(header.data() + sizeof length, length, sizeof length);
  }
  ::close(fd);
  if (!good) damaged(path, "is truncated: its header cannot be read");
  return header;
}

// "0003-step-200": the numbers in it.
std::optional<CheckpointEntry> entry_of(const fs::path& path) {
  const std::string name = path.filename();
  CheckpointEntry entry{path, 0, 0};
  long long number = -1, step = -1;
  int end = 0;
  if (std::sscanf(name.c_str(), "%lld-step-%lld%n", &number, &step, &end) != 2 || number < 0 || step < 0 ||
      checkpoint_name(number, step) != name)
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

struct Checkpoint::State {
  struct Stored {
    std::int64_t first = 0, count = 0;
    std::uint64_t hash = 0;
    const SafeTensors* file = nullptr;
    const SafeTensors::Entry* entry = nullptr;
    std::int64_t width() const { return count > 0 ? entry->bytes / count : 0; }
  };
  std::vector<std::unique_ptr<SafeTensors>> files;
  std::unordered_map<std::string, std::vector<Stored>> tensors;  // pieces by first element

  void add(const std::string& path, const CheckpointFile& wanted);
};

void Checkpoint::State::add(const std::string& path, const CheckpointFile& wanted) {
  std::error_code error;
  const auto bytes = fs::file_size(path, error);
  if (error == std::errc::no_such_file_or_directory) damaged(path, "is missing");
  if (error) throw Error(Errc::kUsage, path, "cannot be examined: " + error.message(), kHint);
  if (static_cast<std::int64_t>(bytes) != wanted.bytes)
    damaged(path, fmt::format("has {} bytes, {} expected", bytes, wanted.bytes));
  if (io::hash_of(header_of(path)) != wanted.header_hash)
    damaged(path, "has a header with another XXH3 than its manifest says: it was changed");
  files.push_back(std::make_unique<SafeTensors>(path));
  const SafeTensors& file = *files.back();
  std::unordered_map<std::string, std::string> notes(file.metadata().begin(), file.metadata().end());
  for (const SafeTensors::Entry& entry : file.entries()) {
    long long first = -1;
    unsigned long long hash = 0;
    const auto note = notes.find(entry.name);
    if (note == notes.end() || std::sscanf(note->second.c_str(), kNoteForm, &first, &hash) != 2 || first < 0)
      damaged(path, fmt::format("does not say which piece of {} it has", entry.name));
    tensors[entry.name].push_back({first, entry.count(), hash, &file, &entry});
  }
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
    std::sort(stored.begin(), stored.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  }
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

void Checkpoint::verify(const std::function<void(std::int64_t)>& progress) const {
  std::int64_t done = 0;
  for (const auto& file : state_->files) {
    for (const SafeTensors::Entry& entry : file->entries()) {
      const auto& all = state_->tensors.at(entry.name);
      const auto stored =
          std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.entry == &entry; });
      io::Hash hash;
      const char* const data = static_cast<const char*>(entry.data);
      for (std::int64_t at = 0; at < entry.bytes; at += kPart) {
        const std::int64_t n = std::min(kPart, entry.bytes - at);
        hash.update(data + at, n);
        file->drop(data + at, n);
        if (progress) progress(done += n);
      }
      if (hash.value() != stored->hash) {
        damaged(file->path(), fmt::format("has {} with XXH3 {}, {} expected: it was changed", entry.name,
                                          io::hash_text(hash.value()), io::hash_text(stored->hash)));
      }
    }
  }
}

void Checkpoint::expect(const std::vector<CheckpointTensor>& wanted) const {
  std::size_t found = 0;
  for (const CheckpointTensor& tensor : wanted) {
    const auto it = state_->tensors.find(tensor.name);
    if (it == state_->tensors.end()) {
      throw Error(Errc::kUsage, path_, fmt::format("has no tensor {}, which this run needs", tensor.name),
                  "the configuration differs from that of the checkpoint");
    }
    ++found;
    std::int64_t end = 0;
    for (const State::Stored& piece : it->second) {
      if (piece.entry->dtype != tensor.dtype) {
        throw Error(Errc::kUsage, piece.file->path(),
                    fmt::format("has {} as {}, this run keeps it as {}", tensor.name, piece.entry->dtype,
                                tensor.dtype),
                    "resume with the optimizer.state of the checkpoint");
      }
      if (piece.first != end) break;
      end += piece.count;
    }
    const bool whole = end == tensor.count && it->second.back().first + it->second.back().count == end;
    if (!whole) {
      damaged(path_, fmt::format("has not just the {} elements of {}: its pieces end or differ at element {}",
                                 tensor.count, tensor.name, end));
    }
  }
  if (found == state_->tensors.size()) return;
  for (const auto& [name, stored] : state_->tensors) {
    const auto same = [&](const CheckpointTensor& tensor) { return tensor.name == name; };
    if (std::none_of(wanted.begin(), wanted.end(), same)) {
      throw Error(Errc::kUsage, stored.front().file->path(),
                  fmt::format("has a tensor {}, for which this run has no place", name),
                  "the configuration differs from that of the checkpoint");
    }
  }
}

void Checkpoint::read(const std::string& tensor, std::int64_t first, std::int64_t count, void* out) const {
  char* to = static_cast<char*>(out);
  for (const State::Stored& piece : state_->tensors.at(tensor)) {
    const std::int64_t begin = std::max(first, piece.first);
    const std::int64_t end = std::min(first + count, piece.first + piece.count);
    if (begin >= end) continue;
    const std::int64_t bytes = (end - begin) * piece.width();
    const char* from = static_cast<const char*>(piece.entry->data) + (begin - piece.first) * piece.width();
    std::memcpy(to + (begin - first) * piece.width(), from, static_cast<std::size_t>(bytes));
    piece.file->drop(from, bytes);
  }
}

std::vector<Checkpoint::Piece> Checkpoint::pieces() const {
  std::vector<Piece> all;
  for (const auto& [name, stored] : state_->tensors) {
    for (const State::Stored& piece : stored)
      all.push_back({name, piece.entry->dtype, piece.file->path(), piece.first, piece.count});
  }
  std::sort(all.begin(), all.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.tensor, a.first) < std::pair(b.tensor, b.first);
  });
  return all;
}

std::optional<Checkpoint> newest_valid(const std::string& directory,
                                       const std::function<void(const std::string&)>& tell,
                                       const std::function<void(std::int64_t)>& progress) {
  const std::vector<CheckpointEntry> all = list_checkpoints(directory);
  std::string first;
  for (const CheckpointEntry& entry : all) {
    try {
      Checkpoint checkpoint(entry.path);
      checkpoint.verify(progress);
      return checkpoint;
    } catch (const Error& error) {
      if (error.code() != Errc::kUsage) throw;
      const std::string why = fmt::format("{}: {}", error.where(), error.message());
      tell(fmt::format("{} is passed over: {}", entry.path, why));
      if (first.empty()) first = why;
    }
  }
  if (all.empty()) return std::nullopt;
  throw Error(Errc::kUsage, directory,
              fmt::format("none of its {} checkpoint{} is valid; of the newest, {}", all.size(),
                          all.size() == 1 ? "" : "s", first),
              "remove them (ziggurat checkpoint discard) to start anew");
}

}  // namespace zg
