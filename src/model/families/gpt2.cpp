// GPT-2: LayerNorms, learned positions, an MLP without a gate, and biases everywhere.
#include <fmt/format.h>

#include "model/families/family.hpp"

namespace zg::model {
namespace {

ModelConfig read(const Family&, const hf::Keys& keys, hf::Origin origin) {
  ModelConfig c;
  c.arch = Arch::kGpt2;
  c.vocab_size = hf::vocabulary(keys, origin);
  c.context = keys.size(keys.has("n_positions") || !keys.has("n_ctx") ? "n_positions" : "n_ctx");
  if (origin == hf::Origin::kModelSection && keys.size("n_ctx", c.context) != c.context) {
    keys.wrong("n_ctx", fmt::format("the same as \"n_positions\", {},", c.context));
  }
  c.width = keys.size("n_embd");
  c.layers = keys.size("n_layer", {}, hf::kMaxLayers);
  c.heads = keys.size("n_head");
  c.kv_heads = c.heads;
  c.head_size = hf::divided(keys, "n_embd", c.width, "n_head", c.heads);
  c.inner = keys.size("n_inner", 4 * c.width);
  c.norm_eps = keys.positive("layer_norm_epsilon", 1e-5);
  c.init_std = keys.deviation("initializer_range", 0.02);
  c.tied = keys.flag("tie_word_embeddings", true);
  hf::demand_gelu(keys, "activation_function");
  c.scaled_scores = keys.flag("scale_attn_weights", true);
  c.scores_by_layer = keys.flag("scale_attn_by_inverse_layer_idx", false);
  keys.demand("reorder_and_upcast_attn", false);
  keys.demand("add_cross_attention", false);
  return c;
}

void write(const Family&, const ModelConfig& c, nlohmann::ordered_json& out) {
  out["vocab_size"] = c.vocab_size;
  out["n_positions"] = c.context;
  out["n_ctx"] = c.context;
  out["n_embd"] = c.width;
  out["n_layer"] = c.layers;
  out["n_head"] = c.heads;
  out["n_inner"] = c.inner;
  out["layer_norm_epsilon"] = c.norm_eps;
  out["activation_function"] = "gelu_new";
  if (!c.scaled_scores) out["scale_attn_weights"] = false;
  if (c.scores_by_layer) out["scale_attn_by_inverse_layer_idx"] = true;
  // The dropout rates of the training; without these keys transformers would assume 0.1 for each.
  out["attn_pdrop"] = 0.0;
  out["embd_pdrop"] = c.dropout.embedding;
  out["resid_pdrop"] = c.dropout.residual;
}

std::vector<ModelKey> keys_of(const Family&) {
  return {{"arch", "`\"gpt2\"`", "required", "The family."},
          {"vocab_size", kSizeText, "the tokenizer's", "Size of the vocabulary."},
          {"n_positions", kSizeText, "required", "Most tokens of a sequence: the context."},
          {"n_ctx", kSizeText, "as `n_positions`", "Another name of `n_positions`."},
          {"n_embd", kSizeText, "required", "Width; a multiple of `n_head`."},
          {"n_layer", kSizeText, "required", "Layers."},
          {"n_head", kSizeText, "required", "Heads of attention."},
          {"n_inner", kSizeText, "4 * `n_embd`", "Width inside the MLP."},
          {"layer_norm_epsilon", kNumberText, "1e-5", "What is added to the variance in layer norms."},
          {"activation_function", "`\"gelu_new\"`, `\"gelu_pytorch_tanh\"`, `\"gelu_fast\"`", "\"gelu_new\"",
           "The activation of the MLP; all names mean the same."},
          {"initializer_range", kDeviationText, "0.02", "Standard deviation of the initial weights."},
          {"tie_word_embeddings", kBoolText, "true", "The output matrix is the embedding."},
          {"scale_attn_weights", kBoolText, "true",
           "Scores of attention are divided by the square root of the head's size."},
          {"scale_attn_by_inverse_layer_idx", kBoolText, "false",
           "Scores of attention are also divided by the layer's number, from 1."},
          {"reorder_and_upcast_attn", "`false`", "false", "Attention sums in fp32 in any case."},
          {"add_cross_attention", "`false`", "false", "There is no cross-attention."}};
}

BlockNames block_names() {
  BlockNames names;
  names.norm1 = "ln_1", names.norm2 = "ln_2";
  names.qkv = {"attn.c_attn", LoraModule::kCAttn};
  names.o = {"attn.c_proj", LoraModule::kAttnCProj};
  names.gate = {"mlp.c_fc", LoraModule::kCFc};
  names.down = {"mlp.c_proj", LoraModule::kMlpCProj};
  names.transposed = true;
  return names;
}

}  // namespace

const Family& gpt2() {
  static const Family kFamily{
      .arch = Arch::kGpt2,
      .name = "gpt2",
      .model_type = "gpt2",
      .architecture = "GPT2LMHeadModel",
      .title = "GPT-2",
      .files = {.model = "transformer.",
                .kept = false,
                .own = {"h.", "wte.", "wpe.", "ln_f."},
                .layers = "h",
                .embedding = "wte.weight",
                .norm = "ln_f",
                .block = block_names()},
      .form = {.layer_norms = true, .gated = false, .rotates = false, .joint_qkv = true, .biases = true},
      .sizes = {"n_positions", "n_embd", "n_layer", "n_head", "n_head", "n_inner", "layer_norm_epsilon"},
      .read = read,
      .write = write,
      .keys = keys_of};
  return kFamily;
}

}  // namespace zg::model
