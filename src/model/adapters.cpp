#include "model/adapters.hpp"

#include <algorithm>

#include "model/families/family.hpp"
#include "model/units.hpp"

namespace zg::model {

AdapterList::AdapterList(const ModelConfig& c, std::int64_t layer, Which which) {
  const std::int64_t q = c.query_columns(), kv = c.key_columns();
  const FamilyForm& form = c.form();
  const BlockNames& names = family_of(c.arch).files.block;
  const auto add = [&](const Adapter& one) {
    if (which == Which::kAll || c.lora.has(one.module)) adapters_[count_++] = one;
  };
  const auto add_matrix = [&](const MatrixName& of, AdapterInput input, std::int64_t in, std::int64_t out,
                              std::int64_t column = 0) {
    add({of.module, input, "", of.path, in, out, column});
  };
  using enum AdapterInput;
  if (c.block.latent) {
    const LatentAttention& latent = *c.block.latent;
    const std::int64_t kv_latent = latent.kv_rank + latent.rope;
    if (latent.q_rank > 0) {
      add_matrix(names.q_a, kQkv, c.width, latent.q_rank);
      add_matrix(names.kv_a, kQkv, c.width, kv_latent, latent.q_rank);
      add_matrix(names.q_b, kQueryLatent, latent.q_rank, q);
    } else {
      add_matrix(names.q, kQkv, c.width, q);
      add_matrix(names.kv_a, kQkv, c.width, kv_latent, q);
    }
    add_matrix(names.kv_b, kKvLatent, latent.kv_rank, c.latent_heads().joint_columns());
  } else if (form.joint_qkv || c.block.fused) {
    add_matrix(names.qkv, kQkv, c.width, q + 2 * kv);
  } else {
    add_matrix(names.q, kQkv, c.width, q);
    add_matrix(names.k, kQkv, c.width, kv, q);
    add_matrix(names.v, kQkv, c.width, kv, q + kv);
  }
  add_matrix(names.o, kO, c.result_columns(), c.width);
  if (c.has_experts(layer)) {
    const std::int64_t inner = c.experts.shared_inner;
    if (inner == 0) return;
    add({LoraModule::kSharedGate, kGateUp, names.shared, names.expert_gate, c.width, inner, 0});
    add({LoraModule::kSharedUp, kGateUp, names.shared, names.expert_up, c.width, inner, inner});
    add({LoraModule::kSharedDown, kDown, names.shared, names.expert_down, inner, c.width, 0});
    return;
  }
  if (form.gated && c.block.fused) {
    add_matrix(names.gate_up, kGateUp, c.width, 2 * c.inner);
  } else {
    add_matrix(names.gate, kGateUp, c.width, c.inner);
    if (form.gated) add_matrix(names.up, kGateUp, c.width, c.inner, c.inner);
  }
  add_matrix(names.down, kDown, c.inner, c.width);
}

AdapterList AdapterList::of_expert(const ModelConfig& c, Which which) {
  AdapterList list;
  const BlockNames& names = family_of(c.arch).files.block;
  if (names.fused_experts) return list;  // they get no adapters
  const std::int64_t inner = c.experts.inner;
  const auto add = [&](LoraModule module, AdapterInput input, const char* name, std::int64_t in,
                       std::int64_t out, std::int64_t column = 0) {
    if (which == Which::kAll || c.lora.has(module))
      list.adapters_[list.count_++] = {module, input, "", name, in, out, column};
  };
  using enum AdapterInput;
  const auto& [gate, up, down] = names.expert_modules;
  add(gate, kGateUp, names.expert_gate, c.width, inner);
  add(up, kGateUp, names.expert_up, c.width, inner, inner);
  add(LoraModule::kAllExpertsGateUp, kGateUp, "gate_up_proj", c.width, 2 * inner);
  add(down, kDown, names.expert_down, inner, c.width);
  add(LoraModule::kAllExpertsDown, kDown, names.expert_down, inner, c.width);
  return list;
}

bool AdapterList::has(AdapterInput input) const {
  return std::any_of(all().begin(), all().end(), [&](const Adapter& one) { return one.input == input; });
}

AdapterSaved::AdapterSaved(BufferPlan& plan, const AdapterList& list, const Lora& lora, DType t,
                           std::int64_t rows, Backward how) {
  for (std::size_t i = 0; i < list.count(); ++i) low[i] = plan.take(t, rows, lora.rank);
  for (std::size_t i = 0; i < list.count() && how == Backward::kInHalves; ++i)
    d_low[i] = plan.take(t, rows, lora.rank);
}

AdapterWorkspace::AdapterWorkspace(BufferPlan& plan, const AdapterList& list, const Lora& lora, DType t,
                                   DType gradient, std::int64_t rows) {
  std::int64_t widest = 0;
  std::size_t most = 0, same = 0;  // adapters with the same input, which are adjacent
  for (const Adapter& one : list.all()) {
    same = &one != list.all().data() && one.input == (&one - 1)->input ? same + 1 : 1;
    most = std::max(most, same), widest = std::max(widest, one.in);
  }
  for (std::size_t i = 0; i < most; ++i) d_low[i] = plan.take(t, rows, lora.rank);
  if (lora.dropout > 0 && most > 0) dropped = plan.take(gradient, rows, widest);
}

Adapters::Adapters(const Call& call, const AdapterSaved& saved, const AdapterWorkspace& workspace,
                   std::int64_t expert, const View& order)
    : call_(call),
      saved_(saved),
      workspace_(workspace),
      list_(AdapterList::of_expert(call.config)),
      first_(call.unit.params.size() -
             2 * list_.count() *
                 static_cast<std::size_t>(call.unit.first_expert + call.unit.expert_count - expert)),
      expert_(expert),
      order_(order) {}

// A and B of each adapter follow the unit's own parameters, expert by expert.
const Param& Adapters::param(std::size_t adapter, std::size_t which) const {
  return call_.unit.params[first_ + 2 * adapter + which];
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

View Adapters::d_low(std::size_t adapter, std::size_t place, std::int64_t rows) const {
  const View& all = saved_.d_low[adapter] ? saved_.d_low[adapter] : workspace_.d_low[place];
  return all.row_range(0, rows);
}

template <class F>
void Adapters::for_each(AdapterInput input, const F& f) const {
  const std::span<const Adapter> all = list_.all();
  std::size_t place = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].input == input) f(all[i], i, place++);
  }
}

