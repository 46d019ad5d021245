#include "config/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::config {
namespace {

struct Elsewhere {
  const char* key;
  const char* instead;
};
// Keys that people put at the wrong level, or know by another name.
constexpr std::array<Elsewhere, 47> kElsewhere = {{
    {"adam_w_mode", "optimizer.params.adam_w_mode"},
    {"batch_size", "train_batch_size"},
    {"betas", "optimizer.params.betas"},
    {"block_size", "aio.block_size"},
    {"context", "model.n_positions"},
    {"cpu_checkpointing", "activation_checkpointing.cpu_checkpointing"},
    {"device", "tiers.device"},
    {"eps", "optimizer.params.eps"},
    {"grad_clip", "gradient_clipping"},
    {"host", "tiers.host"},
    {"hysteresis", "fp16.hysteresis"},
    {"initial_scale_power", "fp16.initial_scale_power"},
    {"iterations", "steps"},
    {"learning_rate", "optimizer.params.lr"},
    {"loss_scale", "fp16.loss_scale"},
    {"lr", "optimizer.params.lr"},
    {"lr_scheduler", "scheduler"},
    {"max_iters", "steps"},
    {"max_steps", "steps"},
    {"micro_batch", "train_micro_batch_size_per_gpu"},
    {"micro_batch_size", "train_micro_batch_size_per_gpu"},
    {"min_loss_scale", "fp16.min_loss_scale"},
    {"momentum", "optimizer.params.momentum"},
    {"num_threads", "threads.compute"},
    {"nvme", "tiers.nvme"},
    {"nvme_path", "zero_optimization.offload_optimizer.nvme_path"},
    {"offload_optimizer", "zero_optimization.offload_optimizer"},
    {"offload_param", "zero_optimization.offload_param"},
    {"output_dir", "output.dir"},
    {"overlap", "optimizer.overlap"},
    {"param_groups", "optimizer.param_groups"},
    {"prefetch_depth", "tiers.prefetch_depth"},
    {"queue_depth", "aio.queue_depth"},
    {"queues", "aio.queues"},
    {"ratio", "zero_optimization.offload_optimizer.ratio"},
    {"read_ahead", "tiers.read_ahead"},
    {"recompute", "activation_checkpointing.recompute"},
    {"reserved", "threads.reserved"},
    {"seq_len", "data.seq_len"},
    {"sequence_length", "data.seq_len"},
    {"stage", "zero_optimization.stage"},
    {"state", "optimizer.state"},
    {"sub_group_size", "zero_optimization.sub_group_size"},
    {"tokenizer", "data.tokenizer"},
    {"total_num_steps", "scheduler.params.total_num_steps"},
    {"warmup_num_steps", "scheduler.params.warmup_num_steps"},
    {"weight_decay", "optimizer.params.weight_decay"},
}};

constexpr std::size_t kLongestName = 100;  // searching for names similar to a longer one would take long

bool integral(const Json& value) {
  constexpr double kExact = 9007199254740992.0;  // 2^53: above it a double skips whole numbers
  if (value.is_number_unsigned()) return value.get<std::uint64_t>() <= std::uint64_t{INT64_MAX};
  if (value.is_number_integer()) return true;
  if (!value.is_number_float()) return false;
  const double d = value.get<double>();
  return std::abs(d) <= kExact && std::floor(d) == d;
}

bool takes_auto(const Spec& spec) {
  return std::visit(
      [](const auto& s) {
        if constexpr (requires { s.autos; }) return s.autos != Auto::kRefused;
        if constexpr (requires { s.names; })
          return std::find(s.names.begin(), s.names.end(), "auto") != s.names.end();
        return std::is_same_v<std::remove_cvref_t<decltype(s)>, FormSpec> ||
               std::is_same_v<std::remove_cvref_t<decltype(s)>, IgnoredSpec>;
      },
      spec);
}

// A hint for the likeliest mistakes: quotes around a number or a switch, and capitals as in Python.
std::string spelling_hint(const Json& value, const Spec& spec) {
  if (!value.is_string()) return "";
  const std::string& text = value.get_ref<const std::string&>();
  const std::string small = lower(text);
  const auto* choices = std::get_if<ChoiceSpec>(&spec);
  for (const std::string& name : choices != nullptr ? choices->names : std::vector<std::string>())
    if (small == lower(name)) return fmt::format("write \"{}\"", name);
  if (small == "auto") return takes_auto(spec) ? "write \"auto\"" : "";
  if (small == "true" || small == "false")
    return small == text ? "write it without quotes" : fmt::format("write {}, without quotes", small);
  if (small == "none" || small == "null") return "write null, or leave the key out";
  const Json inner = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return inner.is_number() ? "write it without quotes" : "";
}

// Text of a notice: the value that "auto" stands for, and where it comes from.
std::string took(const std::string& value, const char* note) {
  return fmt::format("\"auto\": took {}{}{}", value, *note == '\0' ? "" : ", ", note);
}

// A hint for an unknown key at `path`: where else it may belong, or which known key may be meant.
std::string hint_of_unknown(const std::string& key, const std::string& path,
                            const std::vector<std::string>& known) {
  const auto elsewhere =
      std::find_if(kElsewhere.begin(), kElsewhere.end(), [&](const Elsewhere& e) { return key == e.key; });
  if (elsewhere != kElsewhere.end() && path != elsewhere->instead)
    return fmt::format("did you mean {}?", elsewhere->instead);
  if (const auto nearest = nearest_name(std::string_view(key).substr(0, kLongestName), known))
    return fmt::format("did you mean {}?", *nearest);
  return known.size() <= 16 ? fmt::format("known here: {}", fmt::join(known, ", ")) : "";
}

// Handles a refused key that nobody asked for: an error, unless its value is accepted.
void refuse(Section& section, const Key& row, const RefusedSpec& refused) {
  const std::string& key = row.name;
  switch (refused.form) {
    case RefusedSpec::Form::kSwitch:
      if (section.boolean(key, false)) {
        section.fail(key, fmt::format("found true, expected false: {}", refused.why), row.meaning);
      }
      break;
    case RefusedSpec::Form::kDegree:
      if (section.integer(key, {.fallback = 1, .min = refused.least, .autos = refused.autos}) > 1) {
        section.wrong(key, fmt::format("1: {}", refused.why), row.meaning);
      }
      break;
    case RefusedSpec::Form::kPresence:
      if (section.has(key)) section.fail(key, fmt::format("is not supported: {}", refused.why), row.meaning);
      break;
  }
}

void ignore(Section& section, const Key& row, const IgnoredSpec& ignored) {
  const Json* value = section.find(row.name);
  if (value == nullptr || ignored.warns == IgnoredSpec::Warns::kNever) return;
  if (!section.is_auto(row.name) && !ignored.shape.holds(*value)) {
    section.wrong(row.name, ignored.shape.text);
  }
  if (ignored.warns == IgnoredSpec::Warns::kGiven || *value != false) section.no_effect(row.name);
}

}  // namespace

