// The adapters of a block (Lora): which there are, and their part of its calls. N = rows of the batch.
//
//   forward   low = factor * (drop(x) A^T);  y += low B^T
//   backward  d_low = factor * (dy B);  dB = dy^T low;  dA = d_low^T drop(x);  dx += drop'(d_low A)
//
// They are added to what the block's own products have given, whose bits stay as they are while B is zero.
//
// A part of a model whose modules have some of the outputs has the same rows of B, and all of A: then `low`
// is alike on all parts, and the gradient of A is the sum of the parts'. Where modules have some of the
// inputs, it has the same columns of A, and all of B: `low` is a part of the sum, low B^T is summed with the
// module's own product, and the gradient of B is the sum of the parts'. So passes exchange nothing for
// adapters but the rows that the gradients of A need where these are split; the sums are made once a step
// (Param::summed).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "model/call.hpp"

namespace zg::model {

// The products of a block that have one input each.
enum class AdapterInput : std::uint8_t { kQkv, kO, kGateUp, kDown };
inline constexpr int kAdapterInputs = 4;
// Whether parts have some of the module's inputs, rather than some of its outputs.
constexpr bool is_split_by_inputs(AdapterInput input) {
  return input == AdapterInput::kO || input == AdapterInput::kDown;
}

struct Adapter {
  LoraModule module = LoraModule::kQ;
  AdapterInput input = AdapterInput::kQkv;
  const char* path = "";         // of its module within the layer, in names of parameters
  std::int64_t in = 0, out = 0;  // of the module's matrix
  std::int64_t column = 0;       // of the output, among those of the products with the same input
};

// The modules that a block has, in the order in which they compute; and those of them that have an adapter.
class AdapterList {
 public:
  enum class Which { kAll, kAdapted };
  // config: the sizes of the whole model, or of a part.
  explicit AdapterList(const ModelConfig& config, Which which = Which::kAdapted);
  // The overload for a temporary list is deleted, since its span would outlive it, as in a range-based for
  // loop.
  std::span<const Adapter> all() const& { return {adapters_.data(), count_}; }
  std::span<const Adapter> all() const&& = delete;
  std::size_t count() const { return count_; }
  bool has(AdapterInput input) const;

 private:
  std::array<Adapter, 7> adapters_{};
  std::size_t count_ = 0;
};

// What a forward saves for the backward: each adapter's `low`, T [N, rank]; and what the first half of a
// backward saves for the second: the gradients of these, in the same form.
struct AdapterSaved {
  std::array<View, 7> low{}, d_low{};
  AdapterSaved() = default;
  AdapterSaved(BufferPlan& plan, const ModelConfig& config, DType t, BatchShape shape, Backward how);
};

struct AdapterWorkspace {
  std::array<View, 3> d_low{};  // T [N, rank], of adapters with one input
  View dropped;                 // T [N, widest input], where inputs are dropped
  AdapterWorkspace() = default;
  AdapterWorkspace(BufferPlan& plan, const ModelConfig& config, DType t, BatchShape shape);
};

// The adapters of the block that a call computes.
class Adapters {
 public:
  Adapters(const Call& call, const AdapterSaved& saved, const AdapterWorkspace& workspace)
      : call_(call), saved_(saved), workspace_(workspace), list_(call.config) {}

  bool any(AdapterInput input) const { return list_.has(input); }
  // y += low B^T for the modules with this input; a null y: only what the backward needs.
  void forward(AdapterInput input, const View& x, const View& y) const;
  // dx += the gradient of the input, by that of all modules' outputs; and then, which may be in the second
  // half of a backward, writes, or adds to, the gradients of A and B.
  void backward_input(AdapterInput input, const View& dy, const View& dx) const;
  void backward_weight(AdapterInput input, const View& dy, const View& x) const;
  // Zeroes the gaps between gradients that are overwritten, and what else they held.
  void begin_backward() const;

 private:
  const Param& param(std::size_t adapter, std::size_t which) const;
  View weight(std::size_t adapter, std::size_t which) const;
  View grad(std::size_t adapter, std::size_t which) const;
  // The gradient of `low`, of the adapter that is number `place` among those with its input.
  const View& d_low(std::size_t adapter, std::size_t place) const;
  template <class F>
  void for_each(AdapterInput input, const F& f) const;  // f(adapter, its number, its place)
  bool drops() const { return call_.dropout != nullptr && call_.config.lora.dropout > 0; }
  void drop(const Adapter& adapter, const View& x, const View& y) const;
  // The input of A: x, or in the workspace what is left of it.
  View input_of(const Adapter& adapter, const View& x) const;

  const Call& call_;
  const AdapterSaved& saved_;
  const AdapterWorkspace& workspace_;
  const AdapterList list_;
};

}  // namespace zg::model
