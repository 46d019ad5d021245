// The layout of an optimizer's state in memory. The whole state of a range of elements is one block of bytes,
// so that it moves as one transfer on every link:
//
//   [master][moment 0][moment 1][scales 0][scales 1]
//
// in the types of StateFormat; arrays that the format lacks are left out. Each array begins at a multiple of
// 64 bytes, with a gap of kStagger bytes after the one before it: arrays that begin at the same offset within
// a page compete for the same sets of a cache, and slow each other down. Before the first step all bytes
// except the masters are zero. Pure functions; any thread.
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

  // Bytes of a block. `elements` is a multiple of kQuantBlock.
  std::int64_t bytes(std::int64_t elements) const;
  // The largest multiple of kQuantBlock elements whose block fits into `bytes`; at least kQuantBlock, whether
  // that fits or not.
  std::int64_t elements_within(std::int64_t bytes) const;
  // Bytes per element, without gaps.
  double bytes_per_element() const;

  // Views of elements [first, first + count) in the block of `elements` elements at `data`. `first` is a
  // multiple of kQuantBlock.
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

// Read the master weights in `state`, which lies in host memory, into fp32 `out` [n], or write them from
// `values` [n]. `weight` [1, n] holds the weights of the same elements: with kSplit they are the other half
// of the masters, so reading needs them. Writing also sets the weights, rounded as the kernels round them.
void read_masters(const StateFormat& format, const OptimizerState& state, const View& weight, float* out);
void write_masters(const StateFormat& format, const OptimizerState& state, const View& weight,
                   const float* values);
// The same for frozen weights [1, n], which have no optimizer state.
void read_weights(const View& weight, float* out);
void write_weights(const View& weight, const float* values);
// Writes weights in kFp8Weights from their fp32 masters [1, n].
void encode_weights(const View& master, const View& codes, const View& scales);
// Moment `which` (0 or 1) of the first `count` elements, decoded to fp32 `out` [count].
void read_moments(const StateFormat& format, const OptimizerState& state, int which, std::int64_t count,
                  float* out);

}  // namespace zg
