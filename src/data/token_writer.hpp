// Writes the files of a token cache.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/documents.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"

namespace zg {

// Owns a file descriptor, which may be none (-1).
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Whether writing to an existing part file may continue: it is a regular file without other links.
inline bool is_own_part(const std::string& part) {
  struct stat st {};
  return ::lstat(part.c_str(), &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink == 1;
}

// Writes to path + ".part", which finish() renames to `path`. A link of that name is not followed.
class PartWriter {
 public:
  // Continues an existing part file after its first `kept` bytes; with 0 replaces it by a new one.
  PartWriter(const std::string& path, std::int64_t kept)
      : path_(path), part_(path + ".part"), fd_(open_part(part_, kept)) {
    if (fd_.get() < 0 || ::ftruncate(fd_.get(), kept) != 0 || ::lseek(fd_.get(), kept, SEEK_SET) != kept)
      throw Error(Errc::kIo, part_, "cannot be created: " + errno_text(errno),
                  "check the directory and its permissions");
  }
  ~PartWriter() {
    if (!kept_) ::unlink(part_.c_str());
  }
  PartWriter(const PartWriter&) = delete;
  PartWriter& operator=(const PartWriter&) = delete;

  void write(const void* from, std::size_t n) {
    const auto* data = static_cast<const char*>(from);
    while (n > 0) {
      const ssize_t done = ::write(fd_.get(), data, n);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0)
        throw Error(Errc::kIo, part_, "cannot be written: " + errno_text(done < 0 ? errno : EIO), kRoom);
      data += done, n -= static_cast<std::size_t>(done);
    }
  }

  // Syncs the part file. It is not removed any more when the writer is destroyed.
  void keep() {
    if (::fsync(fd_.get()) != 0)
      throw Error(Errc::kIo, part_, "cannot be written: " + errno_text(errno), kRoom);
    kept_ = true;
  }
  void finish() {
    keep();
    if (::close(fd_.release()) != 0 || ::rename(part_.c_str(), path_.c_str()) != 0)
      throw Error(Errc::kIo, path_, "cannot be written: " + errno_text(errno), kRoom);
  }

 private:
  static constexpr const char* kRoom = "make room there, or give output.dir another place";

  static int open_part(const std::string& part, std::int64_t kept) {
    constexpr int kFlags = O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    if (kept > 0) {
      const int fd = ::open(part.c_str(), kFlags);
      struct stat st {};
      if (fd < 0 || (::fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink == 1)) return fd;
      ::close(fd);
      errno = EMLINK;
      return -1;
    }
    (void)::unlink(part.c_str());
    return ::open(part.c_str(), kFlags | O_CREAT | O_EXCL, 0644);
  }

  std::string path_, part_;
  Descriptor fd_;
  bool kept_ = false;
};

// How far the tokenising of one file has come.
struct Progress {
  std::int64_t offset = 0, lines = 0, tokens = 0, left_out = 0;  // left_out: by the loss mask
  std::int64_t documents = 0;
};

// Writes the tokens of a file and, for documents, the loss mask and the index.
class TokenWriter {
 public:
  TokenWriter(const std::string& path, DType dtype, bool documents, const Progress& from)
      : dtype_(dtype),
        mask_path_(std::filesystem::path(path).replace_extension(".mask").string()),
        tokens_(path, from.tokens * static_cast<std::int64_t>(size_of(dtype))) {
    if (!documents) return;
    mask_.emplace(mask_path_, from.tokens);
    places_.emplace(std::filesystem::path(path).replace_extension(".docs").string(), 8 * from.documents);
  }

  void write(const std::vector<std::int32_t>& ids) {
    if (dtype_ == DType::kI32) return tokens_.write(ids.data(), ids.size() * 4);
    narrow_.assign(ids.begin(), ids.end());
    tokens_.write(narrow_.data(), narrow_.size() * 2);
  }
  void write(const Document& document, Progress& progress) {
    write(document.ids);
    std::vector<std::uint8_t> mask = document.mask;
    mask.resize(document.ids.size(), 1);
    for (std::size_t i = 0; i < document.mask.size(); ++i) progress.left_out += mask[i] == 0;
    if (document.mask.empty()) std::fill(mask.begin(), mask.end(), std::uint8_t{1});
    mask_->write(mask.data(), mask.size());
    places_->write(&progress.tokens, sizeof progress.tokens);
    ++progress.documents;
    progress.tokens += static_cast<std::int64_t>(document.ids.size());
  }
  void keep() {
    tokens_.keep();
    if (mask_) mask_->keep();
    if (places_) places_->keep();
  }
  void finish(const Progress& progress) {
    tokens_.finish();
    std::error_code ignored;
    std::filesystem::remove(mask_path_, ignored);
    if (mask_ && progress.left_out > 0) mask_->finish();
    if (!places_) return;
    places_->write(&progress.tokens, sizeof progress.tokens);
    places_->finish();
  }

 private:
  DType dtype_;
  std::string mask_path_;
  PartWriter tokens_;
  std::optional<PartWriter> mask_, places_;
  std::vector<std::uint16_t> narrow_;
};

}  // namespace zg
