#include "model/units.hpp"

#include <algorithm>
#include <numeric>
#include <span>

#include "model/adapter_tensors.hpp"
#include "model/adapters.hpp"
#include "model/families/family.hpp"
#include "model/tensor_shard.hpp"
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

std::int64_t Unit::end_of(std::size_t param) const {
  std::int64_t end = count;
  for (const Param& p : params) {
    if (p.offset > params[param].offset) end = std::min(end, p.offset);
  }
  return end;
}

namespace model {
namespace {

// Builds a unit: given the shapes of whole parameters, it adds the shards of them that a rank holds.
class UnitBuilder {
 public:
  UnitBuilder(const TensorShard& shard, std::string unit_name, std::string prefix)
      : shard_(shard), prefix_(std::move(prefix)) {
    unit_.name = std::move(unit_name);
  }
  // all(): the lines of a parameter of which every rank has a copy. piece(): this rank's slice of lines that
  // are split.
  std::vector<Band> all(std::int64_t lines) const { return all_lines(shard_, lines); }
  std::vector<Band> piece(std::int64_t lines, std::int64_t blocks = 1) const {
    return piece_of_lines(shard_, lines, blocks);
  }

  void vector(const std::string& name, std::int64_t n, std::vector<Band> bands, Init init,
              bool summed = false) {
    Param p;
    p.vector = true;
    p.whole_cols = n;
    p.cols = lines_of(bands);
    p.summed = summed;
    add(std::move(p), name, std::move(bands), init);
  }
  // Adds a matrix of which a rank holds the rows in `bands`. The gap after it has room for further rows, up
  // to `with_gap` rows altogether.
  void matrix(const std::string& name, std::int64_t out, std::int64_t in, std::vector<Band> bands, Init init,
              std::int64_t with_gap = 0, bool summed = false) {
    Param p;
    p.whole_rows = out;
    p.rows = lines_of(bands);
    p.cols = p.whole_cols = in;
    p.summed = summed;
    p.conv1d = transposed_;
    add(std::move(p), name, std::move(bands), init, with_gap * in);
  }
  // Adds a matrix of which a rank holds some of the columns.
  void matrix_by_columns(const std::string& name, std::int64_t out, std::int64_t in, Init init) {
    Param p;
    p.rows = p.whole_rows = out;
    p.whole_cols = in;
    p.cols = in / shard_.degree;
    p.first_col = shard_.index * p.cols;
    p.conv1d = transposed_;
    add(std::move(p), name, {{0, 0, out}}, init);
  }
  // Whether files store the matrices added after this call transposed.
  void set_transposed(bool transposed) { transposed_ = transposed; }
  // Adds a norm. With sequence parallelism each rank sees only its rows, so the norm's gradients are summed.
  void norm(const std::string& name, const ModelConfig& c) {
    vector(name + ".weight", c.width, all(c.width), norm_init(c.block), shard_.sequence);
    if (c.form().layer_norms) vector(name + ".bias", c.width, all(c.width), Init::kZero, shard_.sequence);
  }
  // Norms initially multiply by one.
  static Init norm_init(const BlockDescription& block) {
    return block.norm_weight == NormWeight::kPlusOne ? Init::kZero : Init::kOne;
  }
  // Files store the last `count` parameters as one, with their rows one after the other: as the whole tensor,
  // or as one of its slices.
  void fuse(std::size_t count, const std::string& name, std::int64_t slice = 0, std::int64_t slices = 0) {
    const std::span last(unit_.params.end() - static_cast<std::ptrdiff_t>(count), unit_.params.end());
    std::int64_t rows = 0;
    for (const Param& p : last) rows += p.whole_rows;
    std::int64_t row = slice * rows;
    for (Param& p : last) {
      p.file_name = prefix_ + name;
      p.file_row = row, p.file_rows = std::max<std::int64_t>(1, slices) * rows, p.file_slices = slices;
      row += p.whole_rows;
    }
  }
  // Adds A and B of an adapter. If ranks split its module by outputs, they hold the same `rows` of B; copies:
  // several ranks may hold one row. If they split it by inputs, they hold the same columns of A.
  void adapter(const Adapter& one, const std::string& path, std::int64_t rank, std::vector<Band> rows,
               bool copies) {
    const std::string a = path + ".lora_A.weight", b = path + ".lora_B.weight";
    const bool summed = shard_.degree > 1;
    if (is_split_by_inputs(one.input)) {
      matrix_by_columns(a, rank, one.in, Init::kUniform);
      matrix(b, one.out, rank, all(one.out), Init::kZero, 0, summed);
    } else {
      matrix(a, rank, one.in, all(rank), Init::kUniform, 0, summed);
      matrix(b, one.out, rank, std::move(rows), Init::kZero, 0, copies);
    }
    for (std::size_t i = unit_.params.size() - 2; i < unit_.params.size(); ++i)
      unit_.params[i].adapter = true;
  }
  std::int64_t count() const { return unit_.count; }
  // Marks all parameters from element `first` on as adapters.
  void adapted(std::int64_t first) {
    unit_.adapted = true;
    unit_.tiles = {{0, first}, {first, unit_.count - first}};
  }