Section::Section(const ConfigTree& tree, const Json& object, std::string path,
                 std::vector<std::string>& warnings, const Keys& keys)
    : tree_(&tree), object_(&object), path_(std::move(path)), warnings_(&warnings), keys_(&keys) {}

bool Section::known(const std::string& key) const {
  return std::find(known_.begin(), known_.end(), key) != known_.end();
}

const Json* Section::find(const std::string& key) {
  (void)keys_->at(key);
  if (!known(key)) known_.push_back(key);
  const auto it = object_->find(key);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool Section::is_auto(const std::string& key) {
  const Json* value = find(key);
  return value != nullptr && value->is_string() && value->get_ref<const std::string&>() == "auto";
}

std::string Section::spelled(const std::string& key) {
  for (const Key& row : keys_->rows()) {
    const auto* alias = std::get_if<AliasSpec>(&row.spec);
    if (alias == nullptr || key != alias->of || !has(row.name)) continue;
    if (!has(key)) return row.name;
    fail(row.name, fmt::format("is {} of {}, which is given too", alias->kind, key), "remove one of the two");
  }
  return key;
}

void Section::require(const std::string& key, const std::string& hint) {
  if (!has(key)) fail(key, "is missing", hint);
}

std::int64_t Section::integer(const std::string& key, std::int64_t fallback) {
  IntSpec spec = spec_of<IntSpec>(key);
  spec.fallback = fallback;
  return integer(key, spec);
}

double Section::number(const std::string& key, double fallback) {
  NumberSpec spec = spec_of<NumberSpec>(key);
  spec.fallback = fallback;
  return number(key, spec);
}

std::int64_t Section::integer(const std::string& key, const IntSpec& spec) {
  const Json* value = find(key);
  if (value == nullptr) return spec.fallback;
  if (spec.autos == Auto::kTakesFallback && is_auto(key)) {
    notice(key, took(std::to_string(spec.fallback), spec.note));
    return spec.fallback;
  }
  if (!integral(*value)) wrong(key, range_text(spec));
  const std::int64_t number =
      value->is_number_float() ? static_cast<std::int64_t>(value->get<double>()) : value->get<std::int64_t>();
  if (number < spec.min || number > spec.max || number % spec.multiple_of != 0) wrong(key, range_text(spec));
  return number;
}

double Section::number(const std::string& key, const NumberSpec& spec) {
  const Json* value = find(key);
  if (value == nullptr) return spec.fallback;
  if (spec.autos == Auto::kTakesFallback && is_auto(key)) {
    notice(key, took(fmt::format("{}", spec.fallback), spec.note));
    return spec.fallback;
  }
  if (!value->is_number()) wrong(key, spec.range.text);
  const double number = value->get<double>();
  if (!std::isfinite(number) || !spec.range.holds(number)) wrong(key, spec.range.text);
  return number;
}

bool Section::boolean(const std::string& key, bool fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) wrong(key, "true or false");
  return value->get<bool>();
}

std::string Section::text(const std::string& key, const std::string& fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) wrong(key, "a text");
  return value->get<std::string>();
}

