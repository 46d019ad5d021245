#include "data/other_records.hpp"

#include <nlohmann/json.hpp>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

constexpr const char* kPrepare =
    "python3 tools/prepare.py --tokenizer MODEL_DIRECTORY --out data/train FILE.jsonl makes tokens of them: "
    "data.train is then data/train.bin";

struct Form {
  const char *key, *beside;  // beside: a second key, or null
  const char *what, *hint;
};

constexpr Form kForms[] = {
    {"messages", nullptr, "a chat (\"messages\")", kPrepare},
    {"prompt", "completion", "a prompt with its completion", kPrepare},
    {"prompt", "chosen", "a pair of answers for preference training, which ziggurat does not have",
     "give prompts and completions to tools/prepare.py: jq -c '{prompt, completion: .chosen}'"},
    {"instruction", "output", "an instruction with its output (Alpaca)",
     "make prompts and completions of them, and tokens of these: jq -c '.[]? // . | {prompt: (.instruction + "
     "\"\\n\" + (.input // \"\") + \"\\n\"), completion: .output}' FILE > FILE.jsonl, then python3 "
     "tools/prepare.py --tokenizer MODEL_DIRECTORY --out data/train FILE.jsonl"},
    {"conversations", nullptr, "a chat (\"conversations\", ShareGPT)",
     "make messages of them, and tokens of these: jq -c '.[]? // . | {messages: [.conversations[] | {role: "
     "({human: \"user\", gpt: \"assistant\"}[.from] // .from), content: .value}]}' FILE > FILE.jsonl, then "
     "python3 tools/prepare.py --tokenizer MODEL_DIRECTORY --out data/train FILE.jsonl"},
};

constexpr const char* kExpected =
    "an object with \"text\", or with \"tokens\" or \"input_ids\" and perhaps \"labels\" or \"loss_mask\", "
    "is "
    "expected; tools/prepare.py makes tokens of other data";

}  // namespace

void refuse_record(const nlohmann::json& record, const std::string& name) {
  for (const Form& form : kForms) {
    if (!record.contains(form.key) || (form.beside != nullptr && !record.contains(form.beside))) continue;
    throw Error(Errc::kUsage, name,
                fmt::format("is {}, and has no \"text\", \"tokens\" or \"input_ids\"", form.what), form.hint);
  }
  // A message names few keys, and none of them is long.
  constexpr std::size_t kLongestKey = 60, kMostKeys = 8;
  std::string texts, only, lists;
  std::size_t count = 0;
  for (const auto& [key, value] : record.items()) {
    if (key.size() > kLongestKey) continue;
    if (value.is_string() && ++count <= kMostKeys)
      texts += fmt::format("{}\"{}\"", texts.empty() ? "" : ", ", key), only = key;
    if (value.is_array() && !value.empty() && value.front().is_object()) lists = key;
  }
  if (count > kMostKeys) texts += fmt::format(" and {} more", count - kMostKeys);
  std::string hint = kExpected;
  if (!lists.empty()) {
    hint =
        fmt::format("if the documents are the list \"{0}\": jq -c '.[\"{0}\"][]' FILE > FILE.jsonl", lists);
  } else if (!only.empty()) {
    hint = fmt::format("if \"{0}\" is the text: jq -c '.[]? // . | {{text: .[\"{0}\"]}}' FILE > FILE.jsonl",
                       only);
  }
  throw Error(
      Errc::kUsage, name,
      "has no \"text\", \"tokens\" or \"input_ids\"" + (texts.empty() ? "" : "; of texts it has " + texts),
      hint);
}

}  // namespace zg
