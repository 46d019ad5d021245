// Products of a block that share their input. A Stack refers to its call and owns nothing; it lives within
// the call.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "model/call.hpp"
#include "model/units.hpp"

namespace zg::model {

// Matrices with the same input whose outputs lie side by side in one buffer (q|k|v, gate|up). Matrices that
// follow each other in the unit without padding, and whose biases do, too, are treated as one matrix: fewer
// and larger products. This is so at all usual sizes. In a unit in tiles each matrix is multiplied by itself.
class Stack {
 public:
  // bias: index of the first matrix's bias; kNone: the matrices have none. partials: scratch for the biases'
  // gradients.
  Stack(const Call& call, std::size_t first, std::size_t last, std::size_t bias = BlockParams::kNone,
        const View& partials = {})
      : call_(call), partials_(partials), has_bias_(bias != BlockParams::kNone) {
    std::int64_t end = -1, bias_end = -1;
    for (std::size_t i = first; i <= last; ++i) {
      const Param& p = call.unit.params[i];
      const std::int64_t bias_at = has_bias_ ? call.unit.params[bias + i - first].offset : bias_end;
      if (count_ > 0 && p.offset == end && bias_at == bias_end && call.tiles == nullptr) {
        pieces_[count_ - 1].rows += p.rows;
      } else {
        pieces_[count_++] = {i, p.offset, columns_, p.rows, p.cols, bias_at};
      }
      end = p.offset + p.count();
      if (has_bias_) bias_end = bias_at + p.rows;
      columns_ += p.rows;
    }
  }
  void forward(const View& x, const View& y) const {
    for (std::size_t i = 0; i < count_; ++i) {
      const Piece& piece = pieces_[i];
      if (call_.tiles != nullptr) {
        call_.linear(x, piece.param, bias_of(piece, call_.weights), piece.part(y));
      } else {
        call_.linear(x, piece.of(call_.weights), bias_of(piece, call_.weights), piece.part(y));
      }
    }
  }
  // dx = the sum of dy w over the matrices or, by `how`, dx +=.
  void backward_input(const View& dy, const View& dx, Gradients how = Gradients::kOverwrite) const {
    for (std::size_t i = 0; i < count_; ++i) backward_input(i, dy, dx, i == 0 ? how : Gradients::kAdd);
  }
  // Writes the gradients of the weights.
  void backward_weight(const View& dy, const View& x) const {
    for (std::size_t i = 0; i < count_; ++i) backward_weight(i, dy, x);
  }

 private:
  void backward_input(std::size_t i, const View& dy, const View& dx, Gradients how) const {
    const View d = pieces_[i].part(dy);
    if (call_.tiles != nullptr) {
      call_.linear_dx(d, pieces_[i].param, dx, how);
    } else if (how == Gradients::kOverwrite) {
      call_.linear_dx(d, pieces_[i].of(call_.weights), dx);
    } else {
      call_.linear_dx_more(d, pieces_[i].of(call_.weights), dx);
    }
  }
  void backward_weight(std::size_t i, const View& dy, const View& x) const {
    const Piece& piece = pieces_[i];
    const View d = piece.part(dy), db = bias_of(piece, call_.grads);
    if (call_.tiles != nullptr) {
      db ? call_.linear_dw_db(d, x, piece.param, db, partials_) : call_.linear_dw(d, x, piece.param);
    } else {
      const View dw = piece.of(call_.grads);
      db ? call_.linear_dw_db(d, x, dw, db, partials_) : call_.linear_dw(d, x, dw);
    }
  }

  struct Piece {
    std::size_t param = 0;    // index of the matrix; of the first one if several
    std::int64_t offset = 0;  // first element in the unit
    std::int64_t column = 0;  // first column of the output
    std::int64_t rows = 0, cols = 0;
    std::int64_t bias = 0;  // first element of its biases in the unit
    View of(const View& flat) const {
      return {flat.col_range(offset, rows * cols).data, flat.dtype, rows, cols};
    }
    View part(const View& y) const { return y.col_range(column, rows); }
  };
  View bias_of(const Piece& piece, const View& flat) const {
    return has_bias_ ? flat.col_range(piece.bias, piece.rows) : View{};
  }

  const Call& call_;
  const View partials_;
  const bool has_bias_;
  std::array<Piece, 3> pieces_{};
  std::size_t count_ = 0;
  std::int64_t columns_ = 0;
};

}  // namespace zg::model
