#include "train/pinned_map.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {
namespace {

constexpr const char* kHint = "the checkpoint is damaged: resume from another one";
constexpr std::int64_t kPage = 4096;

// The drives' files while they are mapped.
class OpenFiles {
 public:
  explicit OpenFiles(const PinnedState& state) {
    for (std::size_t i = 0; i < state.files.size(); ++i) {
      const std::string path = state.files[i].path();
      fds.push_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      struct stat info {};
      if (fds.back() < 0 || ::fstat(fds.back(), &info) != 0) {
        const int error = errno;
        close();
        throw Error(Errc::kUsage, path,
                    error == ENOENT ? "is missing: the checkpoint's state lies in it"
                                    : "cannot be opened: " + errno_text(error),
                    error == ENOENT ? "mount its drive, or resume from another checkpoint" : kHint);
      }
      std::int64_t end = 0;
      for (const PinnedSegment& segment : state.segments) {
        for (const io::StoredPiece& p : segment.stored.pieces) {
          if (p.drive == static_cast<int>(i)) end = std::max(end, p.offset + p.bytes);
        }
      }
      if (info.st_size >= end) continue;
      close();
      throw Error(Errc::kUsage, path, fmt::format("has {} bytes, {} at least expected", info.st_size, end),
                  kHint);
    }
  }
  ~OpenFiles() { close(); }
  std::vector<int> fds;

 private:
  void close() {
    for (const int fd : fds) {
      if (fd >= 0) (void)::close(fd);
    }
    fds.clear();
  }
};

}  // namespace

PinnedMap::PinnedMap(PinnedState state, std::string path) : state_(std::move(state)), path_(std::move(path)) {
  const OpenFiles files(state_);
  try {
    for (const PinnedSegment& segment : state_.segments) map(segment, files.fds);
  } catch (...) {
    unmap();
    throw;
  }
  for (const PinnedPiece& p : state_.pieces) {
    const char* const begin = segments_[static_cast<std::size_t>(p.segment)];
    const std::int64_t count = p.box.count();
    const std::int64_t width = p.dtype == "F64" ? 8 : p.dtype == "F32" ? 4 : p.dtype == "U8" ? 1 : 2;
    Entries& e = entries_.emplace_back();
    e.piece = &p;
    e.elements = {p.tensor, p.dtype, {count}, begin + p.offset, count * width};
    if (p.high_segment >= 0) e.high = segments_[static_cast<std::size_t>(p.high_segment)] + p.high_offset;
    if (p.scales < 0) continue;
    const std::int64_t blocks = (p.phase + count + kQuantBlock - 1) / kQuantBlock;
    e.scales = {p.tensor, "F32", {blocks}, begin + p.scales, 4 * blocks};
  }
}

PinnedMap::~PinnedMap() {
  unmap();
}

void PinnedMap::unmap() {
  for (std::size_t i = 0; i < segments_.size(); ++i)
    (void)::munmap(segments_[i], static_cast<std::size_t>(state_.segments[i].bytes));
}

// Reserves addresses for the whole segment, and puts its pieces there.
void PinnedMap::map(const PinnedSegment& segment, const std::vector<int>& files) {
  const auto failed = [&](int error) {
    throw Error(Errc::kIo, path_, fmt::format("{} cannot be mapped: {}", segment.name, errno_text(error)),
                error == ENOMEM ? "the process has too many mappings: raise vm.max_map_count (sysctl), or "
                                  "resume from a copy (ziggurat checkpoint export)"
                                : "");
  };
  void* const begin = ::mmap(nullptr, static_cast<std::size_t>(segment.bytes), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) failed(errno);
  segments_.push_back(static_cast<char*>(begin));
  char* at = segments_.back();
  for (const io::StoredPiece& p : segment.stored.pieces) {
    if (::mmap(at, static_cast<std::size_t>(p.bytes), PROT_READ, MAP_SHARED | MAP_FIXED,
               files[static_cast<std::size_t>(p.drive)], p.offset) == MAP_FAILED)
      failed(errno);
    at += p.bytes;
  }
}

void PinnedMap::verify(const std::function<void(std::int64_t)>& progress) const {
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const PinnedSegment& segment = state_.segments[i];
    const char* at = segments_[i];
    for (const io::StoredPiece& p : segment.stored.pieces) {
      const std::uint64_t found = io::checksum(at, p.bytes);
      drop(at, p.bytes);
      if (found != p.checksum) {
        throw Error(
            Errc::kUsage, state_.files[static_cast<std::size_t>(p.drive)].path(),
            fmt::format("has {} bytes of {} at {} with XXH3 {}, {} expected: they were changed", p.bytes,
                        segment.name, p.offset, io::hash_text(found), io::hash_text(p.checksum)),
            kHint);
      }
      at += p.bytes;
      progress(p.bytes);
    }
  }
}

void PinnedMap::drop(const void* data, std::int64_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / kPage * kPage;
  const auto end = round_up(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data)) + bytes, kPage);
  (void)::madvise(reinterpret_cast<void*>(begin), static_cast<std::size_t>(end) - begin, MADV_DONTNEED);
}

}  // namespace zg
