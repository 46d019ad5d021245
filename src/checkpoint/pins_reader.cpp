#include "checkpoint/pins_reader.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "checkpoint/sequential_io.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

constexpr const char* kHint = "the checkpoint is damaged: resume from another one";

}  // namespace

PinnedReader::PinnedReader(PinnedState state, std::string path)
    : state_(std::move(state)), path_(std::move(path)) {
  const auto refuse = [this](const std::string& where, const std::string& what, const char* hint) {
    close();
    throw Error(Errc::kUsage, where, what, hint);
  };
  for (std::size_t i = 0; i < state_.files.size(); ++i) {
    const std::string file = state_.files[i].path();
    // O_NONBLOCK: a pipe of that name must not wait for its writer. Whatever the path names is read, and no
    // more.
    fds_.push_back(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
    struct stat info {};
    if (fds_.back() < 0 || ::fstat(fds_.back(), &info) != 0) {
      const int error = errno;
      if (error == ENOENT) {
        refuse(file, "is missing: the checkpoint's state lies in it",
               "mount its drive, or resume from another checkpoint");
      }
      refuse(file, "cannot be opened: " + errno_text(error), kHint);
    }
    if (!S_ISREG(info.st_mode)) refuse(file, "is no regular file, and so no drive's file", kHint);
    std::int64_t end = 0;
    for (const PinnedSegment& segment : state_.segments) {
      for (const io::StoredPiece& p : segment.stored.pieces) {
        if (p.drive == static_cast<int>(i)) end = std::max(end, p.offset + p.bytes);
      }
    }
    if (info.st_size < end)
      refuse(file, fmt::format("has {} bytes, {} at least expected", info.st_size, end), kHint);
  }
}

PinnedReader::~PinnedReader() {
  close();
}

void PinnedReader::close() {
  for (const int fd : fds_) {
    if (fd >= 0) (void)::close(fd);
  }
  fds_.clear();
}

void PinnedReader::read_file(const io::StoredPiece& piece, std::int64_t offset, std::int64_t bytes,
                             char* out) const {
  const auto drive = static_cast<std::size_t>(piece.drive);
  std::int64_t at = piece.offset + offset;
  while (bytes > 0) {
    const ssize_t n = ::pread(fds_[drive], out, static_cast<std::size_t>(bytes), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw_io(state_.files[drive].path(), "cannot be read", n == 0 ? EIO : errno);
    out += n, at += n, bytes -= n;
  }
}

void PinnedReader::read_segment(std::int64_t segment, std::int64_t offset, std::int64_t bytes,
                                char* out) const {
  for (const io::StoredPiece& p : state_.segments[static_cast<std::size_t>(segment)].stored.pieces) {
    if (bytes == 0) return;
    if (offset < p.bytes) {
      const std::int64_t n = std::min(bytes, p.bytes - offset);
      read_file(p, offset, n, out);
      out += n, bytes -= n, offset += n;
    }
    offset -= p.bytes;
  }
}

void PinnedReader::read(const PinnedPiece& piece, std::int64_t first, std::int64_t count, char* out) const {
  const std::int64_t width = piece.width();
  if (piece.high_segment < 0)
    return read_segment(piece.segment, piece.offset + first * width, count * width, out);
  // Split masters; `out` has any alignment.
  std::vector<std::uint16_t> low(static_cast<std::size_t>(count));
  std::vector<bf16> high(low.size());
  read_segment(piece.segment, piece.offset + first * 2, count * 2, reinterpret_cast<char*>(low.data()));
  read_segment(piece.high_segment, piece.high_offset + first * 2, count * 2,
               reinterpret_cast<char*>(high.data()));
  for (std::size_t i = 0; i < low.size(); ++i) {
    const float value = join_master(high[i], low[i]);
    std::memcpy(out + i * sizeof value, &value, sizeof value);
  }
}

void PinnedReader::read_scales(const PinnedPiece& piece, std::int64_t first, std::int64_t count,
                               float* out) const {
  read_segment(piece.segment, piece.scales + first * 4, count * 4, reinterpret_cast<char*>(out));
}

void PinnedReader::read_all(const Sink& take) const {
  struct Place {
    std::int64_t segment, offset;
    const io::StoredPiece* piece;
  };
  std::vector<Place> places;
  std::vector<FileRange> ranges;
  for (std::size_t s = 0; s < state_.segments.size(); ++s) {
    std::int64_t offset = 0;
    for (const io::StoredPiece& p : state_.segments[s].stored.pieces) {
      const auto drive = static_cast<std::size_t>(p.drive);
      places.push_back({static_cast<std::int64_t>(s), offset, &p});
      ranges.push_back({fds_[drive], p.offset, p.bytes, state_.files[drive].path()});
      offset += p.bytes;
    }
  }
  ReadAhead ahead(std::move(ranges));
  io::Hash hash;
  while (const auto chunk = ahead.next()) {
    const auto [segment, offset, piece] = places[chunk->range];
    hash.update(chunk->data, chunk->bytes);
    take(segment, offset + chunk->offset, chunk->data, chunk->bytes);
    if (chunk->offset + chunk->bytes < piece->bytes) continue;
    if (const std::uint64_t found = std::exchange(hash, io::Hash()).value(); found != piece->checksum) {
      throw Error(Errc::kUsage, state_.files[static_cast<std::size_t>(piece->drive)].path(),
                  fmt::format("has {} bytes of {} at {} with XXH3 {}, {} expected: they were changed",
                              piece->bytes, state_.segments[static_cast<std::size_t>(segment)].name,
                              piece->offset, io::hash_text(found), io::hash_text(piece->checksum)),
                  kHint);
    }
  }
}

}  // namespace zg
