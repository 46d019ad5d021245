// Rows of a table by token, and their gradients.
#include <cstring>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/spans.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::host {
namespace {

// The gradient is cut into tiles of kColumns columns by one of kShares shares of the ids; each tile walks all
// tokens in order, so that equal ids are added in order and no two tiles write the same element.
constexpr std::int64_t kColumns = 256;
constexpr std::int64_t kShares = 8;

template <class T>
void add_row(std::int64_t n, const T* from, Acc<T>* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += static_cast<Acc<T>>(from[i]);
}

template <class T>
void backward_by_id(Extent extent, const EmbeddingBackward<T>& args) {
  const std::int64_t pieces = (extent.cols + kColumns - 1) / kColumns;
  parallel_for(pieces * kShares, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t c = t % pieces * kColumns, share = t / pieces;
      const std::int64_t n = std::min(kColumns, extent.cols - c);
      for (std::int64_t r = 0; r < extent.rows; ++r) {
        if (args.ids[r] % kShares == share)
          add_row<T>(n, args.dout.row(r) + c, args.dwte.row(args.ids[r]) + c);
      }
    }
  });
}

template <class T>
void backward_by_position(Extent extent, const EmbeddingBackward<T>& args) {
  const std::int64_t positions = std::min(args.time, extent.rows);
  parallel_for(positions, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      for (std::int64_t r = p; r < extent.rows; r += args.time) {
        add_row<T>(extent.cols, args.dout.row(r), args.dwpe.row(p));
      }
    }
  });
}

void check_ids(std::int64_t tokens, const std::int32_t* ids, std::int64_t vocabulary) {
  for (std::int64_t r = 0; r < tokens; ++r) {
    ZG_ASSERT(ids[r] >= 0 && ids[r] < vocabulary, "token {} has id {}, vocabulary {}", r, ids[r], vocabulary);
  }
}

}  // namespace

template <class T>
void embedding(Extent extent, const Embedding<T>& args) {
  check_ids(extent.rows, args.ids, args.vocabulary);
  if (args.wpe.data != nullptr) ZG_ASSERT_LE(std::min(args.time, extent.rows), args.positions);
  parallel_for(extent.rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* token = args.wte.row(args.ids[r]);
      T* out = args.out.row(r);
      if (args.wpe.data == nullptr) {
        std::memcpy(out, token, static_cast<std::size_t>(extent.cols) * sizeof(T));
        continue;
      }
      const T* position = args.wpe.row(r % args.time);
      for (std::int64_t c = 0; c < extent.cols; ++c) {
        out[c] = static_cast<T>(static_cast<Acc<T>>(token[c]) + static_cast<Acc<T>>(position[c]));
      }
    }
  });
}

template <class T>
void embedding_backward(Extent extent, const EmbeddingBackward<T>& args) {
  check_ids(extent.rows, args.ids, args.vocabulary);
  if (args.dwte.data != nullptr) backward_by_id(extent, args);
  if (args.dwpe.data != nullptr) {
    ZG_ASSERT_LE(std::min(args.time, extent.rows), args.positions);
    backward_by_position(extent, args);
  }
}

#define ZG_INSTANTIATE(T)                               \
  template void embedding(Extent, const Embedding<T>&); \
  template void embedding_backward(Extent, const EmbeddingBackward<T>&);
ZG_INSTANTIATE(float)
ZG_INSTANTIATE(bf16)
ZG_INSTANTIATE(double)
#undef ZG_INSTANTIATE

}  // namespace zg::host