  Unit take() { return std::move(unit_); }

 private:
  static std::int64_t lines_of(const std::vector<Band>& bands) {
    std::int64_t lines = 0;
    for (const Band& band : bands) lines += band.lines;
    return lines;
  }
  void add(Param p, const std::string& name, std::vector<Band> bands, Init init, std::int64_t with_gap = 0) {
    p.name = prefix_ + name;
    p.init = init;
    p.bands = std::move(bands);
    // Ranks with a copy of the same key and value head get the same number, computed from the head's index.
    if (p.summed && p.bands.size() == 1) {
      p.first_number = p.bands[0].whole_line / p.bands[0].lines * round_up(p.count(), kParamAlign);
    } else if (p.summed && !p.is_whole()) {
      p.whole_numbers = true;
    } else if (!p.is_whole()) {
      p.first_number = shard_.index * round_up(p.whole_count(), kParamAlign);
    }
    p.offset = unit_.count;
    unit_.count = round_up(p.offset + std::max(p.count(), with_gap), kParamAlign);
    unit_.params.push_back(std::move(p));
  }

  const TensorShard shard_;
  std::string prefix_;
  bool transposed_ = false;
  Unit unit_;
};

// Appends the bands `more`, which begin at line `line` of the whole parameter.
void append(std::vector<Band>& bands, const std::vector<Band>& more, std::int64_t line) {
  for (Band band : more) {
    band.whole_line += line;
    band.line = bands.empty() ? 0 : bands.back().line + bands.back().lines;
    const bool follows = !bands.empty() && bands.back().whole_line + bands.back().lines == band.whole_line;
    if (follows && bands.back().counted == band.counted) {
      bands.back().lines += band.lines;
    } else {
      bands.push_back(band);
    }
  }
}

// The rows that a rank holds of the matrix in which q, k and v follow one another.
std::vector<Band> qkv_rows(const ModelConfig& c, const TensorShard& shard) {
  const std::int64_t q = c.query_columns(), kv = c.key_columns();
  std::vector<Band> rows;
  append(rows, piece_of_lines(shard, q), 0);
  append(rows, kv_lines(c, shard), q);
  append(rows, kv_lines(c, shard), q + kv);
  return rows;
}

// The rows of a module's matrix that a rank holds, for modules that are split by outputs.
std::vector<Band> rows_of(const ModelConfig& c, const TensorShard& shard, const Adapter& adapter) {
  switch (adapter.module) {
    case LoraModule::kQ:
    case LoraModule::kQB:
      return piece_of_lines(shard, c.query_columns());
    case LoraModule::kKvB:
      return piece_of_lines(shard, c.latent_heads().joint_columns());
    case LoraModule::kQA:
      return all_lines(shard, c.block.latent->q_rank);
    case LoraModule::kKvA:
      return all_lines(shard, c.block.latent->kv_rank + c.block.latent->rope);
    case LoraModule::kK:
    case LoraModule::kV:
      return kv_lines(c, shard);
    case LoraModule::kQkv:
    case LoraModule::kCAttn:
      return qkv_rows(c, shard);
    case LoraModule::kGateUp:
    case LoraModule::kAllExpertsGateUp:
      return piece_of_lines(shard, adapter.out / 2, 2);
    default:
      return piece_of_lines(shard, adapter.out);
  }
}

// Adds the adapters after the block's own parameters, and returns the unit.
Unit with_adapters(UnitBuilder& b, const ModelConfig& c, const TensorShard& shard, std::int64_t layer) {
  const AdapterList adapters(c, layer);
  if (adapters.count() == 0) return b.take();
  const std::int64_t own = b.count();
  b.set_transposed(false);
  for (const Adapter& one : adapters.all()) {
    const bool of_heads =
        one.module == LoraModule::kK || one.module == LoraModule::kV || one.module == LoraModule::kQkv;
    const bool of_latents = one.module == LoraModule::kQA || one.module == LoraModule::kKvA;
    b.adapter(one, one.path(), c.lora.rank, rows_of(c, shard, one),
              (of_heads && c.kv_heads % shard.degree != 0) || (of_latents && shard.degree > 1));
  }
  b.adapted(own);
  return b.take();
}

// Adds the adapters of experts [first, end) after the experts' own parameters, expert by expert.
void add_expert_adapters(UnitBuilder& b, const ModelConfig& c, const TensorShard& shard, std::int64_t first,
                         std::int64_t end) {
  const AdapterList adapters = AdapterList::of_expert(c);
  if (adapters.count() == 0) return;
  const std::int64_t own = b.count();
  for (std::int64_t e = first; e < end; ++e) {
    for (const Adapter& one : adapters.all())
      b.adapter(one, expert_path(c, e) + "." + one.path(), c.lora.rank, rows_of(c, shard, one), false);
  }
  b.adapted(own);
}

std::string layer_prefix(const ModelConfig& c, std::int64_t layer) {
  return fmt::format("{}.{}.", family_of(c.arch).files.layers, layer);
}

// Adds the matrices of a gated MLP without biases: gate, up, down.
void add_gated_mlp(UnitBuilder& b, const ModelConfig& c, const std::string& path, std::int64_t inner) {
  const BlockNames& names = family_of(c.arch).files.block;
  const auto name = [&](const char* of) { return fmt::format("{}.{}.weight", path, of); };
  b.matrix(name(names.expert_gate), inner, c.width, b.piece(inner), Init::kNormal);
  b.matrix(name(names.expert_up), inner, c.width, b.piece(inner), Init::kNormal);
  b.matrix_by_columns(name(names.expert_down), c.width, inner, Init::kNormalResidual);
}

// Adds an expert's parameters in the order of ExpertParams.
void add_expert(UnitBuilder& b, const ModelConfig& c, std::int64_t e) {
  const BlockNames& names = family_of(c.arch).files.block;
  const std::string path = expert_path(c, e);
  const std::int64_t inner = c.experts.inner, count = c.experts.count;
  if (!names.fused_experts) return add_gated_mlp(b, c, path, inner);
  const bool pairs = experts_in_pairs(c);
  const auto in_files = [&](std::size_t matrices, const std::string& name) {
    b.fuse(matrices, name, e, count);
  };
  b.set_transposed(names.transposed_experts);
  if (pairs) {
    b.matrix(path + ".gate_up_proj", 2 * inner, c.width, b.piece(2 * inner), Init::kNormal);
  } else {
    b.matrix(path + ".gate_proj", inner, c.width, b.piece(inner), Init::kNormal);
    b.matrix(path + ".up_proj", inner, c.width, b.piece(inner), Init::kNormal);
  }
  in_files(pairs ? 1 : 2, names.all_gate_up);
  if (c.experts.biases) {
    b.vector(path + ".gate_up_proj_bias", 2 * inner, b.piece(2 * inner), Init::kZero);
    in_files(1, fmt::format("{}_bias", names.all_gate_up));
  }
  b.matrix_by_columns(path + ".down_proj", c.width, inner, Init::kNormalResidual);
  in_files(1, names.all_down);
  if (c.experts.biases) {
    b.vector(path + ".down_proj_bias", c.width, b.all(c.width), Init::kZero);
    in_files(1, fmt::format("{}_bias", names.all_down));
  }
}

// The experts [first, first + count) of a layer.
Unit expert_unit(const ModelConfig& c, const TensorShard& shard, std::int64_t layer, std::int64_t group,
                 std::int64_t first, std::int64_t count) {
  UnitBuilder b(shard, fmt::format("block.{}.experts.{}", layer, group), layer_prefix(c, layer));
  for (std::int64_t e = first; e < first + count; ++e) add_expert(b, c, e);
  add_expert_adapters(b, c, shard, first, first + count);
  Unit unit = b.take();
  unit.first_expert = static_cast<std::int32_t>(first), unit.expert_count = static_cast<std::int32_t>(count);
  return unit;
}

// The choice bias of a layer's router, of which every rank has a copy.
Param choice_bias_of(const ModelConfig& c, std::int64_t layer) {
  const BlockNames& names = family_of(c.arch).files.block;
  Param p;
  p.name = layer_prefix(c, layer) + names.choice_bias;
  p.vector = true;
  p.cols = p.whole_cols = c.experts.count;
  p.offset = -1;
  p.bands = {{0, 0, p.cols}};
  if (names.choice_bias_is_row) p.file_rows = 1;
  return p;
}

// Adds the products of latent attention, without the last one. The products to the latents and the norms of
// these are whole on each rank, which computes the terms of their gradients that come from its heads.
void add_latent_attention(UnitBuilder& b, const ModelConfig& c, const TensorShard& shard) {
  const LatentAttention& latent = *c.block.latent;
  const BlockNames& names = family_of(c.arch).files.block;
  const std::int64_t q = c.query_columns(), kv_latent = latent.kv_rank + latent.rope;
  const std::int64_t joint = c.latent_heads().joint_columns();
  const bool summed = shard.degree > 1;
  const auto matrix = [&](const MatrixName& name, std::int64_t out, std::int64_t in, bool whole) {
    b.matrix(fmt::format("{}.weight", name.path), out, in, whole ? b.all(out) : b.piece(out), Init::kNormal,
             0, whole && summed);
  };
  const auto bias = [&](const MatrixName& name, std::int64_t n) {
    if (c.qkv_bias()) b.vector(fmt::format("{}.bias", name.path), n, b.all(n), Init::kZero, summed);
  };
  const auto norm = [&](const char* name, std::int64_t n) {
    b.vector(fmt::format("{}.weight", name), n, b.all(n), b.norm_init(c.block), summed);
  };
  const bool has_q_latent = latent.q_rank > 0;
  has_q_latent ? matrix(names.q_a, latent.q_rank, c.width, true) : matrix(names.q, q, c.width, false);
  matrix(names.kv_a, kv_latent, c.width, true);
  if (has_q_latent) bias(names.q_a, latent.q_rank);
  bias(names.kv_a, kv_latent);
  if (has_q_latent) norm(names.q_a_norm, latent.q_rank);
  norm(names.kv_a_norm, latent.kv_rank);
  if (has_q_latent) matrix(names.q_b, q, latent.q_rank, false);
  matrix(names.kv_b, joint, latent.kv_rank, false);
}

// Adds a block's parameters in the order of BlockParams.
Unit block_unit(const ModelConfig& c, const TensorShard& shard, std::int64_t layer) {
  const FamilyForm& form = c.form();
  const BlockDescription& has = c.block;
  const BlockNames& names = family_of(c.arch).files.block;
  UnitBuilder b(shard, fmt::format("block.{}", layer), layer_prefix(c, layer));
  b.set_transposed(names.transposed);
  const std::int64_t q = c.query_columns(), kv = c.key_columns();
  const bool before = c.norms_before(), after = c.norms_after();
  const auto matrix = [&](const MatrixName& name, std::int64_t rows, std::vector<Band> bands,
                          bool copies = false) {
    b.matrix(fmt::format("{}.weight", name.path), rows, c.width, std::move(bands), Init::kNormal, 0, copies);
  };
  const auto matrix_by_columns = [&](const MatrixName& name, std::int64_t columns) {
    b.matrix_by_columns(fmt::format("{}.weight", name.path), c.width, columns, Init::kNormalResidual);
  };
  const auto bias = [&](const MatrixName& name, std::int64_t n, std::vector<Band> bands,
                        bool copies = false) {
    b.vector(fmt::format("{}.bias", name.path), n, std::move(bands), Init::kZero, copies);
  };
  if (before) b.norm(names.norm1, c);
  if (has.latent) {
    add_latent_attention(b, c, shard);
  } else if (form.joint_qkv) {
    matrix(names.qkv, q + 2 * kv, qkv_rows(c, shard));
    if (c.qkv_bias()) bias(names.qkv, q + 2 * kv, qkv_rows(c, shard));
  } else {
    const bool copies = c.kv_heads % shard.degree != 0;
    matrix(names.q, q, b.piece(q));
    matrix(names.k, kv, kv_lines(c, shard), copies);
    matrix(names.v, kv, kv_lines(c, shard), copies);
    if (has.fused) b.fuse(3, fmt::format("{}.weight", names.qkv.path));
    if (c.qkv_bias()) {
      bias(names.q, q, b.piece(q));
      bias(names.k, kv, kv_lines(c, shard), copies);
      bias(names.v, kv, kv_lines(c, shard), copies);
    }
  }
  if (has.head_norms != HeadNorms::kNone) {
    const bool each = has.head_norms == HeadNorms::kEach;
    // Each rank sees its own heads alone, so the gradients are summed.
    for (const auto& [name, width] : {std::pair("q", q), {"k", kv}}) {
      const std::int64_t n = each ? c.head_size : width;
      b.vector(fmt::format("self_attn.{}_norm.weight", name), n, b.all(n), b.norm_init(has),
               shard.degree > 1);
    }
  }
  if (has.sinks) b.vector("self_attn.sinks", c.heads, b.piece(c.heads), Init::kZero);
  matrix_by_columns(names.o, c.result_columns());
  if (c.o_bias()) bias(names.o, c.width, b.all(c.width));
  if (after) b.norm("post_attention_layernorm", c);
  if (before) b.norm(after ? "pre_feedforward_layernorm" : names.norm2, c);
  if (c.has_experts(layer)) {
    const Experts& experts = c.experts;
    b.matrix(fmt::format("{}.weight", names.router), experts.count, c.width, b.all(experts.count),
             Init::kNormal);
    if (experts.biases)
      b.vector(fmt::format("{}.bias", names.router), experts.count, b.all(experts.count), Init::kZero);
    if (experts.shared_inner > 0) add_gated_mlp(b, c, names.shared, experts.shared_inner);
    if (experts.shared_gate)
      b.matrix(fmt::format("{}.weight", names.shared_gate), 1, c.width, b.all(1), Init::kNormal);
    Unit unit = with_adapters(b, c, shard, layer);
    const BlockParams p(c, layer);
    for (const std::size_t i : {p.router, p.shared_gate}) {
      if (i != BlockParams::kNone) unit.params[i].routes = true;
    }
    if (experts.choice_bias) unit.choice_bias = choice_bias_of(c, layer);
    return unit;
  }
  matrix(names.gate, c.inner, b.piece(c.inner));
  if (form.gated) matrix(names.up, c.inner, b.piece(c.inner));
  if (form.gated && has.fused) b.fuse(2, fmt::format("{}.weight", names.gate_up.path));
  if (c.mlp_bias()) {
    bias(names.gate, c.inner, b.piece(c.inner));
    if (form.gated) bias(names.up, c.inner, b.piece(c.inner));
  }
  matrix_by_columns(names.down, c.inner);
  if (c.mlp_bias()) bias(names.down, c.width, b.all(c.width));
  if (after) b.norm("post_feedforward_layernorm", c);
  return with_adapters(b, c, shard, layer);
}

// Rows that a table has room for: enough for the largest number of tokens of any rank, and for the rows that
// products read (`with_gap`).
std::int64_t table_room(const ModelConfig& c, const TensorShard& shard, std::int64_t with_gap) {
  return std::max(with_gap, shard_config(c, shard).vocab_size);
}

// Adds a table of which a rank holds the rows of its tokens, with room for table_room() rows.
void table(UnitBuilder& b, const ModelConfig& c, const TensorShard& shard, const char* name,
           std::int64_t with_gap) {
  const Tokens tokens = tokens_of(c, shard);
  b.matrix(name, c.vocab_size, c.width, {{0, tokens.first, tokens.count}}, Init::kNormal,
           table_room(c, shard, with_gap));
}

Unit embedding_unit(const ModelConfig& c, const TensorShard& shard, std::int64_t table_rows) {
  UnitBuilder b(shard, "embedding", "");
  table(b, c, shard, family_of(c.arch).files.embedding, c.tied ? table_rows : 0);
  if (!c.form().rotates) b.matrix("wpe.weight", c.context, c.width, b.all(c.context), Init::kNormal);
  return b.take();
}

Unit head_unit(const ModelConfig& c, const TensorShard& shard, std::int64_t table_rows) {
  UnitBuilder b(shard, "head", "");
  b.norm(family_of(c.arch).files.norm, c);
  if (!c.tied) table(b, c, shard, "lm_head.weight", table_rows);
  return b.take();
}

// Rows of each tile of a matrix except the last: few enough that the matrix is cut finely, and enough for
// fast products. A tile has a multiple of kParamAlign elements, so that it begins where a parameter may.
std::int64_t tile_rows(std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kTiles = 32, kLeast = 32, kRows = 16;
  const std::int64_t step = std::max(kRows, kParamAlign / std::gcd(kParamAlign, cols));
  return round_up(std::max(kLeast, (rows + kTiles - 1) / kTiles), step);
}

}  // namespace

// Numbers the parameters in the order in which block_unit() adds them.
BlockParams::BlockParams(const ModelConfig& c, std::int64_t layer) {
  const FamilyForm& form = c.form();
  const bool before = c.norms_before(), after = c.norms_after();
  const auto next = [&](bool has) { return has ? count++ : kNone; };
  norm1 = next(before), norm1_bias = next(before && form.layer_norms);
  q = next(true);
  if (c.block.latent) {
    const bool q_latent = c.block.latent->q_rank > 0;
    k = v = next(true);
    q_bias = next(c.qkv_bias()), (void)next(c.qkv_bias());
    q_norm = next(q_latent), k_norm = next(true);
    q_b = next(q_latent), kv_b = next(true);
  } else {
    k = form.joint_qkv ? q : next(true), v = form.joint_qkv ? q : next(true);
    q_bias = next(c.qkv_bias());
    if (!form.joint_qkv) (void)next(c.qkv_bias()), (void)next(c.qkv_bias());
    const bool head_norms = c.block.head_norms != HeadNorms::kNone;
    q_norm = next(head_norms), k_norm = next(head_norms);
  }
  sinks = next(c.block.sinks);
  o = next(true), o_bias = next(c.o_bias());
  after1 = next(after);
  norm2 = next(before), norm2_bias = next(before && form.layer_norms);
  if (c.has_experts(layer)) {
    const bool shared = c.experts.shared_inner > 0;
    router = next(true), router_bias = next(c.experts.biases);
    gate = next(shared), up = next(shared), down = next(shared);
    shared_gate = next(c.experts.shared_gate);
    return;
  }
  gate = next(true), up = form.gated ? next(true) : gate;
  gate_bias = next(c.mlp_bias()), (void)next(c.mlp_bias() && form.gated);
  down = next(true), down_bias = next(c.mlp_bias());
  after2 = next(after);
}

// Numbers the parameters in the order in which add_expert() adds them.
ExpertParams::ExpertParams(const ModelConfig& c, std::int64_t i) {
  const bool pairs = experts_in_pairs(c), biases = c.experts.biases;
  const std::size_t each = (pairs ? 2 : 3) + (biases ? 2 : 0);
  begin = end = static_cast<std::size_t>(i) * each;
  const auto next = [&](bool has) { return has ? end++ : BlockParams::kNone; };
  gate = next(true), up = pairs ? gate : next(true), gate_bias = next(biases);
  down = next(true), down_bias = next(biases);
}

NormList BlockParams::norms() const {
  NormList list;
  for (const std::size_t param :
       {norm1, norm1_bias, q_norm, k_norm, sinks, after1, norm2, norm2_bias, after2}) {
    if (param != kNone) list.add(param);
  }
  return list;
}

void cut_into_tiles(Unit& unit, std::optional<TableRows> table) {
  std::int64_t end = 0;
  const auto place = [&](Param& p, std::int64_t rows) {
    p.offset = end;
    end = round_up(end + rows * p.cols, kParamAlign);
  };
  const auto stays = [&](std::size_t i) {
    // Matrices whose gradients are summed over ranks are not cut: the sum needs them whole.
    const Param& p = unit.params[i];
    return table ? i != table->table : p.vector || p.summed || p.routes;
  };
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    Param& p = unit.params[i];
    if (!p.adapter && stays(i)) place(p, p.rows);
  }
  unit.tiles.clear();
  if (end > 0) unit.tiles.push_back({0, end});
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    Param& p = unit.params[i];
    if (p.adapter || stays(i)) continue;
    const std::int64_t all = table ? table->rows : p.rows, rows = tile_rows(all, p.cols);
    place(p, all);
    for (std::int64_t row = 0; row < all; row += rows) {
      const std::int64_t first = p.offset + row * p.cols;
      unit.tiles.push_back({first, std::min(rows * p.cols, end - first), static_cast<std::int32_t>(i)});
    }
  }
  const std::int64_t own = end;
  for (Param& p : unit.params) {
    if (p.adapter) place(p, p.rows);
  }
  if (unit.adapted) unit.tiles.push_back({own, end - own});
  unit.count = end;
}

