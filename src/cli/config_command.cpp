// `ziggurat config keys`: lists the keys that a configuration may have, from the tables that its readers use.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include "cli/commands.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/config/keys.hpp"

namespace zg::cli {
namespace {

enum class Format { kText, kMarkdown };

struct Flags {
  Format format = Format::kText;
  std::vector<std::string> sections;
};

// Merges consecutive tables that have the same columns.
std::vector<KeyTable> chosen(const Flags& flags) {
  std::vector<KeyTable> all = config_key_tables();
  if (flags.sections.empty()) return all;
  std::vector<std::string> names;
  for (const KeyTable& table : all) names.push_back(table.name);
  std::vector<KeyTable> tables;
  for (const std::string& name : flags.sections) {
    const auto at = std::find(names.begin(), names.end(), name);
    if (at == names.end()) {
      const auto nearest = nearest_name(name, names);
      throw Error(Errc::kUsage, "--section", fmt::format("found \"{}\", which is no section with keys", name),
                  nearest ? fmt::format("did you mean {}?", *nearest)
                          : fmt::format("there are {}", fmt::join(names, ", ")));
    }
    const KeyTable& table = all[static_cast<std::size_t>(at - names.begin())];
    if (!tables.empty() && tables.back().header == table.header) {
      tables.back().name += fmt::format(", {}", table.name);
      tables.back().rows.insert(tables.back().rows.end(), table.rows.begin(), table.rows.end());
    } else {
      tables.push_back(table);
    }
  }
  return tables;
}

std::string markdown(const KeyTable& table) {
  std::string text = fmt::format("| {} |\n|", fmt::join(table.header, " | "));
  for (std::size_t i = 0; i < table.header.size(); ++i) text += " --- |";
  text += "\n";
  for (std::vector<std::string> row : table.rows) {
    for (std::string& cell : row) {
      std::string escaped;
      for (const char c : cell) {
        if (c == '|') escaped += '\\';
        escaped += c;
      }
      cell = std::move(escaped);
    }
    text += fmt::format("| {} |\n", fmt::join(row, " | "));
  }
  return text;
}

// Wraps a text to paragraphs of at most kColumns columns.
std::string wrapped(const std::string& text, std::size_t indent) {
  constexpr std::size_t kColumns = 100;
  std::string out, line(indent, ' ');
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    if (line.size() > indent && line.size() + 1 + (end - at) > kColumns) {
      out += line + "\n";
      line.assign(indent, ' ');
    }
    if (line.size() > indent) line += ' ';
    line += text.substr(at, end - at);
    at = end + 1;
  }
  return out + line + "\n";
}

// The table as plain text, one paragraph per key.
std::string plain(const KeyTable& table) {
  std::string text;
  for (std::vector<std::string> row : table.rows) {
    for (std::string& cell : row) cell.erase(std::remove(cell.begin(), cell.end(), '`'), cell.end());
    if (table.header.size() == 4) {
      text += fmt::format("  {}: {}{}\n", row[0], row[1],
                          row[2].empty() ? std::string() : fmt::format("; default: {}", row[2]));
      text += wrapped(row[3], 6);
    } else {
      text += fmt::format("  {}\n", row[0]);
      for (std::size_t i = 1; i < row.size(); ++i) text += wrapped(row[i], 6);
    }
  }
  return text;
}

int print(const Flags& flags) {
  std::string text;
  for (const KeyTable& table : chosen(flags)) {
    if (!text.empty()) text += "\n";
    if (flags.format == Format::kText) {
      text += fmt::format("{}\n{}", table.name, plain(table));
    } else {
      if (flags.sections.empty()) text += fmt::format("### {}\n\n", table.name);
      text += markdown(table);
    }
  }
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace

void add_config(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("config", "Print the keys that a configuration may have");
  command->require_subcommand(1);
  command->footer("Examples:\n  ziggurat config keys\n  ziggurat config keys --section tiers");
  auto flags = std::make_shared<Flags>();
  CLI::App* keys = command->add_subcommand(
      "keys",
      "Print the keys of a configuration, each with its type, range or choices, default and "
      "meaning");
  keys->add_option("--format", flags->format,
                   "text: a paragraph for each key; markdown: tables, as in docs/configuration.md")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Format>{{"text", Format::kText}, {"markdown", Format::kMarkdown}}))
      ->option_text("text|markdown (default: text)");
  keys->add_option("--section", flags->sections,
                   "Print this section alone (may be repeated): aio, tiers, tiers.nvme, optimizer.params, "
                   "...; run, batch, device, precision and memory are parts of the top level; model.gpt2, "
                   "model.llama, ... describe new models; deepspeed-no-effect and deepspeed-refused are "
                   "DeepSpeed's keys that have no effect, or are refused")
      ->allow_extra_args(false);
  keys->footer(
      "Examples:\n"
      "  ziggurat config keys --section aio\n"
      "  ziggurat config keys --section tiers --section tiers.nvme --format markdown\n"
      "The keys come from the code that parses a configuration, which refuses all others. `[]` "
      "stands for the index of an\n"
      "entry of a list: --set tiers.nvme.0.path=/mnt/fast");
  keys->callback([flags, &exit_code] { exit_code = print(*flags); });
}

}  // namespace zg::cli
