// Model files of SentencePiece, where the program was built with its library.
#include "data/sentencepiece_check.hpp"
#include "data/text_tokenizer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/model_files.hpp"

#ifdef ZG_SENTENCEPIECE
#include <sentencepiece_processor.h>

#include <new>

#include "ziggurat/base/file.hpp"
#include "ziggurat/base/philox.hpp"
#endif

namespace zg {
#ifdef ZG_SENTENCEPIECE
namespace {

// What the library says of its work: its status, or what it throws, as its trie does. Empty: all is well.
template <class Work>
std::string problem_of(const Work& work) {
  try {
    const auto status = work();
    return status.ok() ? "" : status.ToString();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    return e.what();
  }
}

class SentencePieceTokenizer final : public TextTokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& file)
      : content_(read_tokenizer_file(file, "a tokenizer")) {
    std::string problem = sentencepiece_problem(content_);
    if (problem.empty()) problem = problem_of([&] { return processor_.LoadFromSerializedProto(content_); });
    if (!problem.empty()) {
      throw Error(Errc::kUsage, file, "is no model of SentencePiece: " + problem,
                  "the tokenizer.model of a model is expected");
    }
  }

  std::int64_t vocab_size() const override { return processor_.GetPieceSize(); }
  std::string identity() const override { return fmt::format("sentencepiece {:016x}", fnv1a64(content_)); }
  std::vector<std::int32_t> begin_ids() const override {
    return processor_.bos_id() < 0 ? std::vector<std::int32_t>{}
                                   : std::vector<std::int32_t>{processor_.bos_id()};
  }
  std::int32_t id_of_token(const std::string& name) const override {
    const int id = processor_.PieceToId(name);
    return id >= 0 && id < processor_.GetPieceSize() && processor_.IdToPiece(id) == name ? id : -1;
  }
  // The library normalises a text as a whole, so that it cannot be cut.
  std::size_t safe_prefix(std::string_view) const override { return 0; }

  void append(std::string_view text, const TextPlace& place, std::vector<std::int32_t>& out) const override {
    check_utf8(text, place);
    std::vector<int> ids;
    const std::string problem = problem_of([&] {
      return processor_.Encode({text.data(), text.size()}, &ids);
    });
    if (!problem.empty()) throw Error(Errc::kUsage, place.where, "cannot be tokenised: " + problem);
    out.insert(out.end(), ids.begin(), ids.end());
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= vocab_size()) throw_unknown_id(id, vocab_size());
    }
    std::string text;
    const std::string problem =
        problem_of([&] { return processor_.Decode(std::vector<int>(ids.begin(), ids.end()), &text); });
    if (!problem.empty()) throw Error(Errc::kUsage, "tokenizer", "cannot decode: " + problem);
    return text;
  }

  void save(const std::string& directory) const override {
    save_tokenizer_file(directory, "sentencepiece", "tokenizer.model", content_);
  }

 private:
  std::string content_;
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

std::unique_ptr<TextTokenizer> make_sentencepiece_tokenizer(const std::string& model_file) {
  return std::make_unique<SentencePieceTokenizer>(model_file);
}
#else
std::unique_ptr<TextTokenizer> make_sentencepiece_tokenizer(const std::string& model_file) {
  throw Error(Errc::kUsage, model_file,
              "is a model of SentencePiece, and this program was built without its library",
              "install libsentencepiece-dev and build again, or name the model's tokenizer.json");
}
#endif
}  // namespace zg
