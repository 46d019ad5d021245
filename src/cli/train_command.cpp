#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/output.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/log_name.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/comm/processes.hpp"
#include "ziggurat/config/composition.hpp"
#include "ziggurat/train/generate.hpp"
#include "ziggurat/train/machine.hpp"
#include "ziggurat/train/observers.hpp"
#include "ziggurat/train/output_directory.hpp"

namespace zg::cli {
namespace {

struct Flags {
  ConfigSource source;
  std::int64_t steps = -1;
  std::string devices;
  int threads = 0;
  double stall_seconds = 10, join_seconds = 600;
  bool plan = false, verbose = false;
  std::optional<std::string> resume;  // as Trainer::Options has it
  std::string trace_file;             // Chrome trace of the whole run; empty: none
};

// Checks before the run that the trace can be written at its end. The file keeps its old content until then.
void check_trace_file(const std::string& path) {
  const std::string where = "--trace " + path, hint = "name a file that can be written";
  if (std::error_code unknown; std::filesystem::is_directory(path, unknown))
    throw Error(Errc::kUsage, where, "cannot be written: " + errno_text(EISDIR), hint);
  try {
    const OutputFile tried(path, 0);  // is never committed
  } catch (const Error& e) {
    throw Error(Errc::kUsage, where, e.message(), hint);
  }
}

void print_sample(const RunConfig& config) try {
  const bool adapted = config.lora.on();
  Generator generator(adapted ? config.model_from : config.model_dir(), 0, adapted ? config.model_dir() : "");
  const Tokenizer* tokenizer = generator.tokenizer();
  if (tokenizer == nullptr) {
    log::warning("sample: this data has no tokenizer, so no text is generated");
    return;
  }
  const std::string prompt = config.sample_prompt.empty() ? "\n" : config.sample_prompt;
  GenerateOptions o;
  o.tokens = config.sample_tokens;
  o.temperature = 0.8;
  o.seed = config.seed;
  std::vector<std::int32_t> begin = tokenizer->begin_ids();
  for (const std::int32_t id : tokenizer->encode(prompt)) begin.push_back(id);
  const auto ids = generator.generate(begin, o, [](std::int32_t) { return !interrupted(); });
  const std::size_t prompt_bytes = tokenizer->decode(begin).size();
  begin.insert(begin.end(), ids.begin(), ids.end());
  std::printf("\n--- a sample of %zu tokens ---\n%s%s\n", ids.size(), config.sample_prompt.c_str(),
              tokenizer->decode(begin).substr(prompt_bytes).c_str());
} catch (const Error& e) {  // the model is saved, and the run has succeeded
  log::warning("sample: {}", e.what());
}

// Runs all steps of a prepared run. The first process writes log.jsonl, config.json (as resolved) and model/,
// or adapter/, to the output directory. `saved` receives the directory that the model or adapter was really
// saved to.
RunSummary run(Trainer& trainer, OutputDirectory* output, std::string& saved) {
  const RunConfig& config = trainer.plan().config;
  std::unique_ptr<StepLog> log;
  std::optional<ProgressLine> progress;
  std::vector<TrainObserver*> observers;
  trainer.processes().together([&] {
    if (trainer.processes().number() > 0) return;
    log::info("ready\n{}", trainer.describe());
    log = output->begin(trainer);
    observers = {log.get(), &progress.emplace(trainer)};
  });
  const RunSummary summary = trainer.run(observers);
  progress.reset();
  log::info("saving the {} to {}", config.lora.on() ? "adapters" : "model", config.model_dir());
  saved = trainer.save_model();
  if (log != nullptr) log->write_rest_to(saved);
  return summary;
}

// This process's file name: "step.json" in the first process, "step.json.process1" in the second.
std::string own_file(const std::string& path, const Processes& processes) {
  return processes.number() == 0 ? path : fmt::format("{}.process{}", path, processes.number());
}

void say_failure(const Processes& processes, const char* text) {
  const std::string who = processes.number() > 0 ? fmt::format("process {}: ", processes.number()) : "";
  std::fprintf(stderr, "ziggurat: %s%s\n", who.c_str(), text);
}

// Ends all processes when this one fails while others may wait for it; the first process to fail prints the
// reason. Does nothing if this process is alone, or if all processes know of the failure already. Called
// while an exception is handled.
void end_all(Processes& processes) {
  if (processes.count() == 1 || processes.has_agreed()) return;
  std::string text = "has failed";
  int exit_code = 1;
  try {
    throw;
  } catch (const Error& e) {
    text = e.what(), exit_code = e.exit_code();
  } catch (const std::exception& e) {
    const Error error = error_from(e);
    text = error.what(), exit_code = error.exit_code();
  }
  log::progress("");
  if (processes.is_first_to_fail()) say_failure(processes, text.c_str());
  processes.abort(exit_code);
}

// Flushes the report. A closed output is no error, since the run is done and its model saved. Returns any
// other reason why the report cannot be written.
std::optional<Error> flush_report() {
  try {
    flush_output();
  } catch (const OutputClosed&) {
  } catch (const Error& e) {
    return e;
  }
  return std::nullopt;
}

// Returns the exit code.
int train(const RunConfig& config, const Flags& flags, Watchdog& watchdog, Processes& processes) {
  const bool first = processes.number() == 0;
  const std::string trace_file = flags.trace_file.empty() ? "" : own_file(flags.trace_file, processes);
  std::optional<OutputDirectory> output;
  processes.together([&] {
    for (const std::string& warning : config.warnings) {
      if (first) log::warning("{}", warning);
    }
    if (first && flags.resume && !flags.resume->empty())
      check_resume(*flags.resume);  // before anything is made
    if (first && !flags.plan) output.emplace(config);
    if (!trace_file.empty()) check_trace_file(trace_file);
  });
  Trace trace;
  if (!trace_file.empty()) trace.start();
  if (!flags.plan) watchdog.set_file(own_file(config.output_dir + "/state.txt", processes));
  Trainer trainer(config, {.trace = &trace,
                           .watchdog = &watchdog,
                           .stop = interrupted,
                           .processes = &processes,
                           .resume = flags.resume});
  if (flags.plan) {
    if (first) std::fputs(plan_report(trainer).c_str(), stdout);
    return 0;
  }
  trainer.prepare();  // before the trace starts, so that a refused run keeps the last run's trace file
  RunSummary summary;
  std::string saved;
  try {
    summary = run(trainer, output ? &*output : nullptr, saved);
  } catch (...) {
    // The timeline up to the failure may help to explain it. An error in saving it must not hide the failure.
    try {
      if (!trace_file.empty()) trace.save(trace_file);
    } catch (const Error& e) {
      log::warning("{}", e.what());
    }
    end_all(processes);
    throw;
  }
  std::optional<Error> unsaid;
  try {
    if (!trace_file.empty()) trace.save(trace_file);
    if (first) {
      if (summary.steps > 0) {
        std::fputs(final_report(summary, trainer).c_str(), stdout);
      } else {
        log::info("all {} steps were done before: only the model was saved", config.steps);
      }
      if (config.sample_tokens > 0 && saved == config.model_dir() && !summary.stopped && !interrupted())
        print_sample(trainer.plan().config);
      unsaid = flush_report();
    }
    trainer.finish_exports();
  } catch (...) {
    end_all(processes);
    throw;
  }
  if (saved != config.model_dir()) {
    throw Error(Errc::kIo, config.model_dir(), "could not be written; the model is whole in " + saved,
                fmt::format("make room and move it: mv {} {}", saved, config.model_dir()));
  }
  if (unsaid) throw Error(*unsaid);
  return summary.stopped || interrupted() ? 130 : 0;
}

// Runs the command in each process of a launcher, or in this process alone.
int train(const Flags& flags, Watchdog& watchdog) {
  Processes processes = Processes::join(std::chrono::duration<double>(flags.join_seconds));
  // SIGUSR2 also interrupts: mpirun forwards it at once, while after Ctrl-C it soon kills its processes.
  if (processes.count() > 1) std::signal(SIGUSR2, [](int) { request_interrupt(); });
  if (processes.number() > 0) {
    log::set_level(log::Level::kWarning);
    log::set_name(fmt::format("process {}", processes.number()));
  }
  try {
    RunConfig config;
    processes.together([&] {
      Machine machine = this_machine();
      machine.processes = processes.count();
      config = load_config(flags.source, machine);
    });
    return train(config, flags, watchdog, processes);
  } catch (const FailedElsewhere& e) {
    return e.exit_code();
  } catch (const Error& e) {
    if (processes.count() == 1) throw;
    say_failure(processes, e.what());
    return e.exit_code();
  }
}

constexpr const char* kTrainExamples = R"(Examples:
  ziggurat train configs/quickstart.json --steps 50
  ziggurat train configs/quickstart.json --set tiers.host=32MiB --set output.dir=runs/small --trace step.json
  ziggurat train configs/gpt2-124m.json --plan
  mpirun -n 2 ziggurat train configs/quickstart.json --devices host
  ziggurat train configs/quickstart.json --set optimizer.type=Lion --set optimizer.params.lr=3e-4
  ziggurat train configs/quickstart.json --set optimizer.overlap=off
  ziggurat train configs/quickstart.json --set checkpoint.every=100 --resume
Leaves in output.dir: log.jsonl (one object for each step), config.json (the merged configuration), tokens/ (the
tokenised text), model/ (Hugging Face's layout) or, with a section lora, adapter/ (PEFT's layout), and checkpoints/
where the configuration asks for them (checkpoint.every=STEPS). From these --resume goes on as if the run had not
stopped.
Ctrl-C ends the run after the next step and saves the model; a second Ctrl-C ends it at once. SIGTERM does the same,
and SIGHUP (a closed terminal), unless nohup has it ignored. A closed pipe behind stdout or stderr ends no run.
SIGUSR1 (kill -USR1 PID) makes the run say what each of its parts holds, moves and waits for: on stderr, and in
output.dir/state.txt, the newest last. The run goes on undisturbed.)";

}  // namespace

