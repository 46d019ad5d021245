#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <optional>
#include <utility>

#include "cli/chat.hpp"
#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/model_flags.hpp"
#include "cli/output.hpp"
#include "cli/text_stream.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/train/generate.hpp"

namespace zg::cli {
namespace {

struct Flags {
  std::string model, adapter, prompt, ids, memory;
  bool print_ids = false, chat = false;
  GenerateOptions options;
};

enum class Prompt { kText, kIds };

// Parses "1,2,3".
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

void print_ids(Generator& generator, const std::vector<std::int32_t>& prompt,
               const GenerateOptions& options) {
  bool first = true;
  generator.generate(prompt, options, [&](std::int32_t id) {
    std::printf(std::exchange(first, false) ? "%d" : ",%d", id);
    flush_output();
    return !interrupted();
  });
}

// Prints the generated tokens as text, except tokens that end a text. Returns the tokens.
std::vector<std::int32_t> print_text(Generator& generator, const std::vector<std::int32_t>& prompt,
                                     const GenerateOptions& options, std::int32_t end = -1) {
  const auto show = [](std::string_view piece) {
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    flush_output();
  };
  std::optional<TextStream> text;  // made once the prompt has proved valid
  const std::vector<std::int32_t>& ends = generator.end_ids();
  std::vector<std::int32_t> made = generator.generate(prompt, options, [&](std::int32_t id) {
    if (id == end) return false;
    if (!text) text.emplace(*generator.tokenizer(), prompt, show);
    if (options.past_the_end || std::find(ends.begin(), ends.end(), id) == ends.end()) text->add(id);
    return !interrupted();
  });
  if (text) text->end();
  return made;
}

const Tokenizer& tokenizer_of(const Generator& generator, const Flags& f, const char* flag) {
  if (const Tokenizer* tokenizer = generator.tokenizer()) return *tokenizer;
  throw Error(Errc::kUsage, flag, "the model directory " + f.model + " holds no tokenizer",
              "give token ids: --prompt-ids 1,2,3 --ids");
}

// Reads a line of stdin. False at the end of stdin, and if the user interrupts the wait.
bool read_line(std::string& line) {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  while (std::cin.rdbuf()->in_avail() <= 0 && poll(&input, 1, 100) <= 0) {
    if (interrupted()) return false;
  }
  return static_cast<bool>(std::getline(std::cin, line)) && !interrupted();
}

// Today's date as in "26 Jul 2024", in English for any system language.
std::string today() {
  static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                            "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const std::time_t now = std::time(nullptr);
  std::tm date{};
  (void)localtime_r(&now, &date);
  return fmt::format("{:02} {} {}", date.tm_mday, kMonths[date.tm_mon], 1900 + date.tm_year);
}

// One answer to --prompt, or a conversation, in which each line of stdin is a message of the user.
void talk(const Flags& f, Generator& generator, bool one_answer) {
  Chat chat(tokenizer_of(generator, f, "--chat"), name_of(generator.config().arch),
            TemplateTexts(read_chat_template(f.model)), today());
  const auto answer = [&](const std::string& said) {
    chat.answered(print_text(generator, chat.ask(said), f.options, chat.end_id()), generator.end_ids());
    std::fputc('\n', stdout);
    flush_output();
  };
  if (one_answer) return answer(f.prompt);
  const bool person = isatty(STDIN_FILENO) == 1;
  if (person) std::fprintf(stderr, "%s; an empty line ends the conversation\n", chat.form().name);
  while (!interrupted()) {
    if (person) std::fputs("> ", stderr);
    std::string line;
    if (!read_line(line) || line.empty()) return;
    answer(line);
  }
}

void run(const Flags& f, Prompt kind, bool has_prompt) {
  std::vector<std::int32_t> prompt;
  if (kind == Prompt::kIds) prompt = parse_ids(f.ids);
  Generator generator(f.model, memory_of(f.memory), f.adapter);
  if (f.chat) return talk(f, generator, has_prompt);
  if (kind == Prompt::kText) {
    const Tokenizer& tokenizer = tokenizer_of(generator, f, "--prompt");
    prompt = tokenizer.begin_ids();
    const std::vector<std::int32_t> text = tokenizer.encode(f.prompt);
    prompt.insert(prompt.end(), text.begin(), text.end());
  }
  if (f.print_ids || generator.tokenizer() == nullptr) {
    print_ids(generator, prompt, f.options);
  } else {
    std::fputs(f.prompt.c_str(), stdout);
    print_text(generator, prompt, f.options);
  }
  std::fputc('\n', stdout);
}

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  auto f = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text, or chat, with a trained model");
  command->add_option("--model", f->model, "Hugging Face directory (a run leaves one in output.dir/model)")
      ->required();
  auto* prompt = command->add_option("--prompt", f->prompt, "Text to continue");
  auto* ids = command->add_option("--prompt-ids", f->ids, "Token ids to continue: 1,2,3");
  prompt->excludes(ids);
  command->add_option("--tokens", f->options.tokens, "Most tokens to generate")
      ->capture_default_str()
      ->check(whole_number<std::int64_t>(1, 1'000'000'000));
  command->add_flag("--greedy", f->options.greedy, "Take the most likely token always");
  command
      ->add_option("--temperature", f->options.temperature,
                   "Divides the logits: below 1 the text is safer, above 1 wilder; 0 is --greedy")
      ->capture_default_str()
      ->check(real_number(0, 100));
  command->add_option("--top-k", f->options.top_k, "Choose among the k most likely tokens (0: among all)")
      ->capture_default_str()
      ->check(whole_number(0));
  command->add_option("--seed", f->options.seed, "Seed of the choices: the same seed gives the same text")
      ->capture_default_str()
      ->check(whole_number<std::uint64_t>(0));
  auto* print_ids = command->add_flag("--ids", f->print_ids, "Print token ids instead of text");
  command->add_flag("--past-the-end", f->options.past_the_end, "Go on after a token that ends a text");
  auto* chat = command->add_flag(
      "--chat", f->chat,
      "Chat: each line of stdin becomes a turn of the user in the model's chat form, until an "
      "empty line; with --prompt, that text alone");
  chat->excludes(ids);
  chat->excludes(print_ids);
  add_adapter(*command, f->adapter);
  add_memory(*command, f->memory);
  command->footer(
      "Examples:\n"
      "  ziggurat generate --model runs/quickstart/model --prompt \"And God said\" --tokens 200\n"
      "  ziggurat generate --model runs/quickstart/model --prompt-ids 65,110,100 --tokens 16 --greedy --ids\n"
      "  ziggurat generate --model Qwen3-8B --adapter runs/qwen3-8b-lora/adapter --prompt Once\n"
      "  ziggurat generate --model Qwen3-8B --chat --tokens 400                # until an empty line\n"
      "  ziggurat generate --model Llama-3.1-70B --prompt Once --memory 48GiB  # layers beyond that are read "
      "for each token");
  command->callback([f, prompt, ids, &exit_code] {
    if (prompt->count() + ids->count() == 0 && !f->chat)
      throw Error(Errc::kUsage, "generate", "needs --prompt, --prompt-ids or --chat", "say what to continue");
    run(*f, ids->count() > 0 ? Prompt::kIds : Prompt::kText, prompt->count() > 0);
    exit_code = interrupted() ? 130 : 0;
  });
}

}  // namespace zg::cli