std::vector<Unit> make_units(const ModelConfig& c, const TensorShard& shard, std::int64_t table_rows,
                             BlockTiling blocks) {
  std::vector<Unit> units;
  units.push_back(embedding_unit(c, shard, table_rows));
  for (std::int64_t l = 0; l < c.layers; ++l) {
    units.push_back(block_unit(c, shard, l));
    ZG_ASSERT_EQ(units.back().params.size(), BlockParams(c, l).count + 2 * AdapterList(c, l).count());
    if (blocks == BlockTiling::kInTiles) cut_into_tiles(units.back());
    units.back().layer = static_cast<std::int32_t>(l);
    if (!c.has_experts(l)) continue;
    // Ranks of an expert group have units of equal sizes.
    const std::int64_t own = shard.experts.count(c.experts.count),
                       first = shard.experts.first(c.experts.count),
                       each = std::min(c.experts_in_unit(), own), groups = (own + each - 1) / each;
    for (std::int64_t g = 0; g < groups; ++g) {
      units.push_back(expert_unit(c, shard, l, shard.experts.index * groups + g, first + g * each,
                                  std::min(each, own - g * each)));
      units.back().layer = static_cast<std::int32_t>(l);
    }
  }
  units.push_back(head_unit(c, shard, table_rows));
  if (blocks == BlockTiling::kInTiles) {
    const auto rows = [&](bool output) { return table_room(c, shard, output ? table_rows : 0); };
    cut_into_tiles(units.front(), TableRows{embedding::kTokens, rows(c.tied)});
    if (!c.tied) cut_into_tiles(units.back(), TableRows{table_index(c, units), rows(true)});
  }
  for (Unit& unit : units) {
    if (unit.tiles.empty()) unit.tiles = {{0, unit.count}};
  }
  return units;
}

