#include "data/sources.hpp"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "data/token_cache.hpp"
#include "data/tokens.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg {
namespace {

// Cuts the last share of the tokens off; of a file whose documents are known, whole documents.
Split cut_off(Split& all, double share) {
  Split rest = all;
  all.count = static_cast<std::int64_t>(static_cast<double>(rest.count) * (1 - share));
  if (all.documents) {
    all.document_count = all.documents->first_from(all.count);
    all.count = all.documents->starts(all.document_count, 0).front();
    rest.first_document = all.document_count, rest.document_count -= all.document_count;
  }
  rest.first = all.count, rest.count -= all.count;
  return rest;
}

class Opener {
 public:
  Opener(const DataConfig& config, const std::string& cache_dir) : config_(config), cache_dir_(cache_dir) {
    blend_ = config.blend;
    if (blend_.empty()) blend_.push_back({.paths = {config.train}});
    for (const DataSource& source : blend_) {
      if (source.paths.empty() || !(source.weight > 0)) {
        throw Error(
            Errc::kUsage, key_,
            fmt::format("a source of {} files with the weight {}", source.paths.size(), source.weight),
            "each names a file or more, and has a weight above 0");
      }
      files_.emplace_back();
      for (const std::string& path : source.paths) {
        const std::vector<std::string> found = files_of(path);
        files_.back().insert(files_.back().end(), found.begin(), found.end());
      }
      count_ += files_.back().size();
    }
    check_kinds();
  }

  Sources run() {
    const bool tokens = has_tokens(first());
    sources_.tokens_known_below = !tokens;
    sources_.taken_as = taken_as();
    if (tokens) take_tokenizer();
    for (std::size_t i = 0; i < files_.size(); ++i) {
      sources_.list.push_back({.weight = blend_[i].weight});
      Source& source = sources_.list.back();
      for (const std::string& file : files_[i]) tokens ? add_tokens(source, file) : add_text(source, file);
    }
    if (!config_.validation.empty() && (tokens || count_ > 1)) {
      Split validation = tokens ? open_tokens(config_.validation)
                                : tokenise(config_.validation, 0, folder_of(config_.validation)).front();
      sources_.list.front().validation.push_back(std::move(validation));
    }
    std::int64_t train = 0, validation = 0;
    bool counted = true;
    std::int64_t documents = 0;
    for (const Source& source : sources_.list) {
      for (const Split& s : source.train) {
        train += s.count, documents += s.document_count;
        counted = counted && s.document_count > 0;
      }
      for (const Split& s : source.validation) validation += s.count;
    }
    if (tokens || count_ > 1) {
      log::info("data: {} training and {} validation tokens in {}, {}", train, validation,
                count_ == 1 ? "a token file" : fmt::format("{} files", count_),
                sources_.tokenizer ? "tokenizer " + sources_.tokenizer->identity() : "no tokenizer");
    }
    if (counted) sources_.documents = documents;
    return std::move(sources_);
  }

 private:
  bool packs() const { return config_.packing == Packing::kDocuments; }
  const std::string& first() const { return files_.front().front(); }
  double share() const { return config_.validation.empty() ? config_.validation_share : 0; }

  bool has_tokens(const std::string& file) const { return kinds_.at(file) == DataKind::kTokens; }

  void check_kinds() {
    for (const auto& files : files_) {
      for (const std::string& file : files) kinds_.emplace(file, kind_of_data(file));
    }
    if (!config_.validation.empty()) kinds_.emplace(config_.validation, kind_of_data(config_.validation));
    const bool tokens = has_tokens(first());
    const auto check = [&](const std::string& file, const char* key) {
      if (!named_so(file, kinds_.at(file)))
        log::info("data: {} is taken as {}", file, name_of(kinds_.at(file)));
      if (has_tokens(file) == tokens) return;
      throw Error(Errc::kUsage, key,
                  fmt::format("{} is a {}, while {} is a {}", file, tokens ? "text" : "token file", first(),
                              tokens ? "token file" : "text"),
                  "all must be of one kind, so that their tokens mean the same");
    };
    for (const auto& files : files_) {
      for (const std::string& file : files) check(file, key_);
    }
    if (!config_.validation.empty()) check(config_.validation, "data.validation");
    if (count_ > 1 && !tokens && config_.tokenizer.kind == TokenizerConfig::Kind::kChars) {
      throw Error(Errc::kUsage, "data.tokenizer",
                  fmt::format("\"chars\" takes its vocabulary from one text, here are {}", count_),
                  "\"bytes\", {\"gpt2\": \"directory\"} or {\"file\": \"tokenizer.json\"}");
    }
  }

  std::string taken_as() const {
    if (count_ == 1) return has_tokens(first()) ? "a token file" : name_of(kinds_.at(first()));
    return fmt::format("{} {}", count_, has_tokens(first()) ? "token files" : "files of text");
  }

