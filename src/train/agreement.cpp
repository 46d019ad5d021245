#include "train/agreement.hpp"

#include "train/optimizer_setup.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

std::vector<std::string> agreement_of(const RunPlan& plan) {
  const RunConfig& c = plan.config;
  const ModelConfig& m = plan.model_config;
  std::vector<std::string> lines{
      fmt::format(
          "model {} of {} layers, width {}, {} inside, {} heads of {} and {} for keys, vocabulary {}, "
          "{} positions, {} head",
          name_of(m.arch), m.layers, m.width, m.inner, m.heads, m.head_size, m.kv_heads, m.vocab_size,
          m.context, m.tied ? "tied" : "own"),
      fmt::format("model {}, norm_eps {}, rope_theta {}, init_std {}, dropout {} and {}",
                  c.model_from.empty() ? "from scratch" : "from a directory", m.norm_eps, m.block.rope.theta,
                  m.init_std, m.dropout.embedding, m.dropout.residual),
      "model as " + write_hf_config(m),
      fmt::format("adapters: {}; {}", shape_of(m.lora), arithmetic_of(m.lora)),
      fmt::format("seed {}", c.seed),
      fmt::format("precision {}, gradients {}", name_of(c.dtype), name_of(c.gradient_dtype)),
      fmt::format("batch of {} micro-batches of {} sequences of {} tokens on each of {} ranks",
                  c.accumulation_steps, c.micro_batch, c.data.seq_len, c.data_ranks()),
      fmt::format("{} steps, an evaluation every {} of {} micro-batches, {} validation sequences", c.steps,
                  c.eval_every, c.eval_batches, plan.validation_sequences)};
  // The learning rate schedule is compared by the rules of three updates.
  for (const std::int64_t update : {std::int64_t{0}, c.steps / 2, c.steps - 1}) {
    const UpdateRule rule = update_rule(c, update);
    const UpdateParams& p = rule.params;
    lines.push_back(
        fmt::format("update {} by {}: lr {}, betas {} {}, eps {}, decay {}, momentum {} {}, clip {}",
                    update + 1, optimizer_name(c.optimizer), p.lr, p.beta1, p.beta2, p.eps, p.weight_decay,
                    p.momentum, p.dampening, rule.clip));
  }
  const std::vector<std::string> engine = agreement_of(*plan.layout, *plan.programs);
  lines.insert(lines.end(), engine.begin(), engine.end());
  return lines;
}

}  // namespace zg
