// How an optimizer's state lies in memory: for a number of elements, one block of bytes with all that the
// optimizer keeps of them, so that it moves as one and is one transfer on every link.
//
//   [master][moment 0][moment 1][scales 0][scales 1]
//
// in the format's types (StateFormat). Parts begin at multiples of 64 bytes, kStagger bytes apart from each
// other's end: arrays that begin at the same offset of a page share the sets of a cache, and slow each other
// down. All bytes zero is the state before the first step, but for the masters. Pure functions; any thread.
#pragma once
#include <cstdint>

#include "ziggurat/kernels/optimizer_state.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

class StateLayout {
 public:
  static constexpr std::int64_t kStagger = 1088;

  explicit StateLayout(const StateFormat& format) : format_(format) {}
  const StateFormat& format() const { return format_; }

  // Of a block of `elements` elements, a multiple of kQuantBlock.
  std::int64_t bytes(std::int64_t elements) const;
  // The most elements, a multiple of kQuantBlock, whose block has at most so many bytes; at least kQuantBlock.
  std::int64_t elements_within(std::int64_t bytes) const;
  // Bytes per element, without gaps.
  double bytes_per_element() const;

  // Elements [first, first + count) of the block of `elements` elements at `data`; `first` is a multiple of
  // kQuantBlock.
  OptimizerState part(void* data, std::int64_t elements, std::int64_t first, std::int64_t count) const;

 private:
  struct Part {
    std::int64_t numerator = 0, denominator = 1;  // bytes per element
  };
  static constexpr int kParts = 5;
  Part bytes_of(int part) const;
  std::int64_t offset(int part, std::int64_t elements) const;

  StateFormat format_;
};

// The masters of a part in host memory, as floats; `weight` [1, n]: of the same elements (read with kSplit,
// where it holds the other half). Writing sets the weight too, rounded as the kernels round it.
void read_masters(const StateFormat& format, const OptimizerState& state, const View& weight, float* out);
void write_masters(const StateFormat& format, const OptimizerState& state, const View& weight,
                   const float* values);
// Weights that have no state (frozen), rounded in the same way.
void read_weights(const View& weight, float* out);
void write_weights(const View& weight, const float* values);
// Moment 0 or 1 of `count` elements.
void read_moments(const StateFormat& format, const OptimizerState& state, int which, std::int64_t count,
                  float* out);

}  // namespace zg