  void take_tokenizer() {
    const TokenizerConfig& t = config_.tokenizer;
    if (t.kind == TokenizerConfig::Kind::kGpt2 || t.kind == TokenizerConfig::Kind::kFile) {
      sources_.tokenizer = make_named_tokenizer(t);
    } else {
      sources_.tokenizer = load_text_tokenizer(folder_beside(first()));
      check_tokenizers();
    }
  }
  static std::string folder_beside(const std::string& file) {
    const std::string folder = std::filesystem::path(file).parent_path().string();
    return folder.empty() ? "." : folder;
  }
  // Token files that have tokenizers beside them have the same.
  void check_tokenizers() const {
    std::vector<std::string> others;
    for (const auto& files : files_) others.insert(others.end(), files.begin(), files.end());
    if (!config_.validation.empty()) others.push_back(config_.validation);
    std::set<std::string> known{folder_beside(first())};
    for (const std::string& file : others) {
      if (!known.insert(folder_beside(file)).second) continue;
      const auto tokenizer = load_text_tokenizer(folder_beside(file));
      if (!tokenizer || (sources_.tokenizer && tokenizer->identity() == sources_.tokenizer->identity()))
        continue;
      throw Error(Errc::kUsage, file,
                  fmt::format("has the tokenizer {} beside it, while {} has {}", tokenizer->identity(),
                              first(), sources_.tokenizer ? sources_.tokenizer->identity() : "none"),
                  "token files of one tokenizer, or the one of all of them as data.tokenizer");
    }
  }

  // Opens a token file as what lies beside it describes it.
  Split open_tokens(const std::string& path) const {
    const Tokens tokens = open_raw_tokens(path, config_.token_dtype);
    Split split{.file = tokens.file, .mask = tokens.mask};
    split.count = split.file->size();
    if (packs()) take_documents(split, path, open_documents(path, split.count));
    return split;
  }
  void take_documents(Split& split, const std::string& path,
                      std::shared_ptr<const DocumentIndex> documents) const {
    if (!documents) {
      throw Error(Errc::kUsage, "data.packing",
                  fmt::format("\"documents\" found, and nothing says where the documents of {} begin", path),
                  "documents .jsonl, a Megatron NAME.idx, or the NAME.docs of tools/prepare.py; or \"none\"");
    }
    split.document_count = documents->count();
    split.documents = std::move(documents);
  }

  void add_tokens(Source& source, const std::string& path) const {
    Split train = open_tokens(path);
    if (share() > 0) source.validation.push_back(cut_off(train, share()));
    source.train.push_back(std::move(train));
  }

  // A folder for the tokens of one of several texts.
  static std::string canonical(const std::string& path) {
    std::error_code error;
    const std::filesystem::path found = std::filesystem::weakly_canonical(path, error);
    return error ? path : found.string();
  }
  std::string folder_of(const std::string& path) const {
    const std::filesystem::path file(path);
    return (std::filesystem::path(cache_dir_) /
            fmt::format("{}-{:016x}", file.stem().string(), fnv1a64(canonical(path))))
        .string();
  }

  // Training and (where there is a share or the one text has a validation text) validation tokens.
  std::vector<Split> tokenise(const std::string& path, double validation_share, const std::string& folder) {
    DataConfig one = config_;
    one.train = path, one.blend.clear(), one.validation_share = validation_share;
    if (count_ > 1) one.validation.clear();
    TokenCache cache = tokenise_cached(one, folder, std::move(sources_.tokenizer));
    sources_.tokenizer = std::move(cache.tokenizer);
    std::vector<Split> splits{{.file = std::move(cache.train), .mask = cache.train_mask}, {}};
    splits[0].count = cache.train_tokens;
    // Where documents begin is known of these at no cost; who does not pack them asks for their number alone.
    if (packs() && cache.train_tokens > 0) take_documents(splits[0], path, cache.train_documents);
    if (!packs() && cache.train_documents) splits[0].document_count = cache.train_documents->count();
    if (cache.validation_tokens > 0) {
      splits[1] = {.file = std::move(cache.validation), .mask = cache.validation_mask};
      splits[1].count = cache.validation_tokens;
      if (packs())
        take_documents(splits[1], one.validation.empty() ? path : one.validation, cache.validation_documents);
    }
    if (is_documents(kinds_.at(path)) && one.validation.empty() && validation_share > 0)
      splits[1] = cut_off(splits[0], validation_share);
    return splits;
  }
  void add_text(Source& source, const std::string& path) {
    std::vector<Split> splits = tokenise(path, share(), count_ > 1 ? folder_of(path) : cache_dir_);
    source.train.push_back(std::move(splits[0]));
    if (splits[1].count > 0) source.validation.push_back(std::move(splits[1]));
  }

  const DataConfig& config_;
  const char* const key_ = config_.blend.size() > 1 ? "data.blend" : "data.train";
  std::string cache_dir_;
  std::vector<DataSource> blend_;
  std::vector<std::vector<std::string>> files_;  // of each source
  std::map<std::string, DataKind> kinds_;
  std::size_t count_ = 0;  // of all
  Sources sources_;
};

}  // namespace

std::vector<std::string> files_of(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored) || path.find_first_of("*?[") == std::string::npos) return {path};
  glob_t found{};
  const int failed = ::glob(path.c_str(), 0, nullptr, &found);
  std::vector<std::string> files(found.gl_pathv, found.gl_pathv + (failed == 0 ? found.gl_pathc : 0));
  ::globfree(&found);
  if (!files.empty()) return files;
  throw Error(Errc::kUsage, path, failed == GLOB_NOMATCH ? "no file has such a name" : "cannot be searched",
              "a file, or a pattern such as data/*.jsonl");
}

Sources Sources::open(const DataConfig& config, const std::string& cache_dir) {
  return Opener(config, cache_dir).run();
}

}  // namespace zg
