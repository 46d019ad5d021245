#include <CLI/CLI.hpp>
#include <cstdio>
#include <sstream>

#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"

namespace {

// Usage errors of every kind end with 2; help with 0.
int parse_failed(const CLI::App& app, const CLI::ParseError& e, const std::string& first) {
  if (e.get_exit_code() == 0) {  // --help, --version
    std::ostringstream text;
    app.exit(e, text, text);
    std::fputs(text.str().c_str(), stdout);
    return 0;
  }
  const bool known =
      !app.get_subcommands([&](const CLI::App* command) { return command->get_name() == first; }).empty();
  std::string what = e.what(), hint = known ? "see ziggurat " + first + " --help" : "see ziggurat --help";
  // CLI11 says of a word that is no subcommand only that one is missing, not which word.
  if (!known) {
    what = (first.empty() ? "a subcommand" : first + ": a subcommand") +
           " is expected: train, generate, eval, merge, quantize, plan, probe, io-bench, io-tune, trace, "
           "config or "
           "checkpoint";
  }
  std::fprintf(stderr, "ziggurat: %s\n  hint: %s\n", what.c_str(), hint.c_str());
  return 2;
}

// Returns the exit code. All that is thrown is caught in main.
int run(int argc, char** argv) {
  CLI::App app{
      "Ziggurat trains models that are larger than the memory of the machine: weights, "
      "gradients, optimizer state and\n"
      "activations move between device, host memory and NVMe as the step needs them.\n"};
  app.name("ziggurat");
  app.require_subcommand(1);
  app.set_version_flag("--version", "ziggurat 0.1.0");
  app.footer(
      "Examples:\n"
      "  ziggurat train configs/quickstart.json\n"
      "  ziggurat train configs/tiny.json configs/deepspeed/zero3_nvme.json --set tiers.host=64MiB\n"
      "  ziggurat generate --model runs/quickstart/model --prompt \"In the beginning\" --tokens 200\n"
      "  ziggurat eval --model runs/quickstart/model --data held-out.txt\n"
      "  ziggurat merge Qwen3-8B runs/qwen3-8b-lora/adapter Qwen3-8B-merged\n"
      "  ziggurat quantize Qwen3-8B Qwen3-8B-nf4 --to nf4\n"
      "  ziggurat plan configs/bench-llama-7b-gpu.json --machine h100-1\n"
      "  ziggurat probe /mnt/nvme0 /mnt/nvme1\n"
      "  ziggurat io-bench --path /mnt/nvme0 --op mixed\n"
      "  ziggurat io-tune --path /mnt/nvme0\n"
      "  ziggurat trace record configs/quickstart.json -o step.trace\n"
      "  ziggurat config keys --section tiers\n"
      "  ziggurat checkpoint list runs/quickstart\n"
      "Exit codes: 0 done; 1 the machine or its I/O failed, or the loss is not a number; 2 a mistake in "
      "flags,\n"
      "configuration or files, or budgets that are too small; 130 interrupted; 141 nobody reads stdout.");
  int exit_code = 0;
  zg::cli::add_train(app, exit_code);
  zg::cli::add_generate(app, exit_code);
  zg::cli::add_eval(app, exit_code);
  zg::cli::add_merge(app, exit_code);
  zg::cli::add_quantize(app, exit_code);
  zg::cli::add_plan(app, exit_code);
  zg::cli::add_probe(app, exit_code);
  zg::cli::add_io_bench(app, exit_code);
  zg::cli::add_io_tune(app, exit_code);
  zg::cli::add_trace(app, exit_code);
  zg::cli::add_config(app, exit_code);
  zg::cli::add_checkpoint(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    exit_code = parse_failed(app, e, argc > 1 ? argv[1] : "");
  }
  zg::cli::flush_output();
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  zg::open_standard_streams();
  zg::cli::buffer_output();
  zg::install_interrupt_handler();
  zg::install_failure_handler();
  try {
    return run(argc, argv);
  } catch (const zg::cli::OutputClosed&) {
    return zg::cli::kOutputClosed;
  } catch (const std::exception& e) {
    const zg::Error error = zg::error_from(e);
    zg::log::progress("");
    std::fprintf(stderr, "ziggurat: %s\n", error.what());
    return error.exit_code();
  }
}
