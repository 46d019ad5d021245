#include "model/units.hpp"

#include <algorithm>

#include "ziggurat/base/units.hpp"

namespace zg {

const Param& Unit::param(const std::string& name_or_suffix) const {
  const Param* found = nullptr;
  for (const Param& p : params) {
    if (p.name == name_or_suffix) return p;
    const std::size_t n = p.name.size(), m = name_or_suffix.size();
    if (n > m && p.name[n - m - 1] == '.' && p.name.compare(n - m, m, name_or_suffix) == 0) {
      ZG_ASSERT(found == nullptr, "'{}' of {} may be {} or {}", name_or_suffix, name, found->name, p.name);
      found = &p;
    }
  }
  ZG_ASSERT(found != nullptr, "{} has no parameter '{}'", name, name_or_suffix);
  return *found;
}

namespace model {
namespace {

class UnitBuilder {
 public:
  UnitBuilder(std::string unit_name, std::string prefix) : prefix_(std::move(prefix)) {
    unit_.name = std::move(unit_name);
  }

  void vector(const std::string& name, std::int64_t n, Init init) {
    Param p;
    p.cols = n;
    p.vector = true;
    add(std::move(p), name, init);
  }
  // The gap behind it has room for further rows, up to `with_gap` altogether.
  void matrix(const std::string& name, std::int64_t out, std::int64_t in, Init init,
              std::int64_t with_gap = 0) {
    Param p;
    p.rows = out;
    p.cols = in;
    add(std::move(p), name, init, with_gap * in);
  }
  // GPT-2's linear layer: a weight, which files hold transposed, and a bias.
  void conv1d(const std::string& name, std::int64_t out, std::int64_t in, Init init) {
    Param p;
    p.rows = out;
    p.cols = in;
    p.conv1d = true;
    add(std::move(p), name + ".weight", init);
    vector(name + ".bias", out, Init::kZero);
  }
  void layernorm(const std::string& name, std::int64_t n) {
    vector(name + ".weight", n, Init::kOne);
    vector(name + ".bias", n, Init::kZero);
  }

  Unit take() { return std::move(unit_); }

 private:
  void add(Param p, const std::string& name, Init init, std::int64_t with_gap = 0) {
    p.name = prefix_ + name;
    p.init = init;
    p.offset = unit_.count;
    unit_.count = round_up(p.offset + std::max(p.count(), with_gap), kParamAlign);
    unit_.params.push_back(std::move(p));
  }

  std::string prefix_;
  Unit unit_;
};

Unit gpt2_block(const ModelConfig& c, std::int64_t layer) {
  UnitBuilder b(fmt::format("block.{}", layer), fmt::format("h.{}.", layer));
  b.layernorm("ln_1", c.width);
  b.conv1d("attn.c_attn", 3 * c.width, c.width, Init::kNormal);
  b.conv1d("attn.c_proj", c.width, c.width, Init::kNormalResidual);
  b.layernorm("ln_2", c.width);
  b.conv1d("mlp.c_fc", c.inner, c.width, Init::kNormal);
  b.conv1d("mlp.c_proj", c.width, c.inner, Init::kNormalResidual);
  return b.take();
}

Unit llama_block(const ModelConfig& c, std::int64_t layer) {
  UnitBuilder b(fmt::format("block.{}", layer), fmt::format("model.layers.{}.", layer));
  const std::int64_t q = c.heads * c.head_size, kv = c.kv_heads * c.head_size;
  b.vector("input_layernorm.weight", c.width, Init::kOne);
  b.matrix("self_attn.q_proj.weight", q, c.width, Init::kNormal);
  b.matrix("self_attn.k_proj.weight", kv, c.width, Init::kNormal);
  b.matrix("self_attn.v_proj.weight", kv, c.width, Init::kNormal);
  b.matrix("self_attn.o_proj.weight", c.width, q, Init::kNormalResidual);
  b.vector("post_attention_layernorm.weight", c.width, Init::kOne);
  b.matrix("mlp.gate_proj.weight", c.inner, c.width, Init::kNormal);
  b.matrix("mlp.up_proj.weight", c.inner, c.width, Init::kNormal);
  b.matrix("mlp.down_proj.weight", c.width, c.inner, Init::kNormalResidual);
  return b.take();
}

Unit embedding_unit(const ModelConfig& c, std::int64_t table_rows) {
  UnitBuilder b("embedding", "");
  const std::int64_t with_gap = c.tied ? table_rows : 0;
  if (c.arch == Arch::kGpt2) {
    b.matrix("wte.weight", c.vocab_size, c.width, Init::kNormal, with_gap);
    b.matrix("wpe.weight", c.context, c.width, Init::kNormal);
  } else {
    b.matrix("model.embed_tokens.weight", c.vocab_size, c.width, Init::kNormal, with_gap);
  }
  return b.take();
}

Unit head_unit(const ModelConfig& c, std::int64_t table_rows) {
  UnitBuilder b("head", "");
  if (c.arch == Arch::kGpt2) {
    b.layernorm("ln_f", c.width);
  } else {
    b.vector("model.norm.weight", c.width, Init::kOne);
  }
  if (!c.tied) b.matrix("lm_head.weight", c.vocab_size, c.width, Init::kNormal, table_rows);
  return b.take();
}

}  // namespace

std::vector<Unit> make_units(const ModelConfig& c, std::int64_t table_rows) {
  std::vector<Unit> units;
  units.reserve(static_cast<std::size_t>(c.layers) + 2);
  units.push_back(embedding_unit(c, table_rows));
  for (std::int64_t i = 0; i < c.layers; ++i) {
    units.push_back(c.arch == Arch::kGpt2 ? gpt2_block(c, i) : llama_block(c, i));
  }
  units.push_back(head_unit(c, table_rows));
  const std::size_t expected = c.arch == Arch::kGpt2 ? std::size_t{gpt2::kCount} : std::size_t{llama::kCount};
  ZG_ASSERT_EQ(units[1].params.size(), expected);
  return units;
}

const Param& table_param(const ModelConfig& config, const std::vector<Unit>& units) {
  return config.tied ? units.front().params[embedding::kTokens] : units.back().params.back();
}

void clear_gradients(Ops& ops, Stream& stream, const View& grads, const Unit& unit,
                     std::uint32_t overwritten) {
  // Devices fill rows that are less than 2 GiB apart.
  const std::int64_t most = (std::int64_t{1} << 31) / static_cast<std::int64_t>(size_of(grads.dtype)) - 1;
  View rows = grads.col_range(0, 0);  // the stretches that wait to be zeroed together
  const auto flush = [&] {
    if (rows.count() > 0) ops.zero(stream, rows);
    rows.rows = 0;
  };
  std::int64_t first = 0;  // of the rows
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    const bool fits = rows.rows > 0 && end - begin == rows.cols;
    if (fits && (rows.rows == 1 ? begin - first <= most : begin == first + rows.rows * rows.ld)) {
      if (rows.rows++ == 1) rows.ld = begin - first;
      return;
    }
    flush();
    const View stretch = grads.col_range(begin, end - begin);
    rows = View(stretch.data, grads.dtype, 1, stretch.cols);
    first = begin;
  };
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    if ((overwritten >> i & 1) == 0) continue;
    add(begin, unit.params[i].offset);
    begin = unit.params[i].offset + unit.params[i].count();
  }
  add(begin, unit.count);
  flush();
}

}  // namespace model
}  // namespace zg
