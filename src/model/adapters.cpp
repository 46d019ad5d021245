#include "model/adapters.hpp"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "model/families/family.hpp"
#include "model/units.hpp"

namespace zg {

const char* name_of(LoraModule module) {
  static constexpr const char* kNames[kLoraModules] = {
      "q_proj",       "k_proj",    "v_proj", "qkv_proj",    "o_proj", "gate_proj", "up_proj",
      "gate_up_proj", "down_proj", "c_attn", "attn.c_proj", "c_fc",   "mlp.c_proj"};
  return kNames[static_cast<std::size_t>(module)];
}

std::vector<LoraModule> lora_modules(const ModelConfig& model) {
  std::vector<LoraModule> modules;
  const model::AdapterList list(model, model::AdapterList::Which::kAll);
  for (const model::Adapter& one : list.all()) modules.push_back(one.module);
  return modules;
}

std::uint32_t match_modules(const ModelConfig& model, const std::string& pattern) {
  std::uint32_t bits = 0;
  for (const LoraModule module : lora_modules(model)) {
    const std::string name = name_of(module), last = name.substr(name.find('.') + 1);
    const auto matches = [&](const std::string& text) {
      return fnmatch(pattern.c_str(), text.c_str(), 0) == 0;
    };
    if (pattern == "all-linear" || matches(name) || matches(last)) bits |= 1u << static_cast<int>(module);
  }
  return bits;
}

std::string shape_of(const Lora& lora) {
  if (!lora.on()) return "none";
  std::vector<LoraModule> modules;
  for (int m = 0; m < kLoraModules; ++m) {
    if (lora.has(static_cast<LoraModule>(m))) modules.push_back(static_cast<LoraModule>(m));
  }
  return fmt::format("rank {}, of {}", lora.rank, names_of(modules));
}

std::string arithmetic_of(const Lora& lora) {
  if (!lora.on()) return "none";
  return fmt::format("alpha {}{}, dropout {}", lora.alpha, lora.rslora ? " (rslora)" : "", lora.dropout);
}

namespace {

// The rest of a text that is taken piece by piece.
class Taken {
 public:
  explicit Taken(std::string_view text) : text_(text) {}
  bool empty() const { return text_.empty(); }
  bool take(std::string_view what) {
    if (text_.substr(0, what.size()) != what) return false;
    text_.remove_prefix(what.size());
    return true;
  }
  template <class T>
  bool number(T& out) {
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), out);
    text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
    return error == std::errc();
  }

 private:
  std::string_view text_;
};

}  // namespace

std::optional<Lora> parse_lora(const std::string& shape, const std::string& arithmetic) {
  Lora lora;
  Taken first(shape), second(arithmetic);
  if (!first.take("rank ") || !first.number(lora.rank) || !first.take(", of ")) return {};
  while (!first.empty()) {
    const std::uint32_t before = lora.modules;
    for (int m = 0; m < kLoraModules && lora.modules == before; ++m) {
      if (first.take(name_of(static_cast<LoraModule>(m)))) lora.modules |= 1u << m;
    }
    if (lora.modules == before || !(first.empty() || first.take(", ") || first.take(" and "))) return {};
  }
  if (!second.take("alpha ") || !second.number(lora.alpha)) return {};
  lora.rslora = second.take(" (rslora)");
  if (!second.take(", dropout ") || !second.number(lora.dropout) || !second.empty()) return {};
  return lora;
}

std::string names_of(const std::vector<LoraModule>& modules) {
  std::string text;
  for (const LoraModule& module : modules) {
    if (!text.empty()) text += &module == &modules.back() ? " and " : ", ";
    text += name_of(module);
  }
  return text;
}

