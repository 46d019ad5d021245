#include "cli/chat.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"

namespace zg::cli {
namespace {

// From the model cards and templates of Llama 3, Phi-4, Qwen (ChatML), Gemma, Phi-3, OLMo 2 and Mistral 7B
// v0.3. A vocabulary may have the tokens of several, so that the order counts.
constexpr ChatTemplate kTemplates[] = {
    {"Llama 3", "<|start_header_id|>", "<|start_header_id|>user<|end_header_id|>\n\n",
     "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", ""},
    {"Phi-4", "<|im_sep|>", "<|im_start|>user<|im_sep|>", "<|im_end|><|im_start|>assistant<|im_sep|>",
     "<|im_end|>", ""},
    {"ChatML", "<|im_start|>", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>",
     "\n"},
    {"Gemma", "<start_of_turn>", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n",
     "<end_of_turn>", "\n"},
    {"Phi-3", "<|assistant|>", "<|user|>\n", "<|end|>\n<|assistant|>\n", "<|end|>", "\n"},
    {"Mistral", "[INST]", "[INST] ", "[/INST]", "</s>", ""},
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
  // The tokenizer must find the tokens in a text, too, as one of a tokenizer.model alone does not.
  const std::vector<std::int32_t> end = tokenizer.encode(form_.end);
  if (end_id_ >= 0 && std::find(end.begin(), end.end(), end_id_) != end.end()) return;
  throw Error(Errc::kUsage, "--chat",
              fmt::format("the model's tokenizer has {} of {}, but does not find its {} in a text",
                          form_.tells, form_.name, form_.end),
              "put the model's tokenizer.json there, or write the turns into --prompt yourself");
}

// What stands between two turns is encoded with the end of the first one and the beginning of the second: a
// token may take the blanks beside it.
const std::vector<std::int32_t>& Chat::ask(const std::string& text) {
  std::string said = form_.before + text + form_.after;
  if (answered_) said = std::string(form_.end) + form_.between + said;
  append(ids_, tokenizer_.encode(said));
  return ids_;
}

void Chat::answered(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& ends) {
  append(ids_, ids);
  const auto ends_it = [&](std::int32_t id) {
    return id == end_id_ || std::find(ends.begin(), ends.end(), id) != ends.end();
  };
  if (!ids.empty() && ends_it(ids_.back())) ids_.pop_back();
  answered_ = true;
}

}  // namespace zg::cli
