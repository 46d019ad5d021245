// Embedding: rows of a table by token id, and the table's gradient.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/embedding.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <cstring>
#include <vector>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/for_each_type.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/spans.hpp"
#include "ziggurat/base/error.hpp"

#ifndef ZG_EMBEDDING_KERNELS
#define ZG_EMBEDDING_KERNELS
namespace zg::host {
// The kernels of one instruction set, each over n consecutive elements.
template <class T>
struct EmbeddingKernels {
  void (*add)(std::int64_t n, const T* token, const T* position, T* out);
  void (*accumulate)(std::int64_t n, const T* from, Acc<T>* to);
};
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

template <class T>
void add(std::int64_t n, const T* token, const T* position, T* out) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    save(d, hn::Add(load(d, token + i, w), load(d, position + i, w)), out + i, w);
  });
}

template <class T>
void accumulate(std::int64_t n, const T* from, Acc<T>* to) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    save(d, hn::Add(load(d, static_cast<const Acc<T>*>(to) + i, w), load(d, from + i, w)), to + i, w);
  });
}

template <class T>
EmbeddingKernels<T> embeddings_of() {
  return {add<T>, accumulate<T>};
}
ForEachType<EmbeddingKernels> embeddings() {
  return {embeddings_of<float>(), embeddings_of<bf16>(), embeddings_of<fp16>(), embeddings_of<double>()};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(embeddings);

template <class T>
EmbeddingKernels<T> kernels() {
  return std::get<EmbeddingKernels<T>>(HWY_DYNAMIC_DISPATCH(embeddings)());
}

// The table's gradient is split into tiles: kColumns columns of the ids that are equal modulo kShares. Each
// tile iterates over all tokens in order, so that rows of the same id are added in order, and no two tiles
// write the same element.
constexpr std::int64_t kColumns = 256;
constexpr std::int64_t kShares = 8;

template <class T>
void backward_by_id(Extent extent, const EmbeddingBackward<T>& args) {
  const auto k = kernels<T>();
  const std::int64_t pieces = (extent.cols + kColumns - 1) / kColumns;
  parallel_for(pieces * kShares, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t c = t % pieces * kColumns, share = t / pieces;
      const std::int64_t n = std::min(kColumns, extent.cols - c);
      for (std::int64_t r = 0; r < extent.rows; ++r) {
        const std::int64_t id = args.ids[r] - args.part.first;
        if (id >= 0 && id < args.vocabulary && id % kShares == share)
          k.accumulate(n, args.dout.row(r) + c, args.dwte.row(id) + c);
      }
    }
  });
}

// The position table's gradient with documents: the rows are sorted by position, and the rows of each
// position are added in order.
template <class T>
void backward_by_place(Extent extent, const EmbeddingBackward<T>& args) {
  const auto k = kernels<T>();
  std::vector<std::int64_t> ends(static_cast<std::size_t>(args.positions) + 1), rows;
  const auto place = [&](std::int64_t r) {
    return static_cast<std::size_t>(position_of(args.rows, args.first_keys, r));
  };
  for (std::int64_t r = 0; r < extent.rows; ++r) ++ends[place(r) + 1];
  for (std::size_t p = 1; p < ends.size(); ++p) ends[p] += ends[p - 1];
  rows.resize(static_cast<std::size_t>(extent.rows));
  // A counting sort: ends[p] is the index at which the next row of position p goes and, after the loop, the
  // end of position p's rows.
  for (std::int64_t r = 0; r < extent.rows; ++r) rows[static_cast<std::size_t>(ends[place(r)]++)] = r;
  parallel_for(args.positions, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      const std::int64_t first = p == 0 ? 0 : ends[static_cast<std::size_t>(p - 1)];
      for (std::int64_t i = first; i < ends[static_cast<std::size_t>(p)]; ++i)
        k.accumulate(extent.cols, args.dout.row(rows[static_cast<std::size_t>(i)]), args.dwpe.row(p));
    }
  });
}

template <class T>
void backward_by_position(Extent extent, const EmbeddingBackward<T>& args) {
  const auto k = kernels<T>();
  if (args.first_keys != nullptr) return backward_by_place(extent, args);
  const std::int64_t positions = std::min(args.rows.time, extent.rows);
  parallel_for(positions, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      for (std::int64_t r = p; r < extent.rows; r += args.rows.time) {
        k.accumulate(extent.cols, args.dout.row(r), args.dwpe.row(args.rows.of(p)));
      }
    }
  });
}

// Checks that all positions are below args.positions.
template <class Args>
void check_positions(std::int64_t tokens, const Args& args) {
  if (args.first_keys == nullptr) {
    ZG_ASSERT_LE(args.rows.end(tokens), args.positions);
    return;
  }
  for (std::int64_t r = 0; r < tokens; ++r) {
    const std::int64_t position = position_of(args.rows, args.first_keys, r);
    ZG_ASSERT(position >= 0 && position < args.positions, "token {} is at position {} of its document, of {}",
              r, position, args.positions);
  }
}

void check_ids(std::int64_t tokens, const std::int32_t* ids, std::int64_t rows, const VocabShard& part) {
  const std::int64_t vocabulary = part.whole > 0 ? part.whole : rows;
  for (std::int64_t r = 0; r < tokens; ++r) {
    ZG_ASSERT(ids[r] >= 0 && ids[r] < vocabulary, "token {} has id {}, vocabulary {}", r, ids[r], vocabulary);
  }
}

}  // namespace

template <class T>
void embedding(Extent extent, const Embedding<T>& args) {
  check_ids(extent.rows, args.ids, args.vocabulary, args.part);
  if (args.wpe.data != nullptr) check_positions(extent.rows, args);
  const auto k = kernels<T>();
  const std::vector<T> zeros(args.part.whole > 0 ? static_cast<std::size_t>(extent.cols) : 0);
  parallel_for(extent.rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t id = args.ids[r] - args.part.first;
      const bool is_here = id >= 0 && id < args.vocabulary;
      if (args.part.only && !is_here) continue;
      const T* token = is_here ? args.wte.row(id) : zeros.data();
      T* out = args.out.row(r);
      if (args.wpe.data == nullptr) {
        std::memcpy(out, token, static_cast<std::size_t>(extent.cols) * sizeof(T));
        continue;
      }
      k.add(extent.cols, token, args.wpe.row(position_of(args.rows, args.first_keys, r)), out);
    }
  });
}

template <class T>
void embedding_backward(Extent extent, const EmbeddingBackward<T>& args) {
  check_ids(extent.rows, args.ids, args.vocabulary, args.part);
  if (args.dwte.data != nullptr) backward_by_id(extent, args);
  if (args.dwpe.data != nullptr) {
    check_positions(extent.rows, args);
    backward_by_position(extent, args);
  }
}

#define ZG_INSTANTIATE(T)                               \
  template void embedding(Extent, const Embedding<T>&); \
  template void embedding_backward(Extent, const EmbeddingBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
