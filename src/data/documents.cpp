#include "data/documents.hpp"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "data/token_description.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {
namespace {

using Json = nlohmann::json;

constexpr const char* kExpected =
    "an object with \"text\", or with \"tokens\" or \"input_ids\" and perhaps \"labels\" or \"loss_mask\", "
    "is expected; "
    "tools/prepare.py makes tokens of other data";

[[noreturn]] void fail(const std::string& name, const std::string& what) {
  throw Error(Errc::kUsage, name, what, kExpected);
}

std::vector<std::int64_t> numbers(const Json& from, const char* key, const std::string& name) {
  if (!from.is_array()) fail(name, fmt::format("\"{}\" is no list of numbers", key));
  std::vector<std::int64_t> values;
  values.reserve(from.size());
  for (const Json& value : from) {
    if (!value.is_number_integer())
      fail(name, fmt::format("\"{}\" has {} at place {}, a whole number is expected", key,
                             value.is_number() ? value.dump() : value.type_name(), values.size()));
    values.push_back(value.get<std::int64_t>());
  }
  return values;
}

void read_mask(const Json& root, const std::string& name, Document& out) {
  for (const char* key : {"labels", "loss_mask"}) {
    const auto found = root.find(key);
    if (found == root.end()) continue;
    if (!out.mask.empty()) fail(name, "has both \"labels\" and \"loss_mask\"");
    const std::vector<std::int64_t> values = numbers(*found, key, name);
    if (values.size() != out.ids.size())
      fail(name, fmt::format("\"{}\" has {} numbers for {} tokens", key, values.size(), out.ids.size()));
    const bool labels = std::string_view(key) == "labels";
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool target = labels ? values[i] != MaskFile::kIgnored : values[i] != 0;
      const bool known = labels ? !target || values[i] == out.ids[i] : values[i] == 0 || values[i] == 1;
      if (!known) {
        fail(name, fmt::format("\"{}\" has {} at place {}; {} is expected", key, values[i], i,
                               labels ? fmt::format("-100 or the token itself, {},", out.ids[i]) : "0 or 1"));
      }
      // Nothing comes before the first token from which it could be predicted.
      out.mask.push_back(target && i > 0);
    }
  }
}

}  // namespace

DocumentReader::DocumentReader(const TextTokenizer& tokenizer, const std::string& end)
    : tokenizer_(tokenizer), begin_(tokenizer.begin_ids()), end_(tokenizer.end_ids()) {
  if (end.empty()) return;
  const std::int32_t id = tokenizer.id_of_token(end);
  if (id < 0) {
    throw Error(Errc::kUsage, "data.document_end",
                fmt::format("found \"{}\", which is no token of this tokenizer", end),
                "a name such as <|endoftext|> or </s>, as the tokenizer's vocabulary has it");
  }
  end_.push_back(id);
}

void DocumentReader::read(std::string_view line, const std::string& name, Document& out) const {
  out.ids.clear(), out.mask.clear();
  Json root;
  try {
    root = Json::parse(line);
  } catch (const Json::exception& e) {
    fail(name, fmt::format("is no JSON: {}", e.what()));
  }
  if (!root.is_object()) fail(name, fmt::format("is {}, no JSON object", root.type_name()));
  const bool text = root.contains("text"), tokens = root.contains("tokens"), ids = root.contains("input_ids");
  if (text + tokens + ids != 1)
    fail(name, text + tokens + ids == 0 ? "has no \"text\", \"tokens\" or \"input_ids\""
                                        : "has more than one of \"text\", \"tokens\" and \"input_ids\"");
  if (text) {
    if (!root["text"].is_string())
      fail(name, fmt::format("\"text\" is {}, no text", root["text"].type_name()));
    for (const char* key : {"labels", "loss_mask"}) {
      if (root.contains(key) && root[key].is_array())
        fail(name,
             fmt::format("has \"{}\" beside \"text\", of which nobody knows yet what tokens it has", key));
    }
    out.ids = begin_;
    tokenizer_.append(root["text"].get_ref<const std::string&>(), {.where = name}, out.ids);
    out.ids.insert(out.ids.end(), end_.begin(), end_.end());
    return;
  }
  const char* key = tokens ? "tokens" : "input_ids";
  for (const std::int64_t id : numbers(root[key], key, name)) {
    if (id < 0 || id >= tokenizer_.vocab_size())
      fail(name, fmt::format("\"{}\" has the token {}; the tokenizer has 0 to {}", key, id,
                             tokenizer_.vocab_size() - 1));
    out.ids.push_back(static_cast<std::int32_t>(id));
  }
  read_mask(root, name, out);
}

void for_each_document(const std::string& path, const Tokenizer& tokenizer,
                       const std::function<bool(std::int64_t number, const Document& document)>& visit) {
  const auto& encoder = dynamic_cast<const TextTokenizer&>(tokenizer);
  Document document;
  if (std::filesystem::path(path).extension() != ".jsonl") {
    const std::string text = read_text_file(path, "a text");
    document.ids = encoder.begin_ids();
    encoder.append(text, {.where = path}, document.ids);
    const std::vector<std::int32_t> end = encoder.end_ids();
    document.ids.insert(document.ids.end(), end.begin(), end.end());
    (void)visit(1, document);
    return;
  }
  std::ifstream file(path);
  if (!file)
    throw Error(Errc::kUsage, path, "cannot be read: " + errno_text(errno), "name a file of documents");
  const DocumentReader reader(encoder, "");
  std::int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    reader.read(line, fmt::format("{}:{}", path, number), document);
    if (!visit(number, document)) return;
  }
  if (file.bad()) throw Error(Errc::kIo, path, "cannot be read to its end: " + errno_text(errno));
}

}  // namespace zg
