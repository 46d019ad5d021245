// The exchanges of a block's attention with the other ranks of a context-parallel group. The model calls this
// interface, and does not know how it is implemented.
#pragma once
#include "ziggurat/base/view.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

// Operands have no gaps. Each exchange begins when the work enqueued on the stream `s` so far is done. All
// ranks make the same calls in the same order.
class ContextExchange {
 public:
  virtual ~ContextExchange() = default;
  // Sends `mine` to the next rank of the ring, and receives as much from the previous rank into
  // `from_before`. Runs concurrently with later work of `s`, which must not touch either view until
  // end_pass(). One pass at a time.
  virtual void begin_pass(Stream& s, const View& mine, const View& from_before) = 0;
  virtual void end_pass(Stream& s) = 0;  // makes later work of `s` wait for the pass
  // `in` and `out` consist of one slice for each rank, all of equal size. Slice i of `in` goes to rank i;
  // slice i of `out` comes from rank i.
  virtual void all_to_all(Stream& s, const View& in, const View& out) = 0;
};

// A call of a ContextExchange, for plans. `count`: elements that are sent to each receiving rank.
struct ContextCall {
  enum class Kind { kPass, kAllToAll };
  Kind kind = Kind::kPass;
  std::int64_t count = 0;
  DType dtype = DType::kF32;
};

}  // namespace zg
