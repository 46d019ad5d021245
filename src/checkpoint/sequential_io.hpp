// Sequential reading of files and writing of a file, by background threads that bypass the page cache. So a
// copy of a checkpoint reads, hashes and writes concurrently. Private to src/checkpoint.
//
// A file system without direct I/O (O_DIRECT) is read and written through the page cache.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/checkpoint/files.hpp"

namespace zg {

inline constexpr std::int64_t kSequentialChunk = 4 << 20;  // bytes

// A range of an open file, whose descriptor outlives the reader.
struct FileRange {
  int fd = -1;
  std::int64_t offset = 0, bytes = 0;
  std::string path;  // for messages
};

// Reads ranges ahead of the caller, in their order. One thread calls.
class ReadAhead {
 public:
  struct Chunk {
    std::size_t range = 0;
    std::int64_t offset = 0;  // in the range
    const char* data = nullptr;
    std::int64_t bytes = 0;
  };
  explicit ReadAhead(std::vector<FileRange> ranges, std::int64_t chunk = kSequentialChunk);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;
  // The next bytes, which stay valid until the next call; none: all ranges were read. Throws Error(kIo).
  std::optional<Chunk> next();

 private:
  struct Job {
    std::size_t range = 0;
    std::int64_t offset = 0, bytes = 0;
    const char* data = nullptr;
    int error = 0;
    bool done = false;
  };
  void stop();
  void read_jobs();
  void read(Job& job, Buffer& buffer) const;

  const std::vector<FileRange> ranges_;
  std::map<int, int> direct_;  // maps each range's descriptor to one for direct I/O, or -1
  std::vector<Job> jobs_;
  std::vector<Buffer> buffers_;  // job i has buffer i modulo their number
  std::mutex mutex_;
  std::condition_variable wake_;
  std::size_t started_ = 0, taken_ = 0;  // jobs; the caller may still use the last one that it took
  bool stop_ = false;
  std::vector<NamedThread> threads_;
};

// Writes a new file. One thread calls. Throws Error(kIo) for the first write that failed.
class SequentialWriter {
 public:
  SequentialWriter(Files& files, const std::string& path, std::int64_t bytes,
                   std::int64_t chunk = kSequentialChunk);
  ~SequentialWriter();
  SequentialWriter(const SequentialWriter&) = delete;
  SequentialWriter& operator=(const SequentialWriter&) = delete;
  void append(const void* data, std::int64_t bytes);
  // Waits until all appended bytes are written. Afterwards bytes can be replaced, and the file synced.
  void finish();
  void replace(const void* data, std::int64_t bytes, std::int64_t offset) {
    file_.write(data, bytes, offset);
  }
  void sync_and_close() { file_.sync_and_close(); }

 private:
  struct Chunk {
    Buffer data;
    std::int64_t bytes = 0, offset = 0;
  };
  void write_chunks();
  void hand_over();  // gives the full current chunk to the writing threads
  void stop();

  NewFile file_;
  const std::int64_t chunk_;
  Chunk current_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Chunk> full_, free_;
  int writing_ = 0;
  bool stop_ = false;
  std::exception_ptr failed_;
  std::vector<NamedThread> threads_;  // started with the first full chunk
};

}  // namespace zg
