// A decided move or use of one segment, waiting for its turn in the segment's queue. See store.hpp.
#pragma once
#include <cstdint>
#include <deque>

#include "ziggurat/store/store.hpp"

namespace zg {

struct Node {
  enum class State : std::uint8_t { kPending, kRunning, kDone };
  Action action;
  State state = State::kPending;
  bool taken = false;  // kUse: an acquire has claimed it
  bool leased = false;
  Stream* consumer = nullptr;   // kUse: the stream that will use the bytes
  Stream* passed_to = nullptr;  // kUse: released, once this stream gets there
  std::uint64_t sequence = 0;   // order of decision
  Clock::time_point begin{};
};

struct TensorStore::SegmentState {
  std::deque<Node> queue;  // in order of decision; done ones leave from the front
  void* memory[2] = {nullptr, nullptr};
  io::ExtentId extent;  // of the NVMe copy
};

}  // namespace zg
