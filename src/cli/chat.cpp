#include "cli/chat.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::cli {
namespace {

// From the model cards and templates of DeepSeek-R1's distilled models, Llama 3, Phi-4, Qwen (ChatML), Gemma,
// Phi-3, Phi-4-mini, Mistral 7B v0.3, Mistral Nemo and OLMo 2. A vocabulary may have the tokens of several
// templates, so the order matters. The byte tokens of a SentencePiece vocabulary distinguish Phi-3 and
// Mistral 7B from later models.
constexpr const char* kByHand =
    "write the turns into --prompt yourself, as the model was trained to see them";
constexpr const char *kByteToken = "<0x0A>", *kOlmo2 = "olmo2";
constexpr ChatTemplate kTemplates[] = {
    {.name = "OLMo 2",
     .tells = "<|endoftext|>",
     .family = kOlmo2,
     .first = "<|endoftext|>",
     .before = "<|user|>\n",
     .after = "\n<|assistant|>\n",
     .end = "<|endoftext|>",
     .between = "\n"},
    {.name = "DeepSeek-R1",
     .tells = "<｜Assistant｜>",
     .before = "<｜User｜>",
     .after = "<｜Assistant｜>",
     .opens = "<think>\n",
     .end = "<｜end▁of▁sentence｜>",
     .behind_thoughts = ""},
    {.name = "Llama 3",
     .tells = "<|start_header_id|>",
     .before = "<|start_header_id|>user<|end_header_id|>\n\n",
     .after = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
     .end = "<|eot_id|>",
     .trims = true},
    {.name = "Phi-4",
     .tells = "<|im_sep|>",
     .before = "<|im_start|>user<|im_sep|>",
     .after = "<|im_end|><|im_start|>assistant<|im_sep|>",
     .end = "<|im_end|>"},
    {.name = "ChatML",
     .tells = "<|im_start|>",
     .before = "<|im_start|>user\n",
     .after = "<|im_end|>\n<|im_start|>assistant\n",
     .end = "<|im_end|>",
     .between = "\n",
     .behind_thoughts = "\n"},
    {.name = "Gemma",
     .tells = "<start_of_turn>",
     .before = "<start_of_turn>user\n",
     .after = "<end_of_turn>\n<start_of_turn>model\n",
     .end = "<end_of_turn>",
     .between = "\n",
     .trims = true},
    {.name = "Phi-3",
     .tells = "<|assistant|>",
     .also = kByteToken,
     .before = "<|user|>\n",
     .after = "<|end|>\n<|assistant|>\n",
     .end = "<|end|>",
     .between = "\n"},
    {.name = "Phi-4-mini",
     .tells = "<|assistant|>",
     .before = "<|user|>",
     .after = "<|end|><|assistant|>",
     .end = "<|end|>"},
    {.name = "Mistral",
     .tells = "[INST]",
     .also = kByteToken,
     .before = "[INST] ",
     .after = "[/INST]",
     .end = "</s>",
     .leads = " "},
    {.name = "Mistral Nemo", .tells = "[INST]", .before = "[INST]", .after = "[/INST]", .end = "</s>"},
};

// Finds the template of a model. If the model has its own template, that must also mention the identifying
// token: fine-tunes keep the vocabulary of their base model, but may use another template.
const ChatTemplate& template_of(const Tokenizer& tokenizer, std::string_view family,
                                const TemplateTexts& own) {
  const auto has = [&](const char* token) { return token == nullptr || tokenizer.id_of_token(token) >= 0; };
  std::string known;
  for (const ChatTemplate& form : kTemplates) {
    // The vocabulary of OLMo 2 has ChatML's tokens, which it does not use.
    const bool fits = form.family != nullptr ? family == form.family
                                             : family != kOlmo2 && has(form.tells) && has(form.also) &&
                                                   (own.empty() || own.names(form.tells));
    if (fits) return form;
    known += fmt::format("{}{} ({})", known.empty() ? "" : ", ", form.name, form.tells);
  }
  throw Error(Errc::kUsage, "--chat",
              (own.empty() ? "the model's vocabulary has the tokens of no known template: "
                           : "the model's own template is none of the known ones: ") +
                  known,
              kByHand);
}

[[noreturn]] void refuse(const char* why) {
  throw Error(Errc::kUsage, "--chat", std::string("the model's own template ") + why, kByHand);
}

// The length of the Unicode blank, such as templates trim, at the beginning of the text, or at its end; 0:
// none.
std::size_t blank_at(std::string_view text, bool end) {
  static constexpr std::string_view kBlanks[] = {
      " ",      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",
      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
      "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  for (const std::string_view blank : kBlanks) {
    if (end ? text.ends_with(blank) : text.starts_with(blank)) return blank.size();
  }
  return 0;
}

std::string trimmed(std::string_view text) {
  while (const std::size_t n = blank_at(text, false)) text.remove_prefix(n);
  while (const std::size_t n = blank_at(text, true)) text.remove_suffix(n);
  return std::string(text);
}

void append(std::vector<std::int32_t>& to, const std::vector<std::int32_t>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

Chat::Chat(const Tokenizer& tokenizer, std::string_view family, const TemplateTexts& own,
           const std::string& today)
    : tokenizer_(tokenizer),
      form_(template_of(tokenizer, family, own)),
      end_id_(tokenizer.id_of_token(form_.end)),
      opens_(form_.opens),
      leads_(form_.leads),
      thinks_(own.empty() || own.contains("</think>")),
      ids_(tokenizer.begin_ids()) {
  // The tokenizer must also recognise the tokens within a text; one made only from tokenizer.model does not.
  const std::vector<std::int32_t> end = tokenizer.encode(form_.end);
  if (end_id_ < 0 || std::find(end.begin(), end.end(), end_id_) == end.end()) {
    throw Error(
        Errc::kUsage, "--chat",
        fmt::format("the turns of {} end with {}, which the model's tokenizer does not find in a text",
                    form_.name, form_.end),
        "put the model's tokenizer.json there, or write the turns into --prompt yourself");
  }
  const std::int32_t first = *form_.first == '\0' ? -1 : tokenizer.id_of_token(form_.first);
  if (first >= 0 && (ids_.empty() || ids_.back() != first)) ids_.push_back(first);
  if (!own.empty()) read_own(own, today);
}

// Reads texts from the model's own template. The token that begins a text is used only if the template writes
// it. Some templates put a system message before conversations without one (Llama 3's since 3.1: two dates).
// Templates of reasoning models may open the model's turn with <think>.
void Chat::read_own(const TemplateTexts& own, const std::string& today) {
  constexpr const char* kThinks = "<think>\n";
  if (!own.names("bos_token") && !ids_.empty() && !own.contains(tokenizer_.decode(ids_))) ids_.clear();
  const auto puts = [&](const std::string& begin, const std::string& end, const char* behind) {
    const std::string system = own.between(begin, end);
    if (!system.empty()) system_ = begin + system + end + behind;
  };
  const std::string form = form_.name;
  if (form == "ChatML") {
    puts("<|im_start|>system\n", "<|im_end|>", "\n");
    if (own.contains(std::string("<|im_start|>assistant\n") + kThinks)) opens_ = kThinks;
  } else if (form == "Phi-4") {
    puts("<|im_start|>system<|im_sep|>", "<|im_end|>", "");
  } else if (form == "Phi-4-mini") {
    const std::string system = own.behind("<|system|>");
    if (!system.empty()) system_ = "<|system|>" + system + form_.end;
  } else if (form == "DeepSeek-R1") {
    if (!own.contains(kThinks)) opens_.clear();
  } else if (form == "Llama 3" && own.contains("Today Date: ")) {
    const std::string known = own.between("Cutting Knowledge Date: ", "\n");
    const std::string date = own.names("strftime_now") ? today : own.date();
    system_ = "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: " + known +
              "\nToday Date: " + date + "\n\n<|eot_id|>";
  } else if (form == "Llama 3" && own.contains("<|start_header_id|>system<|end_header_id|>")) {
    log::warning(
        "--chat: the model's own template speaks of a system's message; if it puts one before every "
        "conversation, the model misses it here");
  } else if (form.starts_with("Mistral")) {
    if (own.contains("[SYSTEM_PROMPT]"))
      refuse("puts a message of the system, made of dates, before the turns");
    if (own.contains(" [/INST]")) refuse("has the blanks of Mistral's first models around its tokens");
    if (own.has_text(" ")) leads_ = " ";
  }
}

// The text between two turns is encoded together with the end of the first turn and the beginning of the
// second, since a token may include the blanks next to it.
const std::vector<std::int32_t>& Chat::ask(const std::string& text) {
  std::string said = form_.before + (form_.trims ? trimmed(text) : text) + form_.after;
  said = (answered_ ? std::string(form_.end) + form_.between : system_) + said;
  append(ids_, tokenizer_.encode(said));
  const std::vector<std::int32_t> opens = tokenizer_.encode(opens_);
  opened_ = opens.size();
  append(ids_, opens);
  return ids_;
}

std::vector<std::int32_t> Chat::without_thoughts(std::vector<std::int32_t> ids) const {
  const std::int32_t id =
      form_.behind_thoughts == nullptr || !thinks_ ? -1 : tokenizer_.id_of_token("</think>");
  const auto end = std::find(ids.rbegin(), ids.rend(), id);
  if (id < 0 || end == ids.rend()) return ids;
  ids.erase(ids.begin(), end.base());
  const std::string text = tokenizer_.decode(ids);
  const std::size_t begin = std::min(text.find_first_not_of(form_.behind_thoughts), text.size());
  return begin == 0 ? ids : tokenizer_.encode(text.substr(begin));
}

std::vector<std::int32_t> Chat::without_blanks(std::vector<std::int32_t> ids) const {
  if (!form_.trims) return ids;
  const std::string text = tokenizer_.decode(ids), rest = trimmed(text);
  return rest.size() == text.size() ? ids : tokenizer_.encode(rest);
}

// Encodes the lead together with the token before it, since after a token a SentencePiece tokenizer may
// encode a blank differently.
std::vector<std::int32_t> Chat::behind_lead(std::vector<std::int32_t> ids) const {
  if (leads_ == nullptr) return ids;
  const std::vector<std::int32_t> before = tokenizer_.encode(form_.after),
                                  all = tokenizer_.encode(form_.after +
                                                          (leads_ + trimmed(tokenizer_.decode(ids))));
  const bool follows = all.size() >= before.size() && std::equal(before.begin(), before.end(), all.begin());
  if (!follows) return ids;
  return {all.begin() + static_cast<std::ptrdiff_t>(before.size()), all.end()};
}

void Chat::answered(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& ends) {
  const auto ends_it = [&](std::int32_t id) {
    return id == end_id_ || std::find(ends.begin(), ends.end(), id) != ends.end();
  };
  const bool ended = !ids.empty() && ends_it(ids.back());
  ids_.resize(ids_.size() - opened_);
  opened_ = 0;
  append(ids_, behind_lead(without_blanks(without_thoughts({ids.begin(), ids.end() - (ended ? 1 : 0)}))));
  answered_ = true;
}

}  // namespace zg::cli