std::optional<std::int64_t> Section::bytes(const std::string& key) {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  std::optional<std::int64_t> bytes;
  if (value->is_string()) bytes = parse_bytes(value->get<std::string>());
  if (integral(*value)) bytes = integer(key, {.min = std::numeric_limits<std::int64_t>::min()});
  if (!bytes || *bytes <= 0) wrong(key, "a positive number of bytes, or a text such as \"48MiB\"");
  const std::int64_t most = spec_of<BytesSpec>(key).max;
  if (*bytes > most) wrong(key, fmt::format("at most {} bytes, {}", most, format_bytes(most)));
  return bytes;
}

const Json* Section::object(const std::string& key) {
  const Json* value = find(key);
  if (value != nullptr && !value->is_object()) wrong(key, "an object: \"" + key + "\": { ... }");
  return value;
}

std::optional<Section> Section::section(const std::string& key) {
  const Json* value = object(key);
  if (value == nullptr) return std::nullopt;
  return child(key, *value, spec_of<SectionSpec>(key).keys());
}

Section Section::section_or_empty(const std::string& key) {
  static const Json none = Json::object();
  auto there = section(key);
  return there ? *there : child(key, none, spec_of<SectionSpec>(key).keys());
}

std::vector<Section> Section::sections(const std::string& key, const std::string& expected) {
  std::vector<Section> out;
  const Json* list = find(key);
  if (list == nullptr) return out;
  if (!list->is_array()) wrong(key, expected);
  for (const Json& value : *list) {
    const std::string entry = fmt::format("{}.{}", key, out.size());
    if (!value.is_object()) fail(entry, "found " + describe(value) + ", expected an object in " + expected);
    out.push_back(child(entry, value, spec_of<ListSpec>(key).keys()));
  }
  return out;
}

Section Section::child(const std::string& key, const Json& object, const Keys& keys) const {
  return Section(*tree_, object, path_of(key), *warnings_, keys);
}

void Section::settle_without_effect(const Key& row) {
  if (const auto* ignored = std::get_if<IgnoredSpec>(&row.spec)) ignore(*this, row, *ignored);
  if (row.effect == Effect::kHas) return;
  const auto* choices = std::get_if<ChoiceSpec>(&row.spec);
  const bool as_default = choices != nullptr ? choice_value(row.name) == choices->fallback
                                             : number(row.name) == spec_of<NumberSpec>(row.name).fallback;
  if (!as_default) no_effect(row.name);
}

void Section::finish() {
  for (const Key& row : keys_->rows()) {
    const auto* refused = std::get_if<RefusedSpec>(&row.spec);
    if (refused != nullptr && !known(row.name)) refuse(*this, row, *refused);
  }
  for (const Key& row : keys_->rows()) {
    if (!std::holds_alternative<SectionSpec>(row.spec) || known(row.name)) continue;
    if (auto unread = section(row.name)) unread->finish();
  }
  for (const Key& row : keys_->rows()) {
    if (!known(row.name)) settle_without_effect(row);
  }
  for (const auto& [key, value] : object_->items()) {
    if (known(key)) continue;
    // People disable a key by putting _ before it; no valid key begins with _.
    if (key.rfind('_', 0) != 0) fail(key, "is not a known key", hint_of_unknown(key, path_of(key), known_));
    notice(key, "has no effect: what begins with _ is a comment");
  }
}

void Section::notice(const std::string& key, const std::string& text) {
  warnings_->push_back(where(key) + ": " + text);
}

void Section::fail(const std::string& key, const std::string& what, const std::string& hint) const {
  throw Error(Errc::kUsage, where(key), what, hint);
}

void Section::wrong(const std::string& key, const std::string& expected, const std::string& hint) const {
  const auto it = object_->find(key);
  const std::string found = it == object_->end() ? "nothing" : describe(*it);
  const auto row = std::find_if(keys_->rows().begin(), keys_->rows().end(),
                                [&](const Key& known_row) { return known_row.name == key; });
  const bool hintless = hint.empty() && it != object_->end() && row != keys_->rows().end();
  fail(key, "found " + found + ", expected " + expected,
       hintless ? spelling_hint(*it, keys_->at(key).spec) : hint);
}

int Section::choice_value(const std::string& key) {
  const ChoiceSpec& choices = spec_of<ChoiceSpec>(key);
  const Json* value = find(key);
  if (value == nullptr) return choices.fallback;
  const std::string expected = fmt::format("one of \"{}\"", fmt::join(choices.names, "\", \""));
  if (!value->is_string()) wrong(key, expected);
  const std::string name = value->get<std::string>();
  const auto it = std::find(choices.names.begin(), choices.names.end(), name);
  if (it != choices.names.end()) return choices.values[static_cast<std::size_t>(it - choices.names.begin())];
  const auto nearest = nearest_name(std::string_view(name).substr(0, kLongestName), choices.names);
  const std::string spelling = spelling_hint(*value, keys_->at(key).spec);
  wrong(key, expected, !spelling.empty() ? spelling : nearest ? "did you mean \"" + *nearest + "\"?" : "");
}

}  // namespace zg::config
