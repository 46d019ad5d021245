// Interprets the merged configuration: our own sections here, DeepSpeed's in the other files.
#include "ziggurat/config/run_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace config {
namespace {

// With this limit the number of a run's tokens fits into 64 bits, even with the most tokens per step.
constexpr std::int64_t kMostSteps = 1'000'000'000;

const Keys& dropout_keys() {
  static const Keys keys({
      {"embedding", &DropoutRates::embedding, NumberSpec{.range = kBelowOne},
       "Share of the elements of the sum of token and position embeddings that training "
       "drops: GPT-2's `embd_pdrop`. With `model.from`, too, this key decides and not that "
       "of `config.json`."},
      {"residual", &DropoutRates::residual, NumberSpec{.range = kBelowOne},
       "Share of the elements that training drops of what each attention and each MLP adds "
       "to the residual stream: GPT-2's `resid_pdrop`. This key, too, decides alone."},
  });
  return keys;
}

// The names of all families: `"gpt2"`, `"llama"` ... or `"gemma3"`.
std::string family_list() {
  std::string text;
  for (const Arch& arch : kFamilies) {
    const bool first = &arch == std::begin(kFamilies), last = &arch + 1 == std::end(kFamilies);
    text += fmt::format("{}`\"{}\"`", first ? "" : last ? " or " : ", ", name_of(arch));
  }
  return text;
}

const Keys& model_section_keys() {
  static const Keys keys({
      {"from", TextSpec{}, "Hugging Face directory of a model to start from.",
       "this or `model.arch` is required"},
      {"arch", FormSpec{},
       "A new model of this family, described by the keys of its `config.json` (the table of its name "
       "below).",
       "this or `model.from` is required", family_list()},
      {"quantize",
       ChoiceSpec(SavedCode::kNf4, {{"nf4", SavedCode::kNf4},
                                    {"nf4_double", SavedCode::kNf4Double},
                                    {"fp8", SavedCode::kFp8},
                                    {"int4", SavedCode::kInt4}}),
       "Code in which the matrices of `model.from` are quantised before the run, as `ziggurat quantize` does "
       "it. It is done once: the result stays in `quantize_cache`. Only with `lora`, and for a model whose "
       "weights are plain.",
       "none"},
      {"quantize_cache", TextSpec{}, "Directory in which quantised models stay for later runs.",
       "`$XDG_CACHE_HOME/ziggurat/models`, or `~/.cache/ziggurat/models`"},
      {"dropout", SectionSpec{dropout_keys}, "What training drops."},
  });
  return keys;
}

const Keys& tokenizer_keys() {
  static const Keys keys(
      {{"gpt2", TextSpec{}, "Directory that holds `encoder.json` and `vocab.bpe`.",
        "this or `file` is required"},
       {"file", TextSpec{},
        "A `tokenizer.json` of Hugging Face, a model file of SentencePiece, or a directory that holds one.",
        "this or `gpt2` is required"}});
  return keys;
}

const Keys& blend_keys() {
  static const Keys keys(
      {{"path", FormSpec{}, "Files, as in `data.train`.", "required", "a text, or a list of texts"},
       {"weight", NumberSpec{.fallback = 1, .range = kSmall},
        "Sequences are drawn from the sources in proportion to their weights."}});
  return keys;
}

const Keys& data_keys() {
  using D = DataConfig;
  using Kind = TokenizerConfig::Kind;
  static const DataConfig d;
  static const Keys keys({
      {"train", FormSpec{},
       "Text file, documents (JSON objects, one a line or all in a list), or token file (`.bin`) to train "
       "on, "
       "or a list of them. A name with `*`, `?` or `[` stands for all files that match.",
       "this or `blend` is required", "a text, or a list of texts"},
      {"blend", ListSpec{blend_keys},
       "Several sources with weights, an object for each, in place of `train`.", "none"},
      {"packing", &D::packing,
       ChoiceSpec(Packing::kNone, {{"none", Packing::kNone}, {"documents", Packing::kDocuments}}),
       "How documents become sequences. `\"none\"`: windows of all documents, one behind the "
       "other; `\"documents\"`: each sequence has several whole documents, each with "
       "positions and attention of its own."},
      {"order", &D::order,
       ChoiceSpec(Order::kRandom, {{"random", Order::kRandom}, {"epochs", Order::kEpochs}}),
       "In which order sequences are drawn. `\"random\"`: from all windows of the data, with "
       "replacement; `\"epochs\"`: windows without overlap, or packed sequences, each of them "
       "once per epoch, and every epoch in another order."},
      {"validation", FormSpec{},
       "Data to validate on: one file, or a share of each training file, taken from its end; 0: none.",
       fmt::format("`{}`", d.validation_share), "a text, or a number from 0 to below 1"},
      {"tokenizer",
       ChoiceSpec(d.tokenizer.kind, {{"bytes", Kind::kBytes}, {"chars", Kind::kChars}}),
       "How text becomes tokens: its bytes, its characters, GPT-2's tokens (the directory holds "
       "`encoder.json` and "
       "`vocab.bpe`), or those of a `tokenizer.json` or a model file of SentencePiece.",
       {},
       "`\"bytes\"`, `\"chars\"`, `{\"gpt2\": \"DIRECTORY\"}` or `{\"file\": \"PATH\"}`"},
      {"document_end", &D::document_end, TextSpec{},
       "Name of the token behind each \"text\" of documents, e.g. `</s>`; empty: none."},
      {"token_dtype", &D::token_dtype,
       ChoiceSpec(DType::kU16, {{"uint16", DType::kU16}, {"uint32", DType::kI32}}),
       "Type of the tokens in `.bin` files."},
      {"seq_len", IntSpec{.min = 1, .max = 1 << 24}, "Tokens of a sequence, at most the model's context.",
       fmt::format("`{}`, or the model's context if that is smaller", d.seq_len)},
  });
  return keys;
}

const Keys& eval_keys() {
  static const Keys keys({
      {"every", &RunConfig::eval_every, IntSpec{.max = kMostSteps},
       "Steps between evaluations; 0: at the end only."},
      {"batches", &RunConfig::eval_batches, IntSpec{.min = 1, .max = kMostSteps},
       "Micro-batches of an evaluation."},
  });
  return keys;
}

const Keys& sample_keys() {
  static const Keys keys({
      {"tokens", &RunConfig::sample_tokens, IntSpec{.max = 1'000'000},
       "Tokens of text that is generated at the end."},
      {"prompt", &RunConfig::sample_prompt, TextSpec{}, "What the text begins with."},
  });
  return keys;
}

const Keys& output_keys() {
  static const Keys keys({
      {"dir", TextSpec{}, "Directory that the run is written to.", "`runs/` and the name of the first file"},
  });
  return keys;
}

// Refuses names from Hugging Face's config.json, which our keys spell differently or do not support.
void refuse_names_of_hf(const Section& model) {
  constexpr std::pair<const char*, const char*> kNames[] = {{"embd_pdrop", "embedding"},
                                                            {"resid_pdrop", "residual"}};
  for (const auto& [theirs, ours] : kNames) {
    if (model.json().contains(theirs))
      model.fail(theirs, "has another name here", fmt::format("write \"dropout\": {{\"{}\": ...}}", ours));
  }
  for (const char* theirs : {"attn_pdrop", "attention_dropout"}) {
    if (!model.json().contains(theirs)) continue;
    model.fail(theirs, "is not supported: the probabilities of attention have no dropout",
               "remove it; \"dropout\" has \"embedding\" and \"residual\"");
  }
}

void read_model(Section& root, RunConfig& run) {
  auto section = root.section("model");
  if (!section) {
    root.fail(
        "model", "is missing",
        "{\"from\": \"a Hugging Face directory\"}, or {\"arch\": \"gpt2\", \"n_layer\": ...}; a DeepSpeed "
        "file goes after one that has it: ziggurat train configs/tiny.json deepspeed.json");
  }
  if (section->has("from") == section->has("arch")) {
    section->fail(
        "", section->has("from") ? "has both \"from\" and \"arch\"" : "has neither \"from\" nor \"arch\"",
        "\"from\" loads a Hugging Face directory, \"arch\" describes a new model");
  }
  refuse_names_of_hf(*section);
  if (auto dropout = section->section("dropout")) {
    dropout->read_into(run.dropout);
    dropout->finish();
  }
  if (section->has("quantize")) run.quantize.code = section->choice<SavedCode>("quantize");
  if (section->has("quantize_cache")) {
    run.quantize.cache = section->text("quantize_cache");
    if (run.quantize.cache.empty()) section->wrong("quantize_cache", "a directory");
  }
  if (section->has("from")) {
    run.model_from = section->text("from");
    if (run.model_from.empty()) section->wrong("from", "a directory");
    section->finish();
    return;
  }
  if (run.quantize.code) {
    section->fail("quantize", "is given, and the model is new: it has no weights to quantise",
                  "name a trained model (model.from), or remove the key");
  }
  Json of_family = section->json();
  for (const char* key : {"dropout", "quantize", "quantize_cache"}) of_family.erase(key);
  run.model = parse_model_config(of_family.dump(-1, ' ', true, Json::error_handler_t::replace),
                                 section->tree().where_section("model"));
}

void read_tokenizer(Section& data, TokenizerConfig& out) {
  using Kind = TokenizerConfig::Kind;
  const Json* value = data.find("tokenizer");
  if (value == nullptr || !value->is_object()) {
    constexpr const char* kExpected =
        "\"bytes\", \"chars\", {\"gpt2\": \"directory\"} or {\"file\": \"tokenizer.json\"}";
    if (value != nullptr && !value->is_string()) data.wrong("tokenizer", kExpected);
    if (value != nullptr && *value == "gpt2") {
      data.wrong("tokenizer", kExpected, "the directory holds encoder.json and vocab.bpe");
    }
    out.kind = data.choice<Kind>("tokenizer");
    return;
  }
  Section section = data.child("tokenizer", *value, tokenizer_keys());
  const bool file = section.has("file");
  if (file && section.has("gpt2")) section.fail("", "has both \"gpt2\" and \"file\"", "name one of them");
  out.kind = file ? Kind::kFile : Kind::kGpt2;
  out.directory = section.text(file ? "file" : "gpt2");
  section.finish();
  if (!out.directory.empty()) return;
  if (file)
    section.wrong("file", "a tokenizer.json, a model file of SentencePiece, or a directory that holds one");
  section.wrong("gpt2", "a directory that holds encoder.json and vocab.bpe");
}

// One path or several.
std::vector<std::string> read_paths(Section& section, const char* key) {
  const Json* value = section.find(key);
  if (value == nullptr) return {};
  std::vector<std::string> paths;
  for (const Json& path : value->is_array() ? *value : Json::array({*value})) {
    if (!path.is_string()) section.wrong(key, "a text, or a list of texts");
    if (!path.get<std::string>().empty()) paths.push_back(path.get<std::string>());
  }
  return paths;
}

// Reads where the training tokens come from.
void read_sources(Section& data, DataConfig& out) {
  const std::vector<std::string> train = read_paths(data, "train");
  if (train.size() == 1) out.train = train.front();
  if (train.size() > 1) out.blend.push_back({.paths = train});
  for (Section& source : data.sections(
           "blend", "a list such as [{\"path\": \"a.jsonl\", \"weight\": 3}, {\"path\": \"b.jsonl\"}]")) {
    if (!train.empty()) data.fail("blend", "is given beside data.train", "name the files in one of them");
    const std::vector<std::string> paths = read_paths(source, "path");
    if (paths.empty()) source.fail("path", "is missing", "name one or several files");
    out.blend.push_back({.paths = paths, .weight = source.number("weight")});
    source.finish();
  }
  if (!out.train.empty() || !out.blend.empty()) return;
  data.fail("train", "is missing", "name a text file or a token file (.bin), e.g. --set data.train=book.txt");
}

// Reads "validation": a path, or a share of the training text.
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
  Section data = root.section_or_empty("data");
  DataConfig& out = run.data;
  data.read_into(out);
  read_sources(data, out);
  read_validation(data, out);
  read_tokenizer(data, out.tokenizer);
  // The context of a model from a directory is not known here; the code that reads the directory checks it.
  out.seq_len =
      data.integer("seq_len", run.model ? std::min(out.seq_len, run.model->longest_sequence()) : out.seq_len);
  if (run.model && out.seq_len > run.model->context) {
    data.wrong("seq_len", fmt::format("at most the context of the model, {}", run.model->context),
               "make seq_len smaller, or the model's n_positions or max_position_embeddings larger");
  }
  data.finish();
}

