#include "io/request_picker.hpp"

#include <algorithm>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {

RequestPicker::RequestPicker(std::int64_t blocks, std::uint64_t seed, int drive)
    : random_(seed, fmt::format("benchmark of drive {}", drive)), state_(static_cast<std::size_t>(blocks)) {
  ZG_ASSERT_GE(blocks, 1);
}

void RequestPicker::start(BenchOp op, Pattern pattern, std::int64_t count) {
  op_ = op;
  pattern_ = pattern;
  read_back_ = false;
  left_ = count;
  // The two streams of a mix begin half the file apart, since otherwise they would always meet in the same
  // blocks.
  at_[0] = 0;
  at_[1] = op == BenchOp::kMixed ? blocks() / 2 : 0;
  std::fill(state_.begin(), state_.end(), std::uint8_t{0});
}

void RequestPicker::start_read_back() {
  op_ = BenchOp::kRead;
  pattern_ = Pattern::kSequential;
  read_back_ = true;
  at_[0] = 0;
  left_ = std::count(state_.begin(), state_.end(), std::uint8_t{kWritten});
}

std::optional<RequestPicker::Request> RequestPicker::next() {
  if (left_ == 0) return std::nullopt;
  if (left_ != kEndless) --left_;
  Request request{op_ == BenchOp::kWrite ? Op::kWrite : Op::kRead, 0};
  if (op_ == BenchOp::kMixed && (random_.block(drawn_)[2] & 1) != 0) request.op = Op::kWrite;
  std::int64_t& at = at_[index_of(request.op)];
  if (pattern_ == Pattern::kRandom)
    at = static_cast<std::int64_t>(random_.below(drawn_, static_cast<std::uint64_t>(blocks())));
  ++drawn_;
  request.block = free_from(at);
  at = (request.block + 1) % blocks();
  std::uint8_t& state = state_[static_cast<std::size_t>(request.block)];
  if (read_back_) {
    state = 0;
  } else if (op_ != BenchOp::kRead) {
    state |= request.op == Op::kWrite ? kBusy | kWritten : kBusy;
  }
  return request;
}

void RequestPicker::done(const Request& request) {
  state_[static_cast<std::size_t>(request.block)] &= static_cast<std::uint8_t>(~kBusy);
}

RequestPicker::Request RequestPicker::write_of(const Request& read) {
  const Request write{Op::kWrite, read.block};
  state_[static_cast<std::size_t>(write.block)] |= kBusy | kWritten;
  return write;
}

// The first block, from `block` on and round the file, that may be requested now.
std::int64_t RequestPicker::free_from(std::int64_t block) const {
  for (std::int64_t tried = 0; tried < blocks(); ++tried) {
    const std::uint8_t state = state_[static_cast<std::size_t>(block)];
    if ((state & kBusy) == 0 && (!read_back_ || (state & kWritten) != 0)) return block;
    block = (block + 1) % blocks();
  }
  ZG_ASSERT(false, "all {} blocks are under way", blocks());
  return -1;
}

}  // namespace zg::io
