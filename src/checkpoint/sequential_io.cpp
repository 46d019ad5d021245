#include "checkpoint/sequential_io.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

// Four transfers of a chunk keep a drive busy; four chunks more let the caller work meanwhile.
constexpr int kThreads = 4;
constexpr std::size_t kBuffers = 8;
constexpr std::int64_t kPage = 4096;  // direct I/O begins, ends and lies in memory at multiples of it

}  // namespace

ReadAhead::ReadAhead(std::vector<FileRange> ranges, std::int64_t chunk) : ranges_(std::move(ranges)) {
  std::int64_t most = 0;
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    const FileRange& range = ranges_[i];
    const auto [at_fd, is_new] = direct_.try_emplace(range.fd, -1);
    // The same file again, whatever became of its name.
    const std::string same = fmt::format("/proc/self/fd/{}", range.fd);
    if (is_new) at_fd->second = ::open(same.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    for (std::int64_t at = 0; at < range.bytes; at += chunk) {
      jobs_.push_back({i, at, std::min(chunk, range.bytes - at)});
      most = std::max(most, jobs_.back().bytes);
    }
  }
  for (std::size_t i = 0; i < std::min(kBuffers, jobs_.size()); ++i) buffers_.emplace_back(most + 2 * kPage);
  try {
    for (int i = 0; i < kThreads && !jobs_.empty(); ++i)
      threads_.emplace_back("zg-file-read", [this] { read_jobs(); });
  } catch (...) {
    stop();  // those that were started wait for work
    throw;
  }
}

ReadAhead::~ReadAhead() {
  stop();
}

void ReadAhead::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (NamedThread& thread : threads_) thread.join();
  for (const auto& [fd, direct] : direct_) {
    if (direct >= 0) (void)::close(direct);
  }
}

void ReadAhead::read_jobs() {
  std::unique_lock lock(mutex_);
  while (true) {
    // The buffer of the job that the caller took last is its own until it takes another.
    wake_.wait(lock, [&] {
      return stop_ || started_ == jobs_.size() ||
             started_ < std::max<std::size_t>(taken_, 1) - 1 + buffers_.size();
    });
    if (stop_ || started_ == jobs_.size()) return;
    const std::size_t mine = started_++;
    lock.unlock();
    read(jobs_[mine], buffers_[mine % buffers_.size()]);
    lock.lock();
    jobs_[mine].done = true;
    wake_.notify_all();
  }
}

void ReadAhead::read(Job& job, Buffer& buffer) const {
  const FileRange& range = ranges_[job.range];
  const std::int64_t first = range.offset + job.offset, before = first % kPage;
  std::int64_t have = 0;  // bytes from the page on in which the range begins
  const std::int64_t wanted = before + job.bytes;
  job.data = buffer.data() + before;
  int fd = direct_.at(range.fd);
  bool direct = fd >= 0;
  if (!direct) fd = range.fd;
  while (have < wanted) {
    // Direct I/O moves whole pages; the last page of a file may be read in part.
    const std::int64_t bytes = direct ? round_up(wanted, kPage) - have : wanted - have;
    const ssize_t n =
        ::pread(fd, buffer.data() + have, static_cast<std::size_t>(bytes), first - before + have);
    if (n < 0 && errno == EINTR) continue;
    if (direct && (n < 0 ? errno == EINVAL : n % kPage != 0 && have + n < wanted)) {
      direct = false, fd = range.fd, have = 0;
      continue;
    }
    if (n <= 0) {
      job.error = n == 0 ? EIO : errno;
      return;
    }
    have += n;
  }
  if (!direct) (void)::posix_fadvise(fd, first, job.bytes, POSIX_FADV_DONTNEED);
}

std::optional<ReadAhead::Chunk> ReadAhead::next() {
  if (taken_ == jobs_.size()) return std::nullopt;
  std::unique_lock lock(mutex_);
  const Job& job = jobs_[taken_++];
  wake_.notify_all();
  wake_.wait(lock, [&] { return job.done; });
  if (job.error != 0) throw_io(ranges_[job.range].path, "cannot be read", job.error);
  return Chunk{job.range, job.offset, job.data, job.bytes};
}

SequentialWriter::SequentialWriter(Files& files, const std::string& path, std::int64_t bytes,
                                   std::int64_t chunk)
    : file_(files, path, bytes), chunk_(std::min(chunk, round_up(std::max<std::int64_t>(bytes, 1), kPage))) {
  ZG_ASSERT_EQ(chunk % kPage, 0);
  current_.data.reserve(chunk_);
}

SequentialWriter::~SequentialWriter() {
  stop();
}

void SequentialWriter::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (NamedThread& thread : threads_) thread.join();
  threads_.clear();
}

void SequentialWriter::append(const void* data, std::int64_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    if (current_.bytes == chunk_) hand_over();
    const std::int64_t n = std::min(bytes, chunk_ - current_.bytes);
    std::memcpy(current_.data.data() + current_.bytes, from, static_cast<std::size_t>(n));
    current_.bytes += n, from += n, bytes -= n;
  }
}

void SequentialWriter::hand_over() {
  if (threads_.empty()) {
    file_.set_direct(true);
    for (std::size_t i = 1; i < kBuffers; ++i) free_.push_back({Buffer(chunk_)});
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back("zg-file-write", [this] { write_chunks(); });
  }
  const std::int64_t end = current_.offset + current_.bytes;
  std::unique_lock lock(mutex_);
  full_.push_back(std::move(current_));
  wake_.notify_all();
  wake_.wait(lock, [&] { return failed_ || !free_.empty(); });
  if (failed_) std::rethrow_exception(failed_);
  current_ = std::move(free_.front());
  free_.pop_front();
  current_.bytes = 0, current_.offset = end;
}

void SequentialWriter::write_chunks() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || (!full_.empty() && !failed_); });
    if (stop_) return;
    Chunk chunk = std::move(full_.front());
    full_.pop_front();
    ++writing_;
    lock.unlock();
    std::exception_ptr failed;
    try {
      file_.write(chunk.data.data(), chunk.bytes, chunk.offset);
    } catch (...) {
      failed = std::current_exception();
    }
    lock.lock();
    --writing_;
    if (failed && !failed_) failed_ = failed;
    free_.push_back(std::move(chunk));
    wake_.notify_all();
  }
}

void SequentialWriter::finish() {
  if (!threads_.empty()) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return failed_ || (full_.empty() && writing_ == 0); });
      if (failed_) std::rethrow_exception(failed_);
    }
    stop();
    file_.set_direct(false);
  }
  file_.write(current_.data.data(), current_.bytes, current_.offset);
  current_.offset += current_.bytes, current_.bytes = 0;
}

}  // namespace zg
