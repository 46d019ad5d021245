// `ziggurat checkpoint`: lists, shows, verifies, exports, imports and removes checkpoints.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/printable.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"

namespace zg::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct Flags {
  std::string path, to, like;
  std::int64_t step = 0;
  std::vector<std::string> paths;
  bool json = false, tensors = false, all = false, model = false, merged = false;
};

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  return fs::exists(path + "/" + kManifestName, error);
}

// The directory of checkpoints: `path` itself, or "checkpoints" in it if `path` is a run's output directory.
std::string directory_at(const std::string& path) {
  std::error_code error;
  const std::string inside = path + "/checkpoints";
  if (list_checkpoints(path).empty() && fs::is_directory(inside, error)) return inside;
  if (!fs::is_directory(path, error)) {
    throw Error(Errc::kUsage, path, "is no directory",
                "name the output.dir of a run, or its directory of checkpoints");
  }
  return path;
}

// The checkpoint that the path names: the path itself, or the newest checkpoint in that directory.
std::string checkpoint_at(const std::string& path) {
  if (is_checkpoint(path)) return path;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    const std::vector<CheckpointEntry> all = list_checkpoints(directory_at(path));
    if (!all.empty()) return all.front().path;
  }
  throw Error(Errc::kUsage, path, "is no checkpoint, and has none in it",
              "name a checkpoint, the output.dir of a run, or its directory of checkpoints");
}

// All checkpoints that the path names, newest first.
std::vector<std::string> checkpoints_at(const std::string& path) {
  if (is_checkpoint(path)) return {path};
  std::vector<std::string> all;
  for (const CheckpointEntry& entry : list_checkpoints(directory_at(path))) all.push_back(entry.path);
  return all;
}

