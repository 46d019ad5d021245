// How fast a text becomes tokens: MB/s of a tokenizer on a text, as a data set's first run does it.
//
//   bench_tokenise --tokenizer FOLDER --text FILE [--seconds 2] [--threads 1]
//
// Prints one JSON object. bench/tokenise.py has Hugging Face's tokenizers take turns with it.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/data/tokenizer.hpp"

namespace zg {
namespace {

constexpr std::size_t kPiece = 1 << 20;  // about so much of the text at once

// Pieces that end behind a line.
std::vector<std::string_view> pieces_of(const std::string& text) {
  std::vector<std::string_view> pieces;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = std::min(at + kPiece, text.size());
    const std::size_t line = text.find('\n', end);
    end = line == text.npos ? text.size() : line + 1;
    pieces.push_back(std::string_view(text).substr(at, end - at));
    at = end;
  }
  return pieces;
}

// Tokens of all pieces, of which each thread takes every n-th.
std::size_t encode(const Tokenizer& tokenizer, const std::vector<std::string_view>& pieces, int threads) {
  std::vector<std::size_t> tokens(static_cast<std::size_t>(threads));
  std::vector<std::thread> others;
  const auto work = [&](std::size_t mine) {
    for (std::size_t i = mine; i < pieces.size(); i += tokens.size())
      tokens[mine] += tokenizer.encode(pieces[i]).size();
  };
  for (std::size_t i = 1; i < tokens.size(); ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
  std::size_t sum = 0;
  for (const std::size_t n : tokens) sum += n;
  return sum;
}

void run(int argc, char** argv) {
  CLI::App app{"How fast a text becomes tokens"};
  std::string folder, file;
  double seconds = 2;
  int threads = 1;
  app.add_option("--tokenizer", folder, "A folder with a tokenizer.json or tokenizer.model")->required();
  app.add_option("--text", file, "A text")->required();
  app.add_option("--seconds", seconds, "At least so long")->capture_default_str();
  app.add_option("--threads", threads, "That encode pieces side by side")->check(CLI::Range(1, 1024));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e));
  }
  const auto tokenizer = load_tokenizer(folder);
  if (!tokenizer)
    throw Error(Errc::kUsage, "--tokenizer", folder + " holds no tokenizer", "name a folder with one");
  const std::string text = read_text_file(file, "a text");
  const std::vector<std::string_view> pieces = pieces_of(text);
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  std::size_t tokens = 0, rounds = 0;
  double passed = 0;
  for (; passed < seconds; ++rounds) {
    tokens = encode(*tokenizer, pieces, threads);
    passed = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  const nlohmann::ordered_json out{
      {"bytes", text.size()},
      {"tokens", tokens},
      {"rounds", rounds},
      {"threads", threads},
      {"mb_per_second", static_cast<double>(text.size() * rounds) / passed / 1e6}};
  std::printf("%s\n", out.dump().c_str());
}

}  // namespace
}  // namespace zg

int main(int argc, char** argv) {
  try {
    zg::run(argc, argv);
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_tokenise: %s\n", e.what());
    return e.exit_code();
  }
}