std::size_t table_index(const ModelConfig& config, const std::vector<Unit>& units) {
  return config.tied ? std::size_t{embedding::kTokens} : units.back().params.size() - 1;
}

const Param& table_param(const ModelConfig& config, const std::vector<Unit>& units) {
  return (config.tied ? units.front() : units.back()).params[table_index(config, units)];
}

void clear_gradients(Ops& ops, Stream& stream, const View& grads, const Unit& unit,
                     std::uint64_t overwritten) {
  if (unit.in_tiles()) return ops.zero(stream, grads);
  // Devices fill rows that are less than 2 GiB apart.
  const std::int64_t most = (std::int64_t{1} << 31) / static_cast<std::int64_t>(size_of(grads.dtype)) - 1;
  View rows = grads.col_range(0, 0);  // the ranges that wait to be zeroed by one op
  const auto flush = [&] {
    if (rows.count() > 0) ops.zero(stream, rows);
    rows.rows = 0;
  };
  std::int64_t first = 0;  // first element of `rows`
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

void clear_gaps(Ops& ops, Stream& stream, const View& grads, const Unit& unit) {
  ZG_ASSERT_EQ(unit.tiles.size(), std::size_t{1});
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    const std::int64_t end = unit.params[i].offset + unit.params[i].count();
    const std::int64_t next = i + 1 < unit.params.size() ? unit.params[i + 1].offset : unit.count;
    if (next > end) ops.zero(stream, grads.col_range(end, next - end));
  }
}

}  // namespace model
}  // namespace zg