namespace model {

AdapterList::AdapterList(const ModelConfig& c, Which which) {
  const std::int64_t q = c.heads * c.head_size, kv = c.kv_heads * c.head_size;
  const FamilyForm& form = c.form();
  const BlockNames& names = family_of(c.arch).files.block;
  const auto add = [&](const MatrixName& of, AdapterInput input, std::int64_t in, std::int64_t out,
                       std::int64_t column = 0) {
    if (which == Which::kAll || c.lora.has(of.module))
      adapters_[count_++] = {of.module, input, of.path, in, out, column};
  };
  using enum AdapterInput;
  if (form.joint_qkv || c.block.fused) {
    add(names.qkv, kQkv, c.width, q + 2 * kv);
  } else {
    add(names.q, kQkv, c.width, q);
    add(names.k, kQkv, c.width, kv, q);
    add(names.v, kQkv, c.width, kv, q + kv);
  }
  add(names.o, kO, q, c.width);
  if (c.experts.on()) return;  // the MLPs of a mixture of experts have no adapters
  if (form.gated && c.block.fused) {
    add(names.gate_up, kGateUp, c.width, 2 * c.inner);
  } else {
    add(names.gate, kGateUp, c.width, c.inner);
    if (form.gated) add(names.up, kGateUp, c.width, c.inner, c.inner);
  }
  add(names.down, kDown, c.inner, c.width);
}

bool AdapterList::has(AdapterInput input) const {
  return std::any_of(all().begin(), all().end(), [&](const Adapter& one) { return one.input == input; });
}

AdapterSaved::AdapterSaved(BufferPlan& plan, const ModelConfig& config, DType t, BatchShape shape,
                           Backward how) {
  const std::size_t count = config.lora.on() ? AdapterList(config).count() : 0;
  for (std::size_t i = 0; i < count; ++i) low[i] = plan.take(t, shape.rows(), config.lora.rank);
  for (std::size_t i = 0; i < count && how == Backward::kInHalves; ++i)
    d_low[i] = plan.take(t, shape.rows(), config.lora.rank);
}

AdapterWorkspace::AdapterWorkspace(BufferPlan& plan, const ModelConfig& config, DType t, BatchShape shape) {
  if (!config.lora.on()) return;
  std::int64_t widest = 0;
  std::size_t most = 0, same = 0;  // adapters with the same input, which are adjacent
  const AdapterList list(config);
  for (const Adapter& one : list.all()) {
    same = &one != list.all().data() && one.input == (&one - 1)->input ? same + 1 : 1;
    most = std::max(most, same), widest = std::max(widest, one.in);
  }
  for (std::size_t i = 0; i < most; ++i) d_low[i] = plan.take(t, shape.rows(), config.lora.rank);
  if (config.lora.dropout == 0) return;
  dropped = plan.take(t, shape.rows(), widest);
}

// A and B of each adapter follow the block's own parameters.
const Param& Adapters::param(std::size_t adapter, std::size_t which) const {
  const std::size_t own = call_.unit.params.size() - 2 * list_.all().size();
  return call_.unit.params[own + 2 * adapter + which];
}

namespace {

// The view of one parameter in the flat tensor of the unit's last tile.
View view_in_tile(const View& flat, const Unit& unit, const Param& param) {
  const View at = flat.col_range(param.offset - unit.tiles.back().first, param.count());
  return {at.data, at.dtype, param.rows, param.cols};
}

}  // namespace

View Adapters::weight(std::size_t adapter, std::size_t which) const {
  return view_in_tile(call_.adapters.weights, call_.unit, param(adapter, which));
}

View Adapters::grad(std::size_t adapter, std::size_t which) const {
  return view_in_tile(call_.adapters.grads, call_.unit, param(adapter, which));
}

const View& Adapters::d_low(std::size_t adapter, std::size_t place) const {
  return saved_.d_low[adapter] ? saved_.d_low[adapter] : workspace_.d_low[place];
}

template <class F>
void Adapters::for_each(AdapterInput input, const F& f) const {
  const std::span<const Adapter> all = list_.all();
  std::size_t place = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].input == input) f(all[i], i, place++);
  }
}

void Adapters::drop(const Adapter& adapter, const View& x, const View& y) const {
  RandomKey key = call_.dropout->adapters;
  key.key[0] ^= static_cast<std::uint32_t>(adapter.module);  // a mask of its own for each module
  call_.ops.dropout(call_.stream, x,
                    {.rate = call_.config.lora.dropout,
                     .key = key,
                     .step = call_.dropout->step,
                     .positions = call_.shape.positions(),
                     .first_row = 0,
                     .first_sequence = call_.dropout->first_sequence,
                     .first_column = is_split_by_inputs(adapter.input) ? call_.shard.index * x.cols : 0},
                    y);
}

View Adapters::input_of(const Adapter& adapter, const View& x) const {
  if (!drops()) return x;
  const View kept(workspace_.dropped.data, x.dtype, x.rows, x.cols);
  drop(adapter, x, kept);
  return kept;
}

void Adapters::forward(AdapterInput input, const View& x, const View& y) const {
  for_each(input, [&](const Adapter& one, std::size_t i, std::size_t) {
    const View& low = saved_.low[i];
    call_.linear(input_of(one, x), weight(i, 0), View{}, low);
    call_.ops.scale(call_.stream, low, call_.config.lora.factor(), low);
    if (y) call_.linear_more(low, weight(i, 1), y.col_range(one.column, one.out));
  });
}

void Adapters::backward_input(AdapterInput input, const View& dy, const View& dx) const {
  for_each(input, [&](const Adapter& one, std::size_t i, std::size_t place) {
    const View& d = d_low(i, place);
    call_.linear_dx(dy.col_range(one.column, one.out), weight(i, 1), d);
    call_.ops.scale(call_.stream, d, call_.config.lora.factor(), d);
    if (!drops()) return call_.linear_dx_more(d, weight(i, 0), dx);
    const View kept(workspace_.dropped.data, dx.dtype, dx.rows, dx.cols);
    call_.linear_dx(d, weight(i, 0), kept);
    drop(one, kept, kept);
    call_.ops.add(call_.stream, kept, dx, dx);
  });
}

void Adapters::backward_weight(AdapterInput input, const View& dy, const View& x) const {
  for_each(input, [&](const Adapter& one, std::size_t i, std::size_t place) {
    call_.linear_dw(dy.col_range(one.column, one.out), saved_.low[i], grad(i, 1));
    call_.linear_dw(d_low(i, place), input_of(one, x), grad(i, 0));
  });
}

void Adapters::begin_backward() const {
  if (call_.into == Gradients::kOverwrite) call_.ops.zero(call_.stream, call_.adapters.grads);
}

}  // namespace model
}  // namespace zg
