// Opening, reading and atomically writing files. All code that reads or makes a small file, or one that must
// appear whole, goes through here. Any thread may call these functions.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace zg {

// A regular file that is open for reading. Opening never blocks: a pipe, a device or a directory is refused.
// Bytes are read with pread(), so that a drive's error or a file that shrinks is an Error; with mapped memory
// either would end the process by SIGBUS.
class InputFile {
 public:
  // `what` names the file's purpose in errors: "the configuration". Throws Error(kUsage) with path, cause and
  // hint.
  InputFile(std::string path, std::string what);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t bytes() const { return bytes_; }        // its size when it was opened
  std::int64_t mtime_ns() const { return mtime_ns_; }  // its mtime when it was opened, since 1970
  int fd() const { return fd_; }
  // Reads bytes [offset, offset + bytes). Throws Error(kIo) for a drive's error, and for a file that has
  // become shorter.
  void read(void* out, std::int64_t bytes, std::int64_t offset) const;
  // The same, but a file that ends earlier is no error. Returns the number of bytes read.
  std::int64_t read_some(void* out, std::int64_t bytes, std::int64_t offset) const;

 private:
  std::string path_, what_;
  int fd_ = -1;
  std::int64_t bytes_ = 0, mtime_ns_ = 0;
};

// The lines of a file, one after the other, without their ends. For one thread.
class LineReader {
 public:
  // `longest`: the most bytes that a line may have. `file` outlives this.
  explicit LineReader(const InputFile& file, std::int64_t longest = std::int64_t{1} << 30);
  // False: there are no more lines. Throws Error(kIo) for an error while the file is read, and Error(kUsage)
  // for a line longer than `longest`.
  bool next(std::string& line);
  std::int64_t number() const { return number_; }  // of the last line, from 1

 private:
  const InputFile& file_;
  const std::int64_t longest_;
  std::string buffer_;
  std::size_t begin_ = 0;  // start of the bytes in buffer_ that next() has not returned yet
  std::int64_t read_ = 0, number_ = 0;
  bool ended_ = false;
};

// The default limit on the size, in bytes, of a file that is read whole.
inline constexpr std::int64_t kLargestTextFile = std::int64_t{256} << 20;

// Reads a whole regular file. Throws Error(kUsage) if it cannot be opened, is no regular file, or has more
// than `largest` bytes, and Error(kIo) for an error while it is read: never returns only a part of the file.
std::string read_text_file(const std::string& path, const std::string& what,
                           std::int64_t largest = kLargestTextFile);

// A file that appears whole or not at all. It is written under a temporary name in the same directory,
// NAME.part-<16 random digits>, and commit() renames it. The temporary file must not exist before, so that no
// link of that name is followed. It is locked while it is written, which distinguishes it from the leftover
// of a killed process; an OutputFile of the same name removes leftovers older than ten minutes. The
// destructor removes a file that was not committed. For one thread. All functions but the destructor throw
// Error(kIo) with path and cause.
class OutputFile {
 public:
  // `bytes` is the final size. It is reserved at once where the file system can do that, so that a full disk
  // is found before the work is done.
  OutputFile(std::string path, std::int64_t bytes);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  const std::string& path() const { return path_; }
  void write_at(std::int64_t offset, const void* data, std::int64_t bytes);
  // Flushes the file to the drive and closes it: for callers that write many files before they commit any.
  void sync();
  // Flushes the file to the drive, unless sync() has done so, and renames it to its final name. The rename is
  // durable after sync_directory().
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;
  std::string path_, part_;
  int fd_ = -1;
};

// Replaces the file at `path`. The file always holds either the old or the new content, even after a loss of
// power. Throws Error(kIo).
void write_file_atomically(const std::string& path, const std::string& content);

// Makes creations, renames and removals in the directory durable. Throws Error(kIo), but not for a file
// system whose directories cannot be synced.
void sync_directory(const std::string& path);

// Tries to lock the open file or directory with flock(), against others who lock it so; waits for nobody. The
// kernel releases the lock when the file is closed, however the process ends. Returns 0 (locked), EWOULDBLOCK
// (somebody else has it), or the error of a file system that has no locks.
enum class FileLock { kExclusive, kShared };
int try_lock(int fd, FileLock kind = FileLock::kExclusive);

// 16 unpredictable digits, 0-9 and a-f, for temporary names.
std::string random_digits();
// Whether `name` is a temporary name as made here: `base` + ".part-" + 16 such digits.
bool is_temporary_name(std::string_view name, std::string_view base);
std::string temporary_name(const std::string& path);

}  // namespace zg
