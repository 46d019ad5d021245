#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/this_machine.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/comm/processes.hpp"
#include "ziggurat/train/forecast.hpp"
#include "ziggurat/train/node.hpp"

namespace zg::cli {
namespace {

namespace fs = std::filesystem;

struct Flags {
  ConfigSource source;
  std::string machine = "here", tokens;
  std::vector<std::string> what_if;
  int devices = 0;
  bool json = false, quick = false;
};

// "10B", "1.5T", "300M" or a number.
double tokens_of(const std::string& text) {
  if (text.empty()) return 0;
  double factor = 1;
  std::string number = text;
  const std::size_t unit = std::string("KMBT").find(text.back());
  if (unit != std::string::npos) {
    constexpr double kFactors[] = {1e3, 1e6, 1e9, 1e12};
    factor = kFactors[unit];
    number.pop_back();
  }
  const auto value = number_in<double>(number);
  if (!value || !(*value > 0) || *value > 1e18)
    throw Error(Errc::kUsage, "--tokens " + text, "is no number of tokens", "say for example --tokens 10B");
  return *value * factor;
}

// A file that is removed at the end.
class TemporaryConfig {
 public:
  explicit TemporaryConfig(const std::string& text) {
    std::string name = (fs::temp_directory_path() / "ziggurat-plan-XXXXXX.json").string();
    const int fd = ::mkstemps(name.data(), 5);
    if (fd < 0)
      throw Error(Errc::kIo, name, "cannot be made: " + errno_text(errno), "set TMPDIR to another folder");
    ::close(fd);
    path_ = name;
    std::ofstream(path_) << text;
  }
  TemporaryConfig(const TemporaryConfig&) = delete;
  ~TemporaryConfig() {
    std::error_code unknown;
    fs::remove(path_, unknown);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int plan(const Flags& flags) {
  const double tokens = tokens_of(flags.tokens);
  ConfigSource source = flags.source;
  const std::string& first = source.files.front();
  const bool of_model = is_model(first);
  if (of_model && source.files.size() > 1)
    throw Error(Errc::kUsage, first, "is a model, and further files follow it",
                "name configurations alone, with the model in model.from");
  const bool here = flags.machine == "here";
  // `is` after --what-if, `was` before it.
  MachineFile was = here ? this_machine_file({.paths = {}}) : find_machine(flags.machine);
  const int gpus_here = was.gpus ? was.gpus->count : 0;
  if (flags.devices > 0) {
    if (was.gpus) was = what_if(was, fmt::format("gpus={}", flags.devices));
    source.overrides.push_back(was.gpus ? fmt::format("devices=\"cuda:0-{}\"", flags.devices - 1)
                                        : fmt::format("devices=\"host:{}\"", flags.devices));
  }
  const auto load = [&](const MachineFile& on, const std::vector<std::string>& more) {
    ConfigSource changed = source;
    changed.overrides.insert(changed.overrides.end(), more.begin(), more.end());
    return load_config(changed, facts_of(on));
  };
  // The drives of this machine are measured only where the run names them, and once.
  if (here && !of_model) {
    const RunConfig named = load(was, {});
    std::vector<std::string> paths;
    for (const io::DriveOptions& drive : named.tiers.nvme) paths.push_back(drive.path);
    if (!paths.empty() && named.aio.backend != io::Backend::kRam)
      was.drives = this_machine_file({.paths = paths}).drives;
  }
  MachineFile is = was;
  for (const std::string& changes : flags.what_if) is = what_if(is, changes);
  std::unique_ptr<TemporaryConfig> usual;
  if (of_model) {
    usual = std::make_unique<TemporaryConfig>(usual_run(first, is));
    source.files = {usual->path()};
  }
  const auto changed = [&](const std::vector<std::string>& more) {
    RunConfig config = load(is, more);
    if (!of_model) change_drives(config, was, is);
    return config;
  };
  const RunConfig config = changed({});
  const ModelConfig model = model_on_paper(config);
  // A plan for this machine is made of what train would find, so that both say the same.
  std::vector<OpenGpu> gpus;
  std::optional<Hardware> found;
  if (here && (!is.gpus || is.gpus->count <= gpus_here)) {
    Processes alone;
    gpus = open_gpus(config);
    RunConfig named = config;  // with the drives that are there
    if (!of_model) named.tiers.nvme = load(is, {}).tiers.nvme;
    found = changed_hardware(hardware_of(named, gpus, alone, false).front(), was, is);
  }
  const Hardware* const hardware = found ? &*found : nullptr;
  Forecast forecast = make_forecast(config, model, is, {.sensitivities = !flags.quick, .hardware = hardware});
  if (!forecast.fits && !flags.quick) {
    forecast.search = changes_that_fit(config, model, is, forecast.trained, changed, hardware);
  }
  std::fputs((flags.json ? forecast.json(tokens) : forecast.text(tokens)).c_str(), stdout);
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "plan",
      "Say whether a run fits a machine, how fast it is and what limits it; needs neither data nor machine");
  command
      ->add_option("config", flags->source.files,
                   "Configuration files as of train, or a model: a Hugging Face directory or its config.json")
      ->required();
  command
      ->add_option("--set", flags->source.overrides,
                   "Override one key (may be repeated): --set tiers.host=1TiB")
      ->allow_extra_args(false);
  command
      ->add_option(
          "--machine", flags->machine,
          "What to plan for: here, a machine file, or the name of one (a100-8, h100-8, h200-8, b200-8, "
          "gb200-4, h100-1, rtx4090-1, rtx4090-8)")
      ->capture_default_str();
  command->add_option("--devices", flags->devices, "Devices of the machine that the run has, a rank on each")
      ->check(whole_number(1, 1024));
  command->add_option("--tokens", flags->tokens,
                      "Tokens to train on, for the hours and the money: 300M, 10B, 1.5T");
  command
      ->add_option(
          "--what-if", flags->what_if,
          "Change the machine first: nvme+1, gpus=4, host=4TB, gpu=141GB, nvme*2, pcie*2, dram*2, compute*2, "
          "nvlink*2; several with commas")
      ->allow_extra_args(false);
  command->add_flag("--quick", flags->quick,
                    "The run alone: no search for changes that make it fit, no times with a better part");
  command->add_flag("--json", flags->json, "Say it as a JSON object");
  command->footer(
      "Examples:\n  ziggurat plan configs/bench-llama-7b-gpu.json --machine h100-1 --tokens 10B\n"
      "  ziggurat plan models/Llama-3.1-8B --machine h200-8 --json");
  command->callback([flags, &exit_code] { exit_code = plan(*flags); });
}

}  // namespace zg::cli