void add_train(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("train", "Train a model as a configuration says");
  command
      ->add_option("config", flags->source.files,
                   "Configuration files, JSON with comments; keys of later files win. A DeepSpeed file goes "
                   "after one that names model and data")
      ->required();
  command
      ->add_option("--set", flags->source.overrides,
                   "Override one key (may be repeated): --set tiers.device=48MiB")
      ->allow_extra_args(false);
  command
      ->add_option("--steps", flags->steps, "Optimizer steps of the whole run, instead of the file's steps")
      ->check(whole_number(1));
  command->add_option("--devices", flags->devices,
                      "What to train on, instead of the file's devices: host (the processor), host:4 (four "
                      "ranks on it), cuda:0 (the first GPU), cuda:0-3, cuda:0,2 or cuda:all (a rank on each "
                      "GPU), or auto (the first GPU, or the processor where there is none)");
  auto resume_path = std::make_shared<std::string>();
  CLI::Option* resume =
      command
          ->add_option(
              "--resume", *resume_path,
              "Go on from the newest valid checkpoint of checkpoint.path and checkpoint.export.path, "
              "or from the one at PATH, or from the newest in PATH. Without any checkpoint the run "
              "begins with its first step. Stands after the configuration files, which would else be "
              "taken for PATH")
          ->expected(0, 1)
          ->type_name("[PATH]");
  command
      ->add_option("--threads", flags->threads, "Threads that compute, instead of the file's threads.compute")
      ->check(whole_number(1, 8192));
  command->add_option("--trace", flags->trace_file,
                      "Write a timeline for Perfetto (ui.perfetto.dev) to this file");
  command
      ->add_option("--stall-seconds", flags->stall_seconds,
                   "Warn, with the state of every part of the run, when one waits and nothing has made "
                   "progress for this many seconds (0: never)")
      ->capture_default_str()
      ->check(real_number(0, 1e6));
  command
      ->add_option(
          "--join-timeout", flags->join_seconds,
          "Under a launcher (mpirun, srun): seconds that a process waits for all others to start. Then "
          "it says so and the run ends. Once all have started, parallel.timeout_seconds counts")
      ->capture_default_str()
      ->check(real_number(0.001, 1e6));
  command->add_flag("--plan", flags->plan,
                    "Say what would be allocated and moved or, where the budgets are too small, the smallest "
                    "that suffice, and stop");
  command
      ->add_flag_callback(
          "--help-parallel",
          [] {
            std::fputs(composition_text().c_str(), stdout);
            throw CLI::Success();
          },
          "Say what a run can be composed of, what is refused, why, and what to choose instead, "
          "and stop")
      ->trigger_on_parse();  // before the check that a configuration is named
  command->add_flag("-v,--verbose", flags->verbose, "Log details, too");
  command->footer(kTrainExamples);
  command->callback([flags, resume, resume_path, &exit_code] {
    if (resume->count() > 0) flags->resume = *resume_path;
    if (flags->verbose) log::set_level(log::Level::kDebug);
    if (!flags->devices.empty()) flags->source.overrides.push_back("devices=\"" + flags->devices + "\"");
    if (flags->threads > 0)
      flags->source.overrides.push_back("threads.compute=" + std::to_string(flags->threads));
    if (flags->steps > 0) flags->source.overrides.push_back("steps=" + std::to_string(flags->steps));
    Watchdog watchdog({.stall_seconds = flags->stall_seconds});
    watchdog.dump_on_signal(SIGUSR1);
    exit_code = train(*flags, watchdog);
  });
}

}  // namespace zg::cli
