// What the attention of a block exchanges with the other parts of a context group: the model says what, and
// does not know how.
#pragma once
#include "ziggurat/base/view.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

// Operands have no gaps. Each call begins when the work that the stream `s` has so far is done, and all parts
// make the same calls in the same order.
class ContextExchange {
 public:
  virtual ~ContextExchange() = default;
  // Sends `mine` to the next part, and receives as much from the part before; the last part is before the
  // first. Goes on beside later work of `s`, which must leave both alone until end_pass(). One pass at a
  // time.
  virtual void begin_pass(Stream& s, const View& mine, const View& from_before) = 0;
  virtual void end_pass(Stream& s) = 0;  // work that `s` gets later begins when the pass is done
  // Both are as many equal pieces as there are parts. Piece i of `in` goes to part i; piece i of `out` is
  // that of part i.
  virtual void all_to_all(Stream& s, const View& in, const View& out) = 0;
};

// A call of a ContextExchange, for plans. `count`: elements that go to each part that is sent to.
struct ContextCall {
  enum class Kind { kPass, kAllToAll };
  Kind kind = Kind::kPass;
  std::int64_t count = 0;
  DType dtype = DType::kF32;
};

}  // namespace zg
