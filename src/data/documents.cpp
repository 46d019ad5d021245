#include "data/documents.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "data/other_records.hpp"
#include "data/text_file.hpp"
#include "data/token_description.hpp"
#include "data/tokens.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"

namespace zg {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMostNumber = std::uint64_t{1} << 62;

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
                             value.is_number() ? value.dump()
                             : value.is_null() ? "null or NaN"
                                               : value.type_name(),
                             values.size()));
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > kMostNumber)
      fail(name,
           fmt::format("\"{}\" has {} at place {}, beyond all tokens", key, value.dump(), values.size()));
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

void DocumentReader::take_text(const std::string& text, const std::string& name, Document& out) const {
  out.ids = begin_;
  tokenizer_.append(text, {.where = name}, out.ids);
  out.ids.insert(out.ids.end(), end_.begin(), end_.end());
}

void DocumentReader::read(const Record& record, Document& out) const {
  const std::string& name = record.name;
  out.ids.clear(), out.mask.clear();
  const Json root = parse_record(record, kExpected);
  if (!root.is_object()) fail(name, fmt::format("is {}, no JSON object", root.type_name()));
  const bool text = root.contains("text"), tokens = root.contains("tokens"), ids = root.contains("input_ids");
  if (text + tokens + ids == 0) refuse_record(root, name);
  if (text + tokens + ids > 1) fail(name, "has more than one of \"text\", \"tokens\" and \"input_ids\"");
  if (text) {
    const Json& value = root["text"];
    if (!value.is_string())
      fail(name, fmt::format("\"text\" is {}, no text", value.is_null() ? "null or NaN" : value.type_name()));
    for (const char* key : {"labels", "loss_mask"}) {
      if (root.contains(key) && root[key].is_array())
        fail(name,
             fmt::format("has \"{}\" beside \"text\", of which nobody knows yet what tokens it has", key));
    }
    return take_text(value.get_ref<const std::string&>(), name, out);
  }
  const char* key = tokens ? "tokens" : "input_ids";
  for (const std::int64_t id : numbers(root[key], key, name)) {
    if (id < 0 || id >= tokenizer_.vocab_size()) {
      throw Error(Errc::kUsage, name,
                  fmt::format("\"{}\" has the token {}; the tokenizer has 0 to {}", key, id,
                              tokenizer_.vocab_size() - 1),
                  "name the tokenizer that these numbers are of as data.tokenizer (\"bytes\" unless given), "
                  "e.g. {\"file\": \"tokenizer.json\"}");
    }
    out.ids.push_back(static_cast<std::int32_t>(id));
  }
  read_mask(root, name, out);
}

namespace {

using Visit = std::function<bool(std::int64_t number, const Document& document)>;

void visit_records(const TextFile& file, const TextTokenizer& tokenizer, const Visit& visit) {
  const DocumentReader reader(tokenizer, "");
  RecordReader records(file.kind(), file.path(), 0, 0);
  Document document;
  bool goes_on = true;
  std::int64_t number = 0;
  file.for_pieces(
      file.begin(), file.size(), file.begin(), [&](std::string_view text) { return records.whole(text); },
      [&](std::string_view piece, const TextPlace&) {
        for (const Record& record : records.take(piece)) {
          reader.read(record, document);
          ++number;
          goes_on = visit(file.kind() == DataKind::kLines ? record.line : number, document);
          if (!goes_on) return false;
        }
        return true;
      });
  if (goes_on) records.finish();
}

// The documents of a token file; all of it is one where nothing beside it says where they begin.
void visit_tokens(const std::string& path, const TextTokenizer& tokenizer, const Visit& visit) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 28;  // of a document, which memory must hold
  const Tokens tokens = open_raw_tokens(path, {});
  const auto starts = open_documents(path, tokens.file->size());
  const std::int64_t count = starts ? starts->count() : 1;
  Document document;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::vector<std::int64_t> ends =
        starts ? starts->starts(i, 1) : std::vector<std::int64_t>{0, tokens.file->size()};
    const std::int64_t n = ends[1] - ends[0];
    if (n > kMostTokens) {
      throw Error(Errc::kUsage, path,
                  fmt::format("document {} has {} tokens, {} at most are taken", i + 1, n, kMostTokens),
                  starts ? "" : "nothing beside it says where its documents begin (NAME.idx or NAME.docs)");
    }
    document.ids.resize(static_cast<std::size_t>(n));
    tokens.file->read(ends[0], n, document.ids.data());
    check_token_ids(tokens, ends[0], document.ids, tokenizer.vocab_size(), "tokenizer's");
    document.mask.clear();
    if (tokens.mask) {
      document.mask.resize(document.ids.size());
      tokens.mask->read(ends[0], n, document.mask.data());
    }
    if (!visit(i + 1, document)) return;
  }
}

}  // namespace

void for_each_document(const std::string& path, const Tokenizer& tokenizer, const Visit& visit) {
  const auto& encoder = dynamic_cast<const TextTokenizer&>(tokenizer);
  const DataKind kind = kind_of_data(path);
  if (!named_so(path, kind)) log::info("data: {} is taken as {}", path, name_of(kind));
  if (kind == DataKind::kTokens) return visit_tokens(path, encoder, visit);
  const TextFile file(path);
  if (file.documents()) return visit_records(file, encoder, visit);
  Document document;
  std::string text = read_text_file(path, "a text");
  text.erase(0, static_cast<std::size_t>(file.begin()));
  check_no_zeros(text, path, file.begin());
  document.ids = encoder.begin_ids();
  encoder.append(text, {.where = path, .offset = file.begin()}, document.ids);
  const std::vector<std::int32_t> end = encoder.end_ids();
  document.ids.insert(document.ids.end(), end.begin(), end.end());
  (void)visit(1, document);
}

}  // namespace zg