void print(const Json& json) {
  std::printf("%s\n", json.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

std::string problem_of(const std::string& path, const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const Error& error) {
    return error.where() == path ? error.message() : fmt::format("{}: {}", error.where(), error.message());
  }
}

// The checkpoint's size, including bytes pinned on drives.
std::int64_t all_bytes(const CheckpointManifest& m) {
  return m.bytes() + m.pinned;
}

Json json_of(const CheckpointManifest& m) {
  Json j{{"step", m.step},       {"number", m.number},   {"time", m.time},
         {"bytes", m.bytes()},   {"ranks", m.ranks},     {"updates", m.updates},
         {"skipped", m.skipped}, {"version", m.version}, {"run", m.run}};
  if (m.pinned > 0) j["pinned_bytes"] = m.pinned;
  if (m.loss == m.loss) j["loss"] = m.loss;
  if (m.validation) {
    j["validation"] = {{"step", m.validation->step}};
    if (std::isfinite(m.validation->loss)) j["validation"]["loss"] = m.validation->loss;
  }
  return j;
}

// "loss 4.6189, validation loss 4.4139 at step 3"
std::string losses_of(const CheckpointManifest& m) {
  std::string text = fmt::format("loss {:.4f}", m.loss);
  if (m.validation)
    text += fmt::format(", validation loss {:.4f} at step {}", m.validation->loss, m.validation->step);
  return text;
}

int list(const Flags& flags) {
  const std::string directory = directory_at(flags.path);
  Json all = Json::array();
  std::string text;
  for (const CheckpointEntry& entry : list_checkpoints(directory)) {
    Json j{{"path", entry.path}};
    const std::string problem = problem_of(entry.path, [&] {
      const CheckpointManifest m = Checkpoint(entry.path).manifest();
      j.update(json_of(m));
      text += fmt::format("{}  step {}, {}, {}{}, {}, {} rank{}\n", entry.path, m.step, m.time,
                          format_bytes(all_bytes(m)), m.pinned > 0 ? " pinned on drives" : "", losses_of(m),
                          m.ranks, m.ranks == 1 ? "" : "s");
    });
    if (!problem.empty()) {
      j["problem"] = problem;
      text += fmt::format("{}  damaged: {}\n", entry.path, problem);
    }
    all.push_back(std::move(j));
  }
  Json unfinished = Json::array();
  for (const std::string& path : unfinished_checkpoints(directory)) {
    unfinished.push_back(path);
    text += path + "  was not completed; the next run removes it\n";
  }
  if (flags.json) {
    print({{"directory", directory}, {"checkpoints", all}, {"unfinished", unfinished}});
  } else {
    if (text.empty()) text = fmt::format("there are no checkpoints in {}\n", directory);
    std::fputs(printable(text).c_str(), stdout);
  }
  return 0;
}

std::string text_of(const CheckpointBox& box) {
  const std::string first = fmt::format("[{}, {})", box.first, box.first + box.width);
  if (box.lines == 1) return first;
  return fmt::format("{} and {} more lines, {} apart", first, box.lines - 1, box.stride);
}

int show(const Flags& flags) {
  const Checkpoint checkpoint(checkpoint_at(flags.path));
  const CheckpointManifest& m = checkpoint.manifest();
  Json j{{"path", checkpoint.path()}};
  j.update(json_of(m));
  j["topology"] = {
      {"ranks", m.ranks}, {"processes", m.processes}, {"shards", m.shards}, {"zero_stage", m.stage}};
  if (m.scaler) j["loss_scale"] = m.scaler->scale;
  j["bits"] = Json::object();
  for (const auto& [key, value] : m.bits) j["bits"][key] = value;
  j["files"] = Json::array();
  for (const CheckpointFile& file : m.files)
    j["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  const std::vector<std::string> drives = checkpoint.drive_files();
  if (!drives.empty()) j["drive_files"] = drives;
  if (flags.tensors) {
    j["pieces"] = Json::array();
    for (const Checkpoint::Piece& p : checkpoint.pieces())
      j["pieces"].push_back({{"tensor", p.tensor},
                             {"dtype", p.dtype},
                             {"first", p.box.first},
                             {"count", p.box.count()},
                             {"lines", p.box.lines},
                             {"stride", p.box.stride},
                             {"file", fs::path(p.file).filename().string()}});
  }
  if (flags.json) {
    print(j);
    return 0;
  }
  std::string text = fmt::format(
      "{}\n  step {} ({} updates, {} skipped), {}, written {} by ziggurat {}\n"
      "  {} in {} file{}, of {} rank{} in {} process{}, ZeRO stage {}\n  what bits depend on:\n",
      checkpoint.path(), m.step, m.updates, m.skipped, losses_of(m), m.time, m.version,
      format_bytes(all_bytes(m)), m.files.size(), m.files.size() == 1 ? "" : "s", m.ranks,
      m.ranks == 1 ? "" : "s", m.processes, m.processes == 1 ? "" : "es", m.stage);
  for (const auto& [key, value] : m.bits) text += fmt::format("    {}: {}\n", key, value);
  if (!drives.empty()) text += "  the state is pinned in files of drives:\n";
  for (const std::string& file : drives) text += fmt::format("    {}\n", file);
  if (flags.tensors) {
    text += "  pieces of tensors, in elements:\n";
    for (const Checkpoint::Piece& p : checkpoint.pieces())
      text += fmt::format("    {} {} {} in {}\n", p.tensor, p.dtype, text_of(p.box),
                          fs::path(p.file).filename().string());
  }
  std::fputs(printable(text).c_str(), stdout);
  return 0;
}

// A callback that shows how much of a checkpoint has been read; all of its bytes will be.
std::function<void(std::int64_t)> progress_of(const Checkpoint& checkpoint) {
  return [path = checkpoint.path(), bytes = all_bytes(checkpoint.manifest())](std::int64_t done) {
    log::progress(fmt::format("{}: {} of {}", path, format_bytes(done), format_bytes(bytes)));
  };
}

int verify(const Flags& flags) {
  const std::vector<std::string> all = checkpoints_at(flags.path);
  if (all.empty()) (void)checkpoint_at(flags.path);  // throws
  Json results = Json::array();
  int damaged = 0;
  for (const std::string& path : all) {
    std::int64_t bytes = 0;
    const std::string problem = problem_of(path, [&] {
      const Checkpoint checkpoint(path);
      bytes = all_bytes(checkpoint.manifest());
      checkpoint.verify(progress_of(checkpoint));
    });
    log::progress("");
    damaged += problem.empty() ? 0 : 1;
    Json j{{"path", path}, {"valid", problem.empty()}};
    if (!problem.empty()) j["problem"] = problem;
    results.push_back(std::move(j));
    if (flags.json) continue;
    const std::string verdict = problem.empty()
                                    ? fmt::format("valid: {} read, all hashes agree", format_bytes(bytes))
                                    : "damaged: " + problem;
    std::printf("%s  %s\n", printable(path).c_str(), printable(verdict).c_str());
    flush_output();
  }
  if (flags.json) print({{"checkpoints", results}});
  if (damaged == 0) return 0;
  flush_output();
  throw Error(Errc::kUsage, flags.path,
              fmt::format("{} of {} checkpoint{} {} damaged", damaged, all.size(), all.size() == 1 ? "" : "s",
                          damaged == 1 ? "is" : "are"),
              "train --resume passes over what is damaged; ziggurat checkpoint discard removes it");
}

int export_to(const Flags& flags) {
  const Checkpoint checkpoint(checkpoint_at(flags.path));
  const auto begin = std::chrono::steady_clock::now();
  std::string path = flags.to;
  if (flags.model) {
    export_model(checkpoint, path, progress_of(checkpoint),
                 flags.merged ? ExportedModel::kMerged : ExportedModel::kAsTrained);
  } else {
    path = export_checkpoint(checkpoint, path, progress_of(checkpoint));
  }
  log::progress("");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::int64_t bytes = all_bytes(checkpoint.manifest());
  if (flags.json) {
    print({{"checkpoint", checkpoint.path()},
           {"path", path},
           {"model", flags.model},
           {"bytes", bytes},
           {"seconds", seconds}});
  } else {
    std::printf("%s  %s of step %lld: %s read in %s, all hashes agree\n", path.c_str(),
                flags.model ? "the model" : "a copy", static_cast<long long>(checkpoint.manifest().step),
                format_bytes(bytes).c_str(), format_seconds(seconds).c_str());
  }
  return 0;
}

int import_from(const Flags& flags) {
  const Checkpoint like(checkpoint_at(flags.like));
  const std::string path = import_checkpoint(like, flags.path, flags.to, flags.step, [&](double share) {
    log::progress(fmt::format("{}: {:.0f}% read and written", flags.path, 100 * share));
  });
  log::progress("");
  if (flags.json) {
    print({{"path", path}, {"step", flags.step}});
  } else {
    std::printf("%s  of step %lld, of the tensors of %s\n", path.c_str(), static_cast<long long>(flags.step),
                flags.path.c_str());
  }
  return 0;
}

int discard(const Flags& flags) {
  std::vector<std::string> gone;
  for (const std::string& path : flags.paths) {
    const bool whole = !flags.all || is_checkpoint(path);
    std::vector<std::string> chosen{path};
    if (!whole) {
      const std::string directory = directory_at(path);
      chosen = unfinished_checkpoints(directory);
      for (const CheckpointEntry& entry : list_checkpoints(directory)) chosen.push_back(entry.path);
    }
    for (const std::string& one : chosen) {
      discard_checkpoint(one);
      gone.push_back(one);
    }
  }
  if (flags.json) {
    print({{"removed", gone}});
  } else {
    for (const std::string& path : gone) std::printf("removed %s\n", path.c_str());
    if (gone.empty()) std::puts("there is nothing to remove");
  }
  return 0;
}

}  // namespace

void add_checkpoint(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("checkpoint", "List, show, verify, export, import and remove checkpoints of runs");
  command->require_subcommand(1);
  auto flags = std::make_shared<Flags>();
  const auto add = [&](const char* name, const char* what, int (*run)(const Flags&)) {
    CLI::App* sub = command->add_subcommand(name, what);
    sub->add_flag("--json", flags->json, "Print one JSON object");
    sub->callback([flags, run, &exit_code] { exit_code = run(*flags); });
    return sub;
  };
  constexpr const char* kAny = "A checkpoint, the output.dir of a run, or its directory of checkpoints";
  CLI::App* sub = add("list", "List the checkpoints of a run, the newest first", list);
  sub->add_option("DIR", flags->path, "The output.dir of a run, or its directory of checkpoints")->required();
  sub->footer(
      "Reads manifests and headers, not the tensors.\nExample:\n  ziggurat checkpoint list runs/quickstart");
  sub = add("show",
            "Show one checkpoint: when it was written, of what, and what a resumed run may not change", show);
  sub->add_option("PATH", flags->path, std::string(kAny) + ", of which the newest is shown")->required();
  sub->add_flag("--tensors", flags->tensors, "Show the pieces of all tensors, too");
  sub->footer("Example:\n  ziggurat checkpoint show runs/quickstart --tensors");
  sub = add("verify", "Read checkpoints whole, and compare the hashes of all tensors", verify);
  sub->add_option("PATH", flags->path, std::string(kAny) + ", all of which are read")->required();
  sub->footer(
      "Exit code 0: all are valid, 2: something is damaged.\nExample:\n  ziggurat checkpoint verify "
      "runs/quickstart");
  sub = add("export", "Copy a checkpoint elsewhere, or write its weights as a model for others", export_to);
  sub->add_option("PATH", flags->path, std::string(kAny) + ", of which the newest is taken")->required();
  sub->add_option("TO", flags->to,
                  "Directory, on any file system, in which the copy gets a name of its own; with --model, "
                  "the model's directory")
      ->required();
  sub->add_flag("--model", flags->model,
                "Write a Hugging Face directory instead, with the master weights in fp32 and no "
                "tokenizer; of a run that trains adapters (LoRA), write the adapters, in PEFT's layout");
  sub->add_flag("--merged", flags->merged,
                "With --model, of a run that trains adapters: the model, with the adapters merged into "
                "its weights")
      ->needs("--model");
  sub->footer(
      "All hashes are compared on the way. The copy also contains the state that is pinned in "
      "the files of drives, so it\n"
      "needs those files no more. It gets its name only when all of it is on the drive; train "
      "--resume TO goes on from it.\n"
      "tools/checkpoint_doors.py writes a checkpoint in the forms of PyTorch and DeepSpeed.\n"
      "Examples:\n"
      "  ziggurat checkpoint export runs/quickstart /mnt/backup/quickstart\n"
      "  ziggurat checkpoint export runs/quickstart runs/quickstart/model-now --model");
  sub = add("import", "Make a checkpoint from weights and moments that another program has trained",
            import_from);
  sub->add_option("FILE", flags->path,
                  "Safetensors file with all tensors that --like has, under the same names, in F32")
      ->required();
  sub->add_option("TO", flags->to, "Directory of checkpoints, in which the new one gets a name of its own")
      ->required();
  sub->add_option("--like", flags->like, "A checkpoint, of any step, of the run that is to go on")
      ->required();
  sub->add_option("--step", flags->step, "Number of steps that were done; the run goes on after them")
      ->required()
      ->check(CLI::NonNegativeNumber);
  sub->footer(
      "tools/checkpoint_doors.py makes such files from checkpoints of PyTorch and DeepSpeed.\n"
      "Example:\n"
      "  ziggurat checkpoint import theirs.safetensors runs/mine/checkpoints --like runs/first "
      "--step 1000");
  sub = add("discard", "Remove checkpoints, and the drives' files that they alone need", discard);
  sub->add_option("PATH", flags->paths,
                  "Checkpoints; with --all, the output.dir of runs or their directories of checkpoints")
      ->required();
  sub->add_flag("--all", flags->all, "Remove all checkpoints of these runs, and what was not completed");
  sub->footer("Example:\n  ziggurat checkpoint discard --all runs/quickstart");
  command->footer(
      "A run writes checkpoints where its configuration asks for them "
      "(checkpoint.every=STEPS), and train --resume goes on\n"
      "from the newest valid one. A checkpoint is a directory with manifest.json and, for each "
      "rank, a safetensors file of its\n"
      "pieces of the master weights and of the optimizer's moments, or a list of where these "
      "are pinned in the files of the\n"
      "run's drives. The directory gets its name only when it is complete.\n"
      "Examples:\n"
      "  ziggurat checkpoint list runs/quickstart\n"
      "  ziggurat checkpoint verify runs/quickstart\n"
      "  ziggurat checkpoint show runs/quickstart --json");
}

}  // namespace zg::cli
