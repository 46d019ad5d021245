// Interprets the merged configuration: our own sections here, DeepSpeed's in the other files.
#include "ziggurat/config/run_config.hpp"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg {
namespace config {
namespace {

void read_model(Section& root, RunConfig& run) {
  auto section = root.section("model");
  if (!section) {
    root.fail("model", "is missing",
              "{\"from\": \"a Hugging Face directory\"}, or {\"arch\": \"gpt2\", \"n_layer\": ...}; a "
              "DeepSpeed file "
              "goes after one that has it: ziggurat train configs/tiny.json deepspeed.json");
  }
  if (section->has("from") == section->has("arch")) {
    section->fail(
        "", section->has("from") ? "has both \"from\" and \"arch\"" : "has neither \"from\" nor \"arch\"",
        "\"from\" loads a Hugging Face directory, \"arch\" describes a new model");
  }
  if (section->has("from")) {
    run.model_from = section->text("from", "");
    if (run.model_from.empty()) section->wrong("from", "a directory");
    section->finish();
    return;
  }
  const std::string json = section->json().dump(-1, ' ', true, Json::error_handler_t::replace);
  run.model = parse_model_config(json, section->tree().where_section("model"));
}

void read_tokenizer(Section& data, TokenizerConfig& out) {
  using Kind = TokenizerConfig::Kind;
  const Json* value = data.find("tokenizer");
  if (value == nullptr || !value->is_object()) {
    constexpr const char* kExpected = "\"bytes\", \"chars\" or {\"gpt2\": \"directory\"}";
    if (value != nullptr && !value->is_string()) data.wrong("tokenizer", kExpected);
    if (value != nullptr && *value == "gpt2") {
      data.wrong("tokenizer", kExpected, "the directory holds encoder.json and vocab.bpe");
    }
    out.kind = data.choice("tokenizer", out.kind, {{"bytes", Kind::kBytes}, {"chars", Kind::kChars}});
    return;
  }
  auto section = data.section("tokenizer");
  out.kind = Kind::kGpt2;
  out.directory = section->text("gpt2", "");
  section->finish();
  if (out.directory.empty()) section->wrong("gpt2", "a directory that holds encoder.json and vocab.bpe");
}

// A path, or a share of the training text.
void read_validation(Section& data, DataConfig& out) {
  const Json* value = data.find("validation");
  if (value == nullptr) return;
  if (value->is_string()) {
    out.validation = value->get<std::string>();
    if (!out.validation.empty()) return;
  }
  const bool share = value->is_number() && value->get<double>() >= 0 && value->get<double>() < 1;
  if (!share) data.wrong("validation", "a file, or a share of the training text from 0 to below 1, e.g. 0.1");
  out.validation_share = value->get<double>();
}

void read_data(Section& root, RunConfig& run) {
  const Json none = Json::object();
  auto data = root.section("data");
  if (!data) data = root.child("data", none);
  DataConfig& out = run.data;
  out.train = data->text("train", "");
  if (out.train.empty()) {
    data->fail("train", "is missing",
               "name a text file or a token file (.bin), e.g. --set data.train=book.txt");
  }
  read_validation(*data, out);
  read_tokenizer(*data, out.tokenizer);
  out.token_dtype =
      data->choice("token_dtype", DType::kU16, {{"uint16", DType::kU16}, {"uint32", DType::kI32}});
  // Directories that are loaded have their own context, which the model's reader checks.
  if (run.model) out.seq_len = std::min(out.seq_len, run.model->context);
  out.seq_len = data->integer("seq_len", {.fallback = out.seq_len, .min = 1, .max = 1 << 24});
  if (run.model && out.seq_len > run.model->context) {
    data->wrong("seq_len", fmt::format("at most the context of the model, {}", run.model->context),
                "make seq_len smaller, or the model's n_positions or max_position_embeddings larger");
  }
  data->finish();
}

void read_run(Section& root, RunConfig& run) {
  if (!root.has("steps")) root.fail("steps", "is missing", "e.g. \"steps\": 1000, or --set steps=1000");
  run.steps = root.integer("steps", {.min = 1});
  run.seed =
      static_cast<std::uint64_t>(root.integer("seed", {.fallback = static_cast<std::int64_t>(run.seed)}));
  if (auto eval = root.section("eval")) {
    run.eval_every = eval->integer("every", {.fallback = run.eval_every});
    run.eval_batches = eval->integer("batches", {.fallback = run.eval_batches, .min = 1});
    eval->finish();
  }
  if (auto sample = root.section("sample")) {
    run.sample_tokens = sample->integer("tokens", {.fallback = 0, .max = 1'000'000});
    run.sample_prompt = sample->text("prompt", "");
    sample->finish();
  }
  run.accumulation = root.choice(
      "accumulation", Accumulation::kLayerMajor,
      {{"layer_major", Accumulation::kLayerMajor}, {"micro_batch_major", Accumulation::kMicroBatchMajor}});
}

// 0: not stated.
std::int64_t read_drive_bytes(Section& entry) {
  const std::int64_t bytes = entry.bytes("bytes").value_or(0);
  if (!entry.has("bytes") || bytes >= io::Engine::alignment()) return bytes;
  entry.wrong("bytes", fmt::format("{} bytes or more", io::Engine::alignment()),
              entry.find("bytes")->is_number()
                  ? fmt::format("without a unit these are bytes: did you mean \"{}GiB\"?", bytes)
                  : std::string("leave it out to give the drive what the run needs"));
}

// What a drive made of memory pretends to be.
io::RamModel read_ram(Section& ram) {
  io::RamModel model;
  model.bytes_per_second = ram.number("bytes_per_second", {});
  model.latency_seconds = ram.number("latency_seconds", {});
  model.duplex = ram.boolean("duplex", false);
  model.stall_every_seconds = ram.number("stall_every_seconds", {});
  model.stall_seconds = ram.number("stall_seconds", {});
  model.change_every_seconds = ram.number("change_every_seconds", {});
  model.change_factor = ram.number("change_factor", {.fallback = model.change_factor});
  ram.finish();
  try {
    (void)io::mean_bytes_per_second(model);  // refuses stalls and changes without meaning
  } catch (const Error& e) {
    ram.fail("", "has " + e.message(), e.hint());
  }
  return model;
}

// One `ram` section, of all drives or of one; a warning where no drive is made of memory.
std::optional<io::RamModel> find_ram(Section& parent, const RunConfig& run) {
  auto ram = parent.section("ram");
  if (!ram) return {};
  if (run.aio.backend != io::Backend::kRam) parent.notice("ram", "has no effect: aio.backend is not \"ram\"");
  return read_ram(*ram);
}

// A step's time on the drives is that of its longer way, or of both: of all drives the same.
void check_duplex(const Section& tiers, const RunConfig& run) {
  if (run.aio.backend != io::Backend::kRam) return;
  const auto duplex = [&](std::size_t i) { return run.tiers.nvme[i].ram.value_or(run.tiers.ram).duplex; };
  for (std::size_t i = 1; i < run.tiers.nvme.size(); ++i) {
    if (duplex(i) == duplex(0)) continue;
    tiers.fail(fmt::format("nvme.{}.ram.duplex", i),
               fmt::format("is {}, and that of nvme.0 is {}", duplex(i), duplex(0)),
               "make all drives the same; a drive's own \"ram\" replaces all of tiers.ram");
  }
}

void read_drives(Section& tiers, RunConfig& run) {
  constexpr const char* kExpected = "a list: [{\"path\": \"directory\", \"bytes\": \"1GiB\"}]";
  const Json* list = tiers.find("nvme");
  if (list == nullptr) return;
  std::vector<io::DriveOptions>& out = run.tiers.nvme;
  if (!list->is_array()) tiers.wrong("nvme", kExpected);
  for (std::size_t i = 0; i < list->size(); ++i) {
    const std::string key = fmt::format("nvme.{}", i);
    if (!(*list)[i].is_object()) {
      tiers.fail(key, "found " + describe((*list)[i]) + ", expected an object in " + kExpected);
    }
    Section entry = tiers.child(key, (*list)[i]);
    io::DriveOptions drive;
    drive.path = entry.text("path", "");
    if (drive.path.empty()) entry.fail("path", "is missing", "a directory on the drive");
    drive.bytes = read_drive_bytes(entry);
    drive.endurance_bytes = static_cast<double>(entry.bytes("endurance").value_or(0));
    drive.ram = find_ram(entry, run);
    entry.finish();
    const auto same = [&](const io::DriveOptions& other) { return other.path == drive.path; };
    if (std::any_of(out.begin(), out.end(), same)) {
      entry.fail("path", "found " + drive.path + " a second time, expected a directory a drive");
    }
    out.push_back(drive);
  }
}

void read_tiers(Section& root, RunConfig& run) {
  auto tiers = root.section("tiers");
  if (!tiers) return;
  run.tiers.device = tiers->bytes("device");
  run.tiers.host = tiers->bytes("host");
  read_drives(*tiers, run);
  run.tiers.prefetch_depth =
      static_cast<int>(tiers->integer("prefetch_depth", {.fallback = run.tiers.prefetch_depth, .max = 4096}));
  if (tiers->is_auto("read_ahead")) {
    tiers->notice("read_ahead", "\"auto\": the plan finds it");
  } else if (tiers->has("read_ahead")) {
    run.tiers.read_ahead = tiers->number("read_ahead", {.range = NumberSpec::Range::kBelowOne});
  }
  run.tiers.ram = find_ram(*tiers, run).value_or(io::RamModel{});
  check_duplex(*tiers, run);
  tiers->finish();
}

void read_parallel(Section& root) {
  auto parallel = root.section("parallel");
  if (!parallel) return;
  for (const char* key : {"tensor", "pipeline"}) {
    if (parallel->integer(key, {.fallback = 1, .min = 1}) != 1) {
      parallel->wrong(key, "1",
                      std::string(key) + " parallelism is not supported: the model runs on one device");
    }
  }
  parallel->must_be_off("sequence", "sequence parallelism is not supported", "remove the key");
  parallel->finish();
}

void read_output(Section& root, const ConfigSource& source, RunConfig& run) {
  run.output_dir = "runs/" + std::filesystem::path(source.files.front()).stem().string();
  auto output = root.section("output");
  if (!output) return;
  run.output_dir = output->text("dir", run.output_dir);
  if (run.output_dir.empty()) output->wrong("dir", "a directory");
  output->finish();
}

}  // namespace

bool has_tiers(Section& root) {
  return root.has("tiers");
}

}  // namespace config

RunConfig load_config(const ConfigSource& source, const Machine& machine) {
  using namespace config;
  const ConfigTree tree = merge_sources(source);
  RunConfig run;
  run.warnings = tree.notices;
  Section root(tree, tree.root, "", run.warnings);
  read_model(root, run);
  read_run(root, run);
  read_data(root, run);
  read_batch(root, run);
  read_devices(root, machine,
               run);  // before the precision, which is "auto" by what the device multiplies fast
  read_precision(root, machine, run);
  read_optimizer(root, run);  // after the precision, which limits how its state may be kept
  read_scheduler(root, run);
  read_activation_checkpointing(root, run);
  read_aio(root, run);
  read_tiers(root, run);  // after aio, whose back end says whether tiers.ram counts
  read_zero(root, run);   // after tiers, which say whether nvme_path counts
  read_parallel(root);
  read_threads(root, run);
  read_output(root, source, run);
  read_other_deepspeed(root);
  root.finish();
  run.resolved_json = tree.root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  return run;
}

}  // namespace zg