void read_run(Section& root, RunConfig& run) {
  root.require("steps", "e.g. \"steps\": 1000, or --set steps=1000");
  root.read_into(run);
  for (const char* key : {"eval", "sample"}) {
    auto section = root.section(key);
    if (!section) continue;
    section->read_into(run);
    section->finish();
  }
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

std::vector<Key> run_keys() {
  return {{"steps", &RunConfig::steps, IntSpec{.min = 1, .max = kMostSteps}, "Optimizer steps.", "required"},
          {"seed", &RunConfig::seed, IntSpec{},
           "Seed of the weights, of the order of the data, and of all other random numbers."},
          {"model", SectionSpec{model_section_keys}, "What is trained."},
          {"lora", SectionSpec{lora_keys}, "Adapters that are trained in place of the model (LoRA)."},
          {"router", SectionSpec{router_keys}, "Balance terms of mixtures of experts."},
          {"data", SectionSpec{data_keys}, "What it is trained on."},
          {"eval", SectionSpec{eval_keys}, "Evaluations."},
          {"sample", SectionSpec{sample_keys}, "Text that is generated at the end."},
          {"output", SectionSpec{output_keys}, "What the run leaves."},
          {"checkpoint", SectionSpec{checkpoint_keys}, "Checkpoints, from which a run can be resumed."}};
}

}  // namespace config

