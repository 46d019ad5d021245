// The parameters of a model, and which elements of them a part of the model holds.
//
// With tensor parallelism several ranks have a part of every layer each. A part holds whole rows of some
// parameters (of fused ones in several bands), whole columns of others, and all of the rest. Where its
// elements lie in the whole parameter is a pure value, so that initialisation, files and random numbers go by
// the whole parameter's elements, however it is split.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

// residual: std / sqrt(2 * layers); uniform: between -1 and 1 / sqrt(cols), as PEFT begins the A of an
// adapter.
enum class Init { kZero, kOne, kNormal, kNormalResidual, kUniform };

// Part number `part` of a model that `parts` ranks compute together. `sequence`: what lies between the split
// products (norms, the residual stream) is split, too, by rows: each part has rows / parts neighbouring ones.
struct TensorShard {
  int degree = 1, index = 0;
  bool sequence = false;
};

// Consecutive lines of a parameter: rows of a matrix, elements of a vector.
struct Band {
  std::int64_t line = 0;        // the first, as held
  std::int64_t whole_line = 0;  // the same line of the whole parameter
  std::int64_t lines = 0;
  // Whether this part counts the lines for the norm and saves them; one of several that hold them does.
  bool counted = true;
};

struct Param {
  std::string name;                 // as in Hugging Face's files, without "transformer.": "h.0.ln_1.weight"
  std::int64_t rows = 1, cols = 0;  // as held here: matrices are [out, in], vectors are [1, n]
  bool vector = false;
  bool conv1d = false;   // files hold it transposed, [in, out] (GPT-2's Conv1D)
  bool adapter = false;  // of an adapter, which files of its own hold (Lora)
  // Files hold several matrices as one of this name, [file_rows, cols], in which this one's rows begin at
  // file_row (Phi-3). Empty: it is a tensor of its own.
  std::string file_name = {};
  std::int64_t file_row = 0, file_rows = 0;
  std::int64_t offset = 0;  // first element in the unit's flat tensor; multiple of kParamAlign
  Init init = Init::kNormal;
  std::int64_t whole_rows = 1, whole_cols = 0;  // of the whole parameter
  std::int64_t first_col = 0;                   // column of the whole matrix at which those here begin
  std::vector<Band> bands;                      // ascending, and all that is held
  // Whether the gradient that a part computes is a part of the sum: that of a norm which has seen a part of
  // the rows, or of a key and value head that serves query heads of several parts. Other copies are alike.
  bool summed = false;
  // Number of the first element for the random numbers of updates: copies have the same, others differ.
  std::int64_t first_number = 0;
  // Where a part's bands have copies beside others' lines, each element has the number that it has in the
  // whole parameter; see for_numbers().
  bool whole_numbers = false;

  std::int64_t count() const { return rows * cols; }
  std::int64_t whole_count() const { return whole_rows * whole_cols; }
  std::int64_t line() const { return vector ? 1 : cols; }  // elements
  const std::string& name_in_files() const { return file_name.empty() ? name : file_name; }
  // Whether the part holds the whole parameter.
  bool is_whole() const { return count() == whole_count() && bands.size() == 1; }

  // Calls f(first, whole, count) for each run of the held elements [begin, end) whose elements are neighbours
  // in the whole parameter, too: `first` as held, `whole` in the whole parameter.
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
  // Calls f(first, number, count) for each run of the held elements [begin, end) whose numbers follow each
  // other. Elements from count() on, the gap, belong to the last run.
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
  // The element of the whole parameter that held element `i` is.
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

// Neighbouring elements of a unit that are fetched, gathered, updated and released together: all of them or,
// of a unit in tiles, some rows of one of its matrices. The first tile then has what is not cut: all vectors,
// those matrices of which several parts have copies (Param::summed), and the positions beside a table; where
// there is nothing of the kind, it has the first rows of the first matrix. Adapters are a tile of their own,
// the last one, behind their unit's other parameters.
struct Tile {
  std::int64_t first = 0, count = 0;  // with the gaps between parameters; begins at a multiple of kParamAlign
  std::int32_t param = -1;            // index of the matrix; -1: several parameters
};

struct Unit {
  std::string name;  // "embedding", "block.0", ..., "head"
  // They lie in this order; of a unit in tiles what the first tile has, and behind that the other matrices.
  std::vector<Param> params;
  std::int64_t count = 0;   // elements of the flat tensor, padding included; the same for all parts
  std::vector<Tile> tiles;  // ascending, and all elements
  // The unit has adapters: its last tile, behind the model's own parameters in those before.
  bool adapted = false;
  // Whether the model's own parameters are in several tiles.
  bool in_tiles() const { return tiles.size() > (adapted ? 2 : 1); }
  bool is_adapters(std::size_t tile) const { return adapted && tile + 1 == tiles.size(); }
  // The first element behind a parameter and the gap after it.
  std::int64_t end_of(std::size_t param) const;
  // The parameter of that name, or whose name ends in "." and that suffix. Aborts unless there is exactly
  // one.
  const Param& param(const std::string& name_or_suffix) const;
};

}  // namespace zg
