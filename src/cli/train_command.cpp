#include <signal.h>

#include <CLI/CLI.hpp>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/train/machine.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg::cli {
namespace {

struct Flags {
  ConfigSource source;
  std::int64_t steps = -1;
  std::string devices;
  int threads = 0;
  double stall_seconds = 10;
  bool plan = false, verbose = false;
  TrainOptions options;
};

}  // namespace

void add_train(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("train", "Train a model as a configuration says");
  command
      ->add_option("config", flags->source.files,
                   "Configuration file(s), JSON with comments; keys of later ones win. DeepSpeed's files "
                   "work as they are, "
                   "behind one that names model and data")
      ->required();
  command
      ->add_option("--set", flags->source.overrides,
                   "Override one key: --set tiers.device=48MiB (may be repeated)")
      ->allow_extra_args(false);
  command->add_option("--steps", flags->steps, "Optimizer steps, instead of the file's")
      ->check(whole_number(1));
  command->add_option("--devices", flags->devices,
                      "What to train on: host (the processor), cuda:0 (the first GPU), or auto, instead of the "
                      "file's; auto is a GPU where there is one");
  command
      ->add_option("--threads", flags->threads, "Threads that compute, instead of the file's threads.compute")
      ->check(whole_number(1, 4096));
  command->add_option("--trace", flags->options.trace_file,
                      "Write a timeline for Perfetto (ui.perfetto.dev) to this file");
  command
      ->add_option("--stall-seconds", flags->stall_seconds,
                   "Warn, with the state of everything, when nothing has got on for so long while somebody "
                   "waits (0: never)")
      ->capture_default_str()
      ->check(real_number(0, 1e6));
  command->add_flag("--plan", flags->plan,
                    "Say what would be allocated and moved, or the smallest budgets that do, and stop");
  command->add_flag("-v,--verbose", flags->verbose, "Log details");
  command->footer(
      "Examples:\n"
      "  ziggurat train configs/quickstart.json --steps 50\n"
      "  ziggurat train configs/quickstart.json --set tiers.host=32MiB --set output.dir=runs/small --trace "
      "step.json\n"
      "  ziggurat train configs/gpt2-124m.json --plan\n"
      "  ziggurat train configs/quickstart.json --set optimizer.type=Lion --set optimizer.params.lr=3e-4\n"
      "  ziggurat train configs/quickstart.json --set optimizer.overlap=off\n"
      "Leaves in output.dir: log.jsonl (one object a step), config.json (as resolved), model/ (Hugging Face "
      "layout).\n"
      "Ctrl-C ends the run after the next step and saves the model; twice ends it at once.\n"
      "SIGUSR1 (kill -USR1 PID) has the run say what every part of it holds, moves and waits for: on stderr, "
      "and in\n"
      "output.dir/state.txt, newest last. The run goes on undisturbed.");
  command->callback([flags, &exit_code] {
    if (flags->verbose) log::set_level(log::Level::kDebug);
    if (!flags->devices.empty()) flags->source.overrides.push_back("devices=\"" + flags->devices + "\"");
    if (flags->threads > 0)
      flags->source.overrides.push_back("threads.compute=" + std::to_string(flags->threads));
    if (flags->steps > 0) flags->source.overrides.push_back("steps=" + std::to_string(flags->steps));
    if (flags->plan) flags->options.mode = TrainOptions::Mode::kPlanOnly;
    Watchdog watchdog({.stall_seconds = flags->stall_seconds});
    watchdog.dump_on_signal(SIGUSR1);
    flags->options.watchdog = &watchdog;
    exit_code = train(load_config(flags->source, this_machine()), flags->options);
  });
}

}  // namespace zg::cli
