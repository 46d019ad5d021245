#include "data/token_description.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/file_kind.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/system.hpp"

namespace zg {
namespace {

std::string beside(const std::string& bin_path, const char* extension) {
  return std::filesystem::path(bin_path).replace_extension(extension).string();
}

// What cannot be looked at counts as there, so that opening it says why.
bool is_there(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::status(path, ignored).type() != std::filesystem::file_type::not_found;
}

std::int64_t size_of_tokens(const std::string& path) {
  return open_data(path, "a token file").bytes();
}

// --- Megatron's index ----------------------------------------------------------------------------
// "MMIDIDX\0\0", version 1 (8 bytes), type (1), sequences n (8), document ends m (8), then n lengths (4), n
// places in bytes (8), and m numbers of sequences (8), where documents begin; perhaps n modes (1).

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr std::int64_t kHeaderBytes = 34, kAtOnce = 1 << 16, kMostTokens = std::int64_t{1} << 56;

class MegatronIndex {
 public:
  explicit MegatronIndex(const std::string& path)
      : path_(path), file_(open_data(path, "an index")), size_(file_.bytes()) {}

  TokenDescription read(const std::string& bin_path) {
    char header[kHeaderBytes];
    if (size_ < kHeaderBytes)
      fail(fmt::format("has {} bytes; the header of an index has {}", size_, kHeaderBytes));
    file_.read(header, kHeaderBytes, 0);
    if (std::memcmp(header, kMagic, sizeof kMagic) != 0) fail("does not begin with MMIDIDX");
    std::int64_t version, sequences, documents;
    std::memcpy(&version, header + 9, 8);
    std::memcpy(&sequences, header + 18, 8);
    std::memcpy(&documents, header + 26, 8);
    if (version != 1) fail(fmt::format("has version {}; 1 is read", version));
    const TokenDescription found{.dtype = dtype_of(static_cast<unsigned char>(header[17]))};
    if (sequences < 0 || documents < 0 || sequences > kMostTokens / 16 || documents > kMostTokens / 16)
      fail(fmt::format("says that it has {} sequences and {} documents", sequences, documents));
    const std::int64_t bytes = kHeaderBytes + 12 * sequences + 8 * documents;
    if (size_ != bytes && size_ != bytes + sequences)
      fail(fmt::format("has {} bytes; for {} sequences and {} documents {} are expected", size_, sequences,
                       documents, bytes));
    const auto width = static_cast<std::int64_t>(size_of(found.dtype));
    const std::int64_t tokens = check_sequences(sequences, width), data = size_of_tokens(bin_path);
    if (data != tokens * width)
      fail(fmt::format("says that {} has {} tokens of {} bytes, and it has {} bytes", bin_path, tokens, width,
                       data));
    TokenDescription result = found;
    result.tokens = tokens;
    format_ = {.count = documents - 1,
               .at = kHeaderBytes + 12 * sequences,
               .places_at = kHeaderBytes + 4 * sequences,
               .sequences = sequences,
               .width = width};
    return result;
  }
  // After read().
  std::shared_ptr<const DocumentIndex> documents(std::int64_t tokens) const {
    if (format_.count < 0) fail("does not say where documents begin");
    auto index = std::make_shared<const DocumentIndex>(open_data(path_, "an index"), format_, tokens);
    if (index->starts(0, 0).front() != 0 || index->starts(format_.count, 0).front() != tokens)
      fail(fmt::format("says that its documents do not begin at token 0 or do not end at token {}", tokens));
    return index;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(
        Errc::kUsage, path_, what,
        "a Megatron data set's NAME.idx is expected beside its NAME.bin; take another file away from there");
  }
  DType dtype_of(int code) const {
    if (code == 8) return DType::kU16;
    if (code == 4) return DType::kI32;
    fail(fmt::format("says that tokens are of type {}; 8 (uint16) and 4 (int32) are read", code));
  }

  // The sequences lie one behind the other. Returns their tokens.
  std::int64_t check_sequences(std::int64_t sequences, std::int64_t width) const {
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(std::min(sequences, kAtOnce)));
    std::vector<std::int64_t> places(lengths.size());
    std::int64_t tokens = 0;
    for (std::int64_t done = 0; done < sequences; done += kAtOnce) {
      const std::int64_t n = std::min(kAtOnce, sequences - done);
      file_.read(lengths.data(), 4 * n, kHeaderBytes + 4 * done);
      file_.read(places.data(), 8 * n, kHeaderBytes + 4 * sequences + 8 * done);
      if (interrupted()) throw Error(Errc::kInterrupted, path_, "interrupted while it was checked");
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int32_t length = lengths[static_cast<std::size_t>(i)];
        const std::int64_t place = places[static_cast<std::size_t>(i)];
        if (length < 0) fail(fmt::format("sequence {} has the length {}", done + i, length));
        if (place != tokens * width)
          fail(fmt::format("sequence {} begins at byte {}; {} is expected, behind the one before it",
                           done + i, place, tokens * width));
        tokens += length;
        if (tokens > kMostTokens) fail(fmt::format("has more than {} tokens", kMostTokens));
      }
    }
    return tokens;
  }

