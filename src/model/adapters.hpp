// The adapters of a block (Lora): the list of them, and their share of the block's calls. N = rows of the
// batch.
//
//   forward   low = factor * (drop(x) A^T);  y += low B^T
//   backward  d_low = factor * (dy B);  dB = dy^T low;  dA = d_low^T drop(x);  dx += drop'(d_low A)
//
// They are added to the outputs of the block's own products, whose bits do not change while B is zero.
//
// With tensor parallelism a module is split by its outputs or by its inputs. Split by outputs: a rank has the
// same rows of B, and all of A. Then `low` is equal on all ranks, and the gradient of A is the sum of the
// ranks' gradients. Split by inputs: a rank has the same columns of A, and all of B. Then `low` is a partial
// sum, low B^T is summed over ranks together with the module's own product, and the gradient of B is the sum
// of the ranks' gradients. So passes exchange nothing extra for adapters, except the rows that the gradients
// of A need where rows are split (TensorShard::sequence). The gradients are summed over ranks once a step
// (Param::summed).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/call.hpp"

namespace zg::model {

// The inputs of a block's products. Products with the same input share one value.
enum class AdapterInput : std::uint8_t { kQkv, kO, kGateUp, kDown, kQueryLatent, kKvLatent };
// Whether tensor-parallel ranks split the module by its inputs, rather than by its outputs.
constexpr bool is_split_by_inputs(AdapterInput input) {
  return input == AdapterInput::kO || input == AdapterInput::kDown;
}

struct Adapter {
  LoraModule module = LoraModule::kQ;
  AdapterInput input = AdapterInput::kQkv;
  // The path of its module within the layer, or within an expert, as in parameter names: parent.name, or name
  // alone where the parent is empty.
  const char *parent = "", *name = "";
  std::int64_t in = 0, out = 0;  // sizes of the module's matrix
  std::int64_t column = 0;       // first output column, in the joint output of products with the same input

  std::string path() const { return *parent == '\0' ? name : std::string(parent) + "." + name; }
};

// The modules of a layer, in the order in which a forward uses them: all, or only those with an adapter.
class AdapterList {
 public:
  enum class Which { kAll, kAdapted };
  // The modules of a layer's block: of the MLP that all tokens pass, if the layer has experts. config: the
  // sizes of the whole model, or of a tensor shard.
  AdapterList(const ModelConfig& config, std::int64_t layer, Which which = Which::kAdapted);
  // The modules of one expert. kAll: as modules, and as parameters of all experts.
  static AdapterList of_expert(const ModelConfig& config, Which which = Which::kAdapted);
  // The overload for a temporary list is deleted, since its span would outlive it, as in a range-based for
  // loop.
  std::span<const Adapter> all() const& { return {adapters_.data(), count_}; }
  std::span<const Adapter> all() const&& = delete;
  std::size_t count() const { return count_; }
  bool has(AdapterInput input) const;

 private:
  AdapterList() = default;

  std::array<Adapter, 8> adapters_{};
  std::size_t count_ = 0;
};

// A module of a model's layers, and its path within a layer, where * stands for an expert's number.
struct ModulePath {
  LoraModule module;
  std::string path;
};
// The modules of all layers, each once; and the parameters that hold all experts of a layer, as transformers
// names them.
std::vector<ModulePath> module_paths(const ModelConfig& model, ExpertsAs experts);
std::vector<ModulePath> parameter_paths(const ModelConfig& model);

// Buffers that a forward saves for the backward: each adapter's `low`, T [N, rank]. The first half of a
// backward saves d_low, the gradients of `low`, for the second half, with the same shapes.
struct AdapterSaved {
  std::array<View, 8> low{}, d_low{};
  AdapterSaved() = default;
  AdapterSaved(BufferPlan& plan, const AdapterList& list, const Lora& lora, DType t, std::int64_t rows,
               Backward how);
};

struct AdapterWorkspace {
  std::array<View, 3> d_low{};  // T [N, rank], one for each adapter with the same input
  View dropped;  // [N, widest input], where inputs are dropped; as wide as the gradients of inputs, T or A
  AdapterWorkspace() = default;
  AdapterWorkspace(BufferPlan& plan, const AdapterList& list, const Lora& lora, DType t, DType gradient,
                   std::int64_t rows);
};

// The adapters of the block that a call computes, or of one of a call's experts.
class Adapters {
 public:
  Adapters(const Call& call, const AdapterSaved& saved, const AdapterWorkspace& workspace)
      : call_(call),
        saved_(saved),
        workspace_(workspace),
        list_(call.config, call.unit.layer),
        first_(call.unit.params.size() - 2 * list_.count()) {}
  // The adapters of expert number `expert` of the layer, whose routed rows have the slots `order`. `saved`
  // has as many rows; `workspace` may have more.
  Adapters(const Call& call, const AdapterSaved& saved, const AdapterWorkspace& workspace,
           std::int64_t expert, const View& order);

  bool any(AdapterInput input) const { return list_.has(input); }
  // y += low B^T for the modules with this input. With a null y it computes only `low`, for the backward.
  void forward(AdapterInput input, const View& x, const View& y) const;
  // backward_input(): dx += the gradient of the modules' input; dy is the gradient of their outputs.
  // backward_weight(), called afterwards and perhaps in the second half of a backward, writes or adds to the
  // gradients of A and B.
  void backward_input(AdapterInput input, const View& dy, const View& dx) const;
  void backward_weight(AdapterInput input, const View& dy, const View& x) const;
  // Zeroes the adapters' gradients, gaps included, if they are to be overwritten.
  void begin_backward() const;

 private:
  const Param& param(std::size_t adapter, std::size_t which) const;
  View weight(std::size_t adapter, std::size_t which) const;
  View grad(std::size_t adapter, std::size_t which) const;
  // The gradient of an adapter's `low`. place: the adapter's number among the adapters with its input.
  View d_low(std::size_t adapter, std::size_t place, std::int64_t rows) const;
  template <class F>
  void for_each(AdapterInput input, const F& f) const;  // f(adapter, its number, its place)
  bool drops() const { return call_.dropout != nullptr && call_.config.lora.dropout > 0; }
  void drop(const Adapter& adapter, const View& x, const View& y) const;
  // The input of A: x or, with dropout, the dropped x in the workspace.
  View input_of(const Adapter& adapter, const View& x) const;

  const Call& call_;
  const AdapterSaved& saved_;
  const AdapterWorkspace& workspace_;
  const AdapterList list_;
  const std::size_t first_;  // index in the unit of the first A
  // Of an expert: its number in the layer, and the slots of its rows.
  const std::int64_t expert_ = -1;
  const View order_ = {};
};

}  // namespace zg::model
