#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/train/generate.hpp"

namespace zg::cli {
namespace {

struct Flags {
  std::string model, prompt, ids;
  bool print_ids = false;
  GenerateOptions options;
};

enum class Prompt { kText, kIds };

// "1,2,3".
std::vector<std::int32_t> parse_ids(const std::string& text) {
  std::vector<std::int32_t> ids;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const auto id = number_in<std::int32_t>(std::string_view(text).substr(at, end - at));
    if (!id) {
      throw Error(Errc::kUsage, "--prompt-ids", fmt::format("found \"{}\", expected token ids", text),
                  "write them like --prompt-ids 1,2,3");
    }
    ids.push_back(*id);
    at = end + 1;
  }
  return ids;
}

void run(const Flags& f, Prompt kind) {
  std::vector<std::int32_t> prompt;
  if (kind == Prompt::kIds) prompt = parse_ids(f.ids);
  Generator generator(f.model);
  const Tokenizer* tokenizer = generator.tokenizer();
  if (kind == Prompt::kText) {
    if (tokenizer == nullptr) {
      throw Error(Errc::kUsage, "--prompt", "the model directory " + f.model + " holds no tokenizer",
                  "give token ids: --prompt-ids 1,2,3 --ids");
    }
    prompt = tokenizer->encode(f.prompt);
  }
  const bool ids = f.print_ids || tokenizer == nullptr;
  if (!ids) std::fputs(f.prompt.c_str(), stdout);
  // Text comes as it is made: a token may end in the middle of a character, so what is complete is printed.
  std::vector<std::int32_t> made;
  std::size_t shown = 0;
  generator.generate(prompt, f.options, [&](std::int32_t id) {
    if (ids) {
      std::printf(made.empty() ? "%d" : ",%d", id);
      made.push_back(id);
    } else {
      made.push_back(id);
      const std::string text = tokenizer->decode(made);
      std::size_t complete = text.size();
      while (complete > shown && text.size() - complete < 3 &&
             (static_cast<unsigned char>(text[complete - 1]) & 0xC0) == 0x80)
        --complete;
      if (complete > 0 && complete < text.size() && static_cast<unsigned char>(text[complete - 1]) >= 0xC0)
        --complete;
      if (complete == text.size() && !text.empty() && static_cast<unsigned char>(text.back()) >= 0xC0)
        --complete;
      if (text.size() - complete >= 3) complete = text.size();
      std::fwrite(text.data() + shown, 1, complete - shown, stdout);
      shown = complete;
    }
    std::fflush(stdout);
    return !interrupted();
  });
  if (!ids) {
    const std::string text = tokenizer->decode(made);
    std::fwrite(text.data() + shown, 1, text.size() - shown, stdout);
  }
  std::fputc('\n', stdout);
}

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  auto f = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  command->add_option("--model", f->model, "Hugging Face directory (a run leaves one in output.dir/model)")
      ->required();
  auto* prompt = command->add_option("--prompt", f->prompt, "Text to continue");
  auto* ids = command->add_option("--prompt-ids", f->ids, "Token ids to continue: 1,2,3");
  prompt->excludes(ids);
  command->add_option("--tokens", f->options.tokens, "Tokens to make")
      ->capture_default_str()
      ->check(whole_number(1));
  command->add_flag("--greedy", f->options.greedy, "Always the most likely token");
  command->add_option("--temperature", f->options.temperature, "Below 1: safer, above 1: wilder")
      ->capture_default_str()
      ->check(real_number(0, 100));
  command->add_option("--top-k", f->options.top_k, "Choose among the k most likely (0: all)")
      ->capture_default_str()
      ->check(whole_number(0));
  command->add_option("--seed", f->options.seed, "The same seed gives the same text")
      ->capture_default_str()
      ->check(whole_number<std::uint64_t>(0));
  command->add_flag("--ids", f->print_ids, "Print token ids instead of text");
  command->footer(
      "Examples:\n"
      "  ziggurat generate --model runs/quickstart/model --prompt \"And God said\" --tokens 200\n"
      "  ziggurat generate --model runs/quickstart/model --prompt-ids 65,110,100 --tokens 16 --greedy --ids");
  command->callback([f, prompt, ids, &exit_code] {
    if (prompt->count() + ids->count() == 0)
      throw Error(Errc::kUsage, "generate", "needs --prompt or --prompt-ids", "say what to continue");
    run(*f, ids->count() > 0 ? Prompt::kIds : Prompt::kText);
    exit_code = interrupted() ? 130 : 0;
  });
}

}  // namespace zg::cli
