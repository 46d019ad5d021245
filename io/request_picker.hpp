// Which request a benchmark sends to a drive next: a read or a write, of the next block or of any.
//
// Not thread safe. Invariant: while writes are among them, no two requests of the same block are under way.
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

  // From now on `count` requests, which starts the streams anew and forgets what was written. No more than
  // blocks() may be under way at a time, except of reads alone.
  void start(BenchOp op, Pattern pattern, std::int64_t count);
  // From now on reads of the blocks written since start(), each once.
  void start_read_back();

  std::optional<Request> next();  // nothing: there are no more
  void done(const Request& request);

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
  std::int64_t at_[2] = {0, 0};  // of the stream of reads, of writes
  std::vector<std::uint8_t> state_;
};

}  // namespace zg::io