RunConfig load_config(const ConfigSource& source, const Machine& machine) {
  using namespace config;
  const ConfigTree tree = merge_sources(source);
  RunConfig run;
  run.processes = machine.processes;
  run.warnings = tree.notices;
  Section root(tree, tree.root, "", run.warnings, root_keys());
  read_model(root, run);
  read_lora(root, run);
  read_router(root, run);
  read_run(root, run);
  read_data(root, run);
  // Devices come before the batch, which counts all ranks, and before the precision, whose "auto" depends on
  // the formats that the device multiplies fast.
  read_devices(root, machine, run);
  read_parallel(root, run);
  read_batch(root, run);
  read_precision(root, machine, run);
  read_optimizer(root, run);  // after the precision, which limits how its state may be kept
  read_scheduler(root, run);
  read_activation_checkpointing(root, run);
  read_aio(root, run);
  read_tiers(root, run);  // after aio, whose back end decides whether tiers.ram has an effect
  read_zero(root, run);   // after tiers, which decide whether nvme_path has an effect
  read_threads(root, run);
  read_output(root, source, run);
  read_checkpoint(root, run);
  read_other_deepspeed(root);
  root.finish();
  settle_composition(root, run);
  warn_of_idle_keys(root, run);
  run.resolved_json = tree.root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  return run;
}

}  // namespace zg