// Each module of each expert has a mask of its own, which depends on a row's token and not on where the row
// is.
void Adapters::drop(const Adapter& adapter, const View& x, const View& y) const {
  RandomKey key = call_.dropout->adapters;
  key.key[0] ^= static_cast<std::uint32_t>(adapter.module);
  key.key[1] ^= static_cast<std::uint32_t>(expert_ + 1);
  // The rows of an expert group begin with the first rank's sequences.
  const std::int64_t before = order_ ? call_.shard.experts.index * call_.shape.sequences : 0;
  call_.ops.dropout(call_.stream, x,
                    {.rate = call_.config.lora.dropout,
                     .key = key,
                     .step = call_.dropout->step,
                     .positions = call_.shape.positions(),
                     .first_row = 0,
                     .first_sequence = call_.dropout->first_sequence - before,
                     .first_column = is_split_by_inputs(adapter.input) ? call_.shard.index * x.cols : 0,
                     .slots = order_ ? order_.as<std::int32_t>() : nullptr,
                     .per_token = order_ ? call_.config.experts.router.per_token : 1},
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
    const View low = saved_.low[i].row_range(0, x.rows);
    call_.linear(input_of(one, x), weight(i, 0), View{}, low);
    call_.ops.scale(call_.stream, low, call_.config.lora.factor(), low);
    if (y) call_.linear_more(low, weight(i, 1), y.col_range(one.column, one.out));
  });
}

void Adapters::backward_input(AdapterInput input, const View& dy, const View& dx) const {
  for_each(input, [&](const Adapter& one, std::size_t i, std::size_t place) {
    const View d = d_low(i, place, dy.rows);
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
    const View low = saved_.low[i].row_range(0, x.rows);
    call_.linear_dw(dy.col_range(one.column, one.out), low, grad(i, 1));
    call_.linear_dw(d_low(i, place, dy.rows), input_of(one, x), grad(i, 0));
  });
}

void Adapters::begin_backward() const {
  if (call_.into == Gradients::kOverwrite) call_.ops.zero(call_.stream, call_.adapters.grads);
}

}  // namespace zg::model
