#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/model_flags.hpp"
#include "cli/output.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/data/documents.hpp"
#include "ziggurat/train/generate.hpp"

namespace zg::cli {
namespace {

// The length of the pieces that the text is evaluated in. Longer pieces would make attention more expensive,
// and the first tokens of a piece, which have little context, are a small share of it anyway.
constexpr std::int64_t kContext = 4096;

struct Flags {
  std::string model, adapter, memory;
  std::vector<std::string> data;
  std::int64_t context = 0, documents = 0;
  bool json = false, each = false;
};

class Evaluation {
 public:
  explicit Evaluation(const Flags& f)
      : f_(f),
        generator_(f.model, memory_of(f.memory), f.adapter),
        longest_(generator_.config().longest_sequence()) {
    if (generator_.tokenizer() == nullptr) {
      throw Error(Errc::kUsage, "--model", "the directory " + f.model + " holds no tokenizer",
                  "put the tokenizer.json of the model there");
    }
    if (f.context > longest_) {
      throw Error(Errc::kUsage, "--context",
                  fmt::format("found {}, the model takes at most {}", f.context, longest_),
                  fmt::format("--context {} or less", longest_));
    }
    context_ = f.context > 0 ? f.context : std::min(kContext, longest_);
  }

  void run() {
    if (f_.each && !f_.json)
      std::printf("%-40s %10s %10s %12s\n", "document", "tokens", "loss", "perplexity");
    for (const std::string& path : f_.data) {
      if (done()) break;
      for_each_document(path, *generator_.tokenizer(), [&](std::int64_t number, const Document& document) {
        add(fmt::format("{}:{}", path, number), document);
        return !done();
      });
    }
    log::progress("");
    if (total_.tokens == 0 && !interrupted()) {
      throw Error(Errc::kUsage, f_.data.size() == 1 ? f_.data.front() : "--data", "has no token that counts",
                  "a document needs two tokens or more, and a mask that is not 0 everywhere");
    }
    if (!std::isfinite(total_.sum)) {
      throw Error(Errc::kNumeric, f_.model, "the loss of these documents is not a number",
                  "the weights, or an adapter's, are damaged, or their training has diverged");
    }
    if (f_.json) {
      nlohmann::ordered_json out = record("all", total_);
      out.erase("document");
      out["documents"] = count_, out["context"] = context_, out["interrupted"] = interrupted();
      std::printf("%s\n", out.dump().c_str());
    } else {
      std::printf("%lld documents, %lld tokens in pieces of at most %lld: loss %.6f, perplexity %.4f%s\n",
                  static_cast<long long>(count_), static_cast<long long>(total_.tokens),
                  static_cast<long long>(context_), total_.mean(), std::exp(total_.mean()),
                  interrupted() ? " (interrupted)" : "");
    }
  }

 private:
  bool done() const { return interrupted() || (f_.documents > 0 && count_ >= f_.documents); }
  void add(const std::string& name, const Document& document) {
    const Generator::Loss loss =
        generator_.loss_of(document.ids, document.mask, context_, name, [] { return interrupted(); });
    total_.sum += loss.sum, total_.tokens += loss.tokens;
    ++count_;
    if (f_.each && f_.json) std::printf("%s\n", record(name, loss).dump().c_str());
    if (f_.each && !f_.json) {
      std::printf("%-40s %10lld %10.6f %12.4f\n", name.c_str(), static_cast<long long>(loss.tokens),
                  loss.mean(), std::exp(loss.mean()));
    }
    flush_output();
    log::progress(fmt::format("{} documents, {} tokens, loss {:.4f}", count_, total_.tokens, total_.mean()));
  }
  static nlohmann::ordered_json record(const std::string& name, const Generator::Loss& loss) {
    return {{"document", name},
            {"tokens", loss.tokens},
            {"loss", loss.mean()},
            {"perplexity", std::exp(loss.mean())}};
  }

  const Flags& f_;
  Generator generator_;
  const std::int64_t longest_;
  std::int64_t context_ = 0, count_ = 0;
  Generator::Loss total_;
};

}  // namespace

void add_eval(CLI::App& app, int& exit_code) {
  auto f = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("eval", "Measure the loss and perplexity of a trained model on texts");
  command->add_option("--model", f->model, "Hugging Face directory (a run leaves one in output.dir/model)")
      ->required();
  command
      ->add_option(
          "--data", f->data,
          "Files of documents: JSON objects, one a line or all in a list; a text is one document, and token "
          "files (.bin) have those that lie beside them, or are one")
      ->required();
  command
      ->add_option("--context", f->context,
                   "Tokens that the model sees at once: longer documents are evaluated in pieces of this "
                   "many (default: the model's context, at most 4096)")
      ->check(whole_number(1));
  command->add_option("--documents", f->documents, "Stop after this many documents (0: all)")
      ->capture_default_str()
      ->check(whole_number(0));
  command->add_flag("--each", f->each, "Print a line for each document, too");
  command->add_flag("--json", f->json, "Print JSON instead of text, one object a line");
  add_adapter(*command, f->adapter);
  add_memory(*command, f->memory);
  command->footer(
      "The loss is the mean of -log p (natural logarithms) over all tokens but the first of "
      "each document and those that a\n"
      "mask (\"labels\", \"loss_mask\") leaves out; the perplexity is its exponential.\n"
      "\n"
      "Examples:\n"
      "  ziggurat eval --model runs/quickstart/model --data held-out.txt\n"
      "  ziggurat eval --model Qwen3-8B --data answers.jsonl --each --json");
  command->callback([f, &exit_code] {
    Evaluation(*f).run();
    exit_code = interrupted() ? 130 : 0;
  });
}

}  // namespace zg::cli