  std::string path_;
  InputFile file_;
  std::int64_t size_;
  DocumentIndex::Format format_ = {};
};

// --- our description -----------------------------------------------------------------------------

constexpr std::int64_t kMostDescription = 1 << 20;

// Another program's NAME.json may lie there, of any size, so only one with our format counts, which stands in
// its begin.
bool is_description(const std::string& path) {
  const InputFile file = open_data(path, "the description of a token file");
  std::string head(static_cast<std::size_t>(std::min<std::int64_t>(file.bytes(), 1 << 16)), '\0');
  file.read(head.data(), static_cast<std::int64_t>(head.size()), 0);
  return head.find("ziggurat tokens") != head.npos;
}

TokenDescription read_description(const std::string& path, const std::string& bin_path) {
  constexpr const char* kWhat = "the description of a token file";
  const auto root =
      parse_json(read_text_file(path, kWhat, kMostDescription), path,
                 "tools/prepare.py writes such descriptions; take another file away from there");
  const auto fail = [&](const std::string& what) -> Error {
    return {Errc::kUsage, path, what,
            "tools/prepare.py writes such descriptions; take another file away from there"};
  };
  if (!root.is_object() || root.value("format", nlohmann::json()) != "ziggurat tokens")
    throw fail("is no description of a token file (\"format\": \"ziggurat tokens\")");
  if (root.value("version", nlohmann::json()) != 1)
    throw fail(fmt::format("version {} found, 1 expected", root.value("version", nlohmann::json()).dump()));
  const auto type = root.value("dtype", nlohmann::json());
  if (type != "uint16" && type != "uint32")
    throw fail(fmt::format("dtype {} found, \"uint16\" or \"uint32\" expected", type.dump()));
  TokenDescription found{.dtype = type == "uint16" ? DType::kU16 : DType::kI32};
  const auto tokens = root.value("tokens", nlohmann::json());
  if (!tokens.is_number_integer() || tokens < 0 || tokens > kMostTokens)
    throw fail(fmt::format("tokens {} found, a whole number expected", tokens.dump()));
  found.tokens = tokens.get<std::int64_t>();
  const std::int64_t bytes = size_of_tokens(bin_path),
                     width = static_cast<std::int64_t>(size_of(found.dtype));
  if (found.tokens > bytes / width || bytes != found.tokens * width)
    throw fail(fmt::format("says that {} has {} tokens of {} bytes, and it has {} bytes", bin_path,
                           found.tokens, width, bytes));
  const auto mask = root.value("mask", nlohmann::json(false));
  if (!mask.is_boolean()) throw fail(fmt::format("mask {} found, true or false expected", mask.dump()));
  if (mask == true) found.mask = std::make_shared<const MaskFile>(beside(bin_path, ".mask"), found.tokens);
  return found;
}

}  // namespace

MaskFile::MaskFile(const std::string& path, std::int64_t tokens) : file_(open_data(path, "a loss mask")) {
  if (file_.bytes() == tokens) return;
  throw Error(Errc::kUsage, path,
              fmt::format("has {} bytes; one for each of {} tokens is expected", file_.bytes(), tokens),
              "make the tokens and their mask anew, together");
}

std::int64_t MaskFile::apply(std::int64_t first, std::int64_t n, std::int32_t* targets) const {
  std::uint8_t mask[4096];
  std::int64_t kept = 0;
  for (std::int64_t done = 0; done < n; done += static_cast<std::int64_t>(sizeof mask)) {
    const std::int64_t count = std::min<std::int64_t>(n - done, sizeof mask);
    read(first + done, count, mask);
    for (std::int64_t i = 0; i < count; ++i) {
      if (mask[i] == 0) targets[done + i] = kIgnored;
      kept += mask[i] != 0;
    }
  }
  return kept;
}

TokenDescription describe_tokens(const std::string& bin_path, DType otherwise) {
  const std::string index = beside(bin_path, ".idx"), description = beside(bin_path, ".json");
  if (is_there(index)) return MegatronIndex(index).read(bin_path);
  if (is_there(description) && is_description(description)) return read_description(description, bin_path);
  return {.dtype = otherwise};
}

std::shared_ptr<const DocumentIndex> open_documents(const std::string& bin_path, std::int64_t tokens) {
  const std::string index = beside(bin_path, ".idx"), places = beside(bin_path, ".docs");
  if (is_there(index)) {
    MegatronIndex megatron(index);
    megatron.read(bin_path);
    return megatron.documents(tokens);
  }
  return is_there(places) ? DocumentIndex::open_docs(places, tokens) : nullptr;
}

}  // namespace zg
