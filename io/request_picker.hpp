// Picks the next request of a benchmark on a drive: a read or a write, of the next block or of a random one.
//
// Threads: one at a time. Invariant: if there are writes, no two requests in flight have the same block.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "ziggurat/base/philox.hpp"
#include "ziggurat/io/bench.hpp"

namespace zg::io {

class RequestPicker {
 public:
  static constexpr std::int64_t kEndless = -1;
  struct Request {
    Op op = Op::kRead;
    std::int64_t block = 0;
  };

  RequestPicker(std::int64_t blocks, std::uint64_t seed, int drive);

  // Begins a series of `count` requests at the beginning of the streams, with no block written. Unless all
  // are reads, at most blocks() of them may be in flight at a time. Of a copy these are the reads; each may
  // be followed by write_of() it.
  void start(BenchOp op, Pattern pattern, std::int64_t count);
  // Begins a series that reads each block written since start() once.
  void start_read_back();

  std::optional<Request> next();  // none at the end of the series
  void done(const Request& request);
  // Of a copy: the write of the block that was read, in the other file. It is in flight until done().
  Request write_of(const Request& read);

  std::int64_t blocks() const { return static_cast<std::int64_t>(state_.size()); }
  std::int64_t left() const { return left_; }

 private:
  enum : std::uint8_t { kBusy = 1, kWritten = 2 };
  std::int64_t free_from(std::int64_t block) const;

  const NamedRandom random_;
  std::uint64_t drawn_ = 0;
  BenchOp op_ = BenchOp::kRead;
  Pattern pattern_ = Pattern::kSequential;
  bool read_back_ = false;
  std::int64_t left_ = 0;
  std::int64_t at_[2] = {0, 0};      // next block of the stream of reads, and of that of writes
  std::vector<std::uint8_t> state_;  // by block: kBusy, kWritten or both
};

}  // namespace zg::io
