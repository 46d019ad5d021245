// The parameters of a model, and which of their elements a tensor-parallel rank holds.
//
// With tensor parallelism each rank holds a shard of every layer: whole rows of some parameters (in several
// bands if the parameter is fused), whole columns of others, and full copies of the rest. The mapping from
// held elements to elements of the whole parameter is a pure value. Initialisation, files and random numbers
// use the whole parameter's elements, so they do not depend on how it is split.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

// kNormalResidual: normal with standard deviation std / sqrt(2 * layers). kUniform: between -1 / sqrt(cols)
// and 1 / sqrt(cols), as PEFT initialises the A of an adapter.
enum class Init { kZero, kOne, kNormal, kNormalResidual, kUniform };

// Expert parallelism: of each layer's E experts, rank `index` of the `degree` ranks of an expert group has
// E / degree consecutive ones, or its tensor shard of each. Each rank of the group computes with rows of its
// own; its experts compute the rows of all.
struct ExpertShard {
  int degree = 1, index = 0;
  std::int64_t count(std::int64_t experts) const { return experts / degree; }
  std::int64_t first(std::int64_t experts) const { return index * count(experts); }
};

// Rank `index` of the `degree` ranks of a tensor-parallel group. `sequence` (sequence parallelism): the norms
// and the residual stream, which lie between the split products, are split by rows: each rank has rows /
// degree consecutive rows. `experts`: which experts it has.
struct TensorShard {
  int degree = 1, index = 0;
  bool sequence = false;
  ExpertShard experts = {};
};

// Consecutive lines of a parameter: rows of a matrix, elements of a vector.
struct Band {
  std::int64_t line = 0;        // the first, in the held tensor
  std::int64_t whole_line = 0;  // the same line in the whole parameter
  std::int64_t lines = 0;
  // Whether this rank counts the lines in the gradient norm and saves them. Of several ranks that hold
  // copies, exactly one does.
  bool counted = true;
};

struct Param {
  std::string name;                 // as in Hugging Face's files, without "transformer.": "h.0.ln_1.weight"
  std::int64_t rows = 1, cols = 0;  // shape of the held tensor: matrices are [out, in], vectors [1, n]
  bool vector = false;
  bool conv1d = false;  // files store it transposed, [in, out] (GPT-2's Conv1D), unless they have codes of it
  bool adapter = false;  // belongs to an adapter, which has files of its own (Lora)
  // A router, or the gate of the MLP that all tokens pass: small, and it decides by small differences. So it
  // is neither cut into tiles nor coded in few bits.
  bool routes = false;
  // Where files store several parameters as one (Phi-3): the name of that tensor, [file_rows, cols], in which
  // this parameter's rows begin at file_row. Empty: files store it as a tensor of its own.
  std::string file_name = {};
  std::int64_t file_row = 0, file_rows = 0;
  // The tensor's rows are divided into so many slices, one for each expert: it has the shape
  // [file_slices, file_rows / file_slices, cols] or, transposed, [file_slices, cols, file_rows /
  // file_slices]. 0: it has two dimensions.
  std::int64_t file_slices = 0;
  std::int64_t offset = 0;  // first element in the unit's flat tensor; multiple of kParamAlign
  Init init = Init::kNormal;
  std::int64_t whole_rows = 1, whole_cols = 0;  // shape of the whole parameter
  std::int64_t first_col = 0;                   // column of the whole matrix at which the held columns begin
  std::vector<Band> bands;                      // ascending; together, all held lines
  // Whether the gradient that a rank computes is a partial sum, to be summed over ranks: the gradient of a
  // norm that has seen only some of the rows, or of a key and value head that serves query heads on several
  // ranks. Otherwise all copies of a parameter get the same gradient.
  bool summed = false;
  // The index of the first element for the random numbers of updates. Copies on several ranks have the same
  // index; different elements have different ones.
  std::int64_t first_number = 0;
  // True where some bands are copies of lines that other ranks hold, too, and others are not. Then each
  // element's index for random numbers is its index in the whole parameter; see for_numbers().
  bool whole_numbers = false;

  std::int64_t count() const { return rows * cols; }
  std::int64_t whole_count() const { return whole_rows * whole_cols; }
  std::int64_t line() const { return vector ? 1 : cols; }  // elements
  const std::string& name_in_files() const { return file_name.empty() ? name : file_name; }
  // Rows and shape of the tensor in files. A vector is a row there, and alone it has one dimension.
  std::int64_t rows_in_files() const { return file_rows > 0 ? file_rows : whole_rows; }
  std::vector<std::int64_t> shape_in_files() const {
    if (vector) return file_rows > 0 ? std::vector{file_rows, whole_cols} : std::vector{whole_cols};
    const std::int64_t slices = std::max<std::int64_t>(1, file_slices), of_slice = rows_in_files() / slices;
    std::vector<std::int64_t> shape;
    if (file_slices > 0) shape.push_back(slices);
    shape.insert(shape.end(), {conv1d ? whole_cols : of_slice, conv1d ? of_slice : whole_cols});
    return shape;
  }
  // Whether this rank holds the whole parameter.
  bool is_whole() const { return count() == whole_count() && bands.size() == 1; }

