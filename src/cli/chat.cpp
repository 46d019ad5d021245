#include "cli/chat.hpp"

#include "ziggurat/base/error.hpp"

namespace zg::cli {
namespace {

// From the model cards and templates of Llama 3, Qwen (ChatML), Gemma, Phi-3 and Mistral.
constexpr ChatTemplate kTemplates[] = {
    {"Llama 3", "<|start_header_id|>", "<|start_header_id|>user<|end_header_id|>\n\n",
     "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", ""},
    {"ChatML", "<|im_start|>", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>",
     "\n"},
    {"Gemma", "<start_of_turn>", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n",
     "<end_of_turn>", "\n"},
    {"Phi-3", "<|assistant|>", "<|user|>\n", "<|end|>\n<|assistant|>\n", "<|end|>", "\n"},
    {"Mistral", "[INST]", "[INST] ", " [/INST]", "</s>", ""},
};

const ChatTemplate& template_of(const Tokenizer& tokenizer) {
  std::string known;
  for (const ChatTemplate& form : kTemplates) {
    if (tokenizer.id_of_token(form.tells) >= 0) return form;
    known += fmt::format("{}{} ({})", known.empty() ? "" : ", ", form.name, form.tells);
  }
  throw Error(Errc::kUsage, "--chat", "the model's vocabulary has the tokens of no known template: " + known,
              "write the turns into --prompt yourself, as the model was trained to see them");
}

void append(std::vector<std::int32_t>& to, const std::vector<std::int32_t>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

Chat::Chat(const Tokenizer& tokenizer)
    : tokenizer_(tokenizer),
      form_(template_of(tokenizer)),
      end_id_(tokenizer.id_of_token(form_.end)),
      ids_(tokenizer.begin_ids()) {
  if (end_id_ >= 0) return;
  throw Error(
      Errc::kUsage, "--chat",
      fmt::format("the model's vocabulary has {} of {}, and not its {}", form_.tells, form_.name, form_.end),
      "write the turns into --prompt yourself, as the model was trained to see them");
}

const std::vector<std::int32_t>& Chat::ask(const std::string& text) {
  append(ids_, tokenizer_.encode(form_.before + text + form_.after));
  return ids_;
}

void Chat::answered(const std::vector<std::int32_t>& ids) {
  append(ids_, ids);
  if (ids.empty() || ids.back() != end_id_) ids_.push_back(end_id_);
  if (*form_.between != 0) append(ids_, tokenizer_.encode(form_.between));
}

}  // namespace zg::cli