  // Calls f(first, whole, count) for each run of held elements in [begin, end) that are also consecutive in
  // the whole parameter: `first` is the run's first index in the held tensor, `whole` in the whole parameter.
  template <class F>
  void for_runs(std::int64_t begin, std::int64_t end, const F& f) const {
    const std::int64_t length = line(), whole_length = vector ? 1 : whole_cols;
    for (const Band& band : bands) {
      std::int64_t at = std::max(begin, band.line * length);
      const std::int64_t last = std::min(end, (band.line + band.lines) * length);
      while (at < last) {
        const std::int64_t l = at / length;
        const std::int64_t next = length == whole_length ? last : std::min(last, (l + 1) * length);
        f(at, (band.whole_line + l - band.line) * whole_length + first_col + at % length, next - at);
        at = next;
      }
    }
  }
  // Calls f(first, number, count) for each run of held elements in [begin, end) whose indices for random
  // numbers are consecutive, from `number` on. Elements from count() on, the gap, belong to the last run.
  template <class F>
  void for_numbers(std::int64_t begin, std::int64_t end, const F& f) const {
    if (!whole_numbers) return f(begin, first_number + begin, end - begin);
    for (const Band& band : bands) {
      const std::int64_t first = band.line * line();
      const std::int64_t from = std::max(begin, first);
      const std::int64_t to = &band == &bands.back() ? end : std::min(end, first + band.lines * line());
      if (from < to) f(from, band.whole_line * line() + from - first, to - from);
    }
  }
  // The index of held element `i` in the whole parameter.
  std::int64_t whole_element(std::int64_t i) const {
    std::int64_t element = -1;
    for_runs(i, i + 1, [&](std::int64_t, std::int64_t whole, std::int64_t) { element = whole; });
    ZG_ASSERT_GE(element, 0);
    return element;
  }
};
// Parameters begin at multiples of this many elements, so that a block of quantised state never holds
// elements of two parameters. The gaps between them stay zero.
inline constexpr std::int64_t kParamAlign = kQuantBlock;

// Consecutive elements of a unit that are fetched, gathered, updated and released together: the whole unit
// or, in a unit that is cut into tiles, some rows of one matrix. The first tile of such a unit has everything
// that is not cut: all vectors, matrices whose gradients are summed over ranks (Param::summed), and the
// position table of an embedding. If there are no such parameters, it has the first rows of the first matrix.
// Adapters are a tile of their own, the last one, after their unit's other parameters.
struct Tile {
  std::int64_t first = 0, count = 0;  // include gaps between parameters; first is a multiple of kParamAlign
  std::int32_t param = -1;            // index of the matrix; -1: several parameters
};

struct Unit {
  std::string name;  // "embedding", "block.0", "block.0.experts.0", ..., "head"
  // The layer that the unit belongs to; -1: the embedding and the head belong to none.
  std::int32_t layer = -1;
  // The experts of the layer that the unit holds: expert_count of them, from first_expert on. 0: it holds
  // none, but what all tokens pass.
  std::int32_t first_expert = 0, expert_count = 0;
  bool is_experts() const { return expert_count > 0; }
  // In memory they lie in this order. In a unit in tiles the parameters of the first tile lie first, then the
  // other matrices.
  std::vector<Param> params;
  std::int64_t count = 0;   // elements of the flat tensor, padding included; the same on all ranks
  std::vector<Tile> tiles;  // ascending; together, all elements
  // The choice bias of the layer's router, [1, experts], where the model has them (Experts::choice_bias).
  // No gradient trains it, so it is no parameter: it is always fp32, and not among the unit's elements; its
  // offset is -1.
  std::optional<Param> choice_bias = {};
  // Whether the unit has adapters: they are its last tile, after the tiles of the model's own parameters.
  bool adapted = false;
  // Whether the model's own parameters are cut into several tiles.
  bool in_tiles() const { return tiles.size() > (adapted ? 2 : 1); }
  bool is_adapters(std::size_t tile) const { return adapted && tile + 1 == tiles.size(); }
  // The end of a parameter and of the gap after it, that is the first element of the next parameter.
  std::int64_t end_of(std::size_t param) const;
  // The parameter with that name, or whose name ends in "." and that suffix. Aborts unless there is exactly
  // one.
  const Param& param(const std::string& name_or_suffix) const;
};

}  // namespace zg
