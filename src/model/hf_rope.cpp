#include "model/hf_rope.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include "model/hf_text.hpp"

namespace zg::hf {
namespace {

using Kind = RopeScaling::Kind;

struct NamedKind {
  Kind kind;
  const char* name;
};
constexpr NamedKind kKinds[] = {{Kind::kNone, "default"},
                                {Kind::kLinear, "linear"},
                                {Kind::kLlama3, "llama3"},
                                {Kind::kYarn, "yarn"},
                                {Kind::kLongRope, "longrope"}};

// Gemma 3's names for layers with a window, and without.
constexpr const char *kLocal = "sliding_attention", *kGlobal = "full_attention";

constexpr const char* kOriginal = "original_max_position_embeddings";

// Refuses unknown keys, since they may change the arithmetic.
void refuse_unknown(const Keys& rope, const std::string& key) {
  static constexpr std::string_view kKnown[] = {
      "rope_type",       "type",        "rope_theta",       "partial_rotary_factor",
      "factor",          "beta_fast",   "beta_slow",        "original_max_position_embeddings",
      "low_freq_factor", "mscale",      "truncate",         "mscale_all_dim",
      "short_factor",    "long_factor", "attention_factor", "high_freq_factor",
      "finetuned"};  // in YaRN's own files; transformers never reads it
  for (const auto& item : rope.object().items()) {
    if (std::find(std::begin(kKnown), std::end(kKnown), item.key()) != std::end(kKnown)) continue;
    throw Error(Errc::kUsage, rope.where(),
                fmt::format("\"{}\" has {}, which is not supported", key, in_quotes(item.key())),
                "the model may compute something else than this engine does; choose another model");
  }
}

Kind kind_of(const Keys& rope, RopeKeys which) {
  // Old Phi-3 files call LongRoPE "su" or "yarn"; transformers reads them the same way.
  const std::string name = rope.text("rope_type", rope.text("type", ""));
  if (which == RopeKeys::kLong) {
    if (name == "longrope" || name == "su" || name == "yarn") return Kind::kLongRope;
    if (name == "default" || name.empty()) return Kind::kNone;
    rope.unsupported(rope.has("rope_type") ? "rope_type" : "type", "\"default\" or \"longrope\"");
  }
  for (const NamedKind& kind : kKinds) {
    if (name == kind.name && (kind.kind != Kind::kLongRope)) return kind.kind;
  }
  if (name.empty()) return Kind::kNone;
  rope.unsupported(rope.has("rope_type") ? "rope_type" : "type",
                   "\"default\", \"linear\", \"llama3\" or \"yarn\"");
}

double required(const Keys& rope, const char* key) {
  if (!rope.has(key)) {
    throw Error(Errc::kUsage, rope.where(), fmt::format("\"{}\" is missing; a number > 0 is expected", key),
                fmt::format("add \"{}\"", key));
  }
  return rope.positive(key, 0);
}

double ratio_of(std::int64_t context, std::int64_t original) {
  return static_cast<double>(context) / static_cast<double>(original);
}

// The original context. In this family the key at the top level counts, by default 4096, and not the one in
// the object. A file whose object has another value probably means that one, but would get the first; it is
// refused.
std::int64_t original_of_phi3(const Keys& rope, const Keys& top) {
  const std::int64_t beside = top.size(kOriginal, 4096);
  if (rope.size(kOriginal, beside) == beside) return beside;
  throw Error(Errc::kUsage, rope.where(),
              fmt::format("\"{}\" is {}; beside the object {} is {}", kOriginal, rope.size(kOriginal),
                          top.has(kOriginal) ? "it" : "it is not given, and", beside),
              fmt::format("say \"{}\": {} in config.json itself", kOriginal, rope.size(kOriginal)));
}

RopeScaling read_scaling(const Keys& rope, const Keys& top, RopeKeys which, const ModelConfig& c) {
  RopeScaling s;
  s.kind = kind_of(rope, which);
  if (s.kind == Kind::kNone) return s;
  if (s.kind == Kind::kLinear) {
    s.factor = required(rope, "factor");
    return s;
  }
  s.original = which == RopeKeys::kLong ? original_of_phi3(rope, top) : rope.size(kOriginal, c.context);
  const double ratio = ratio_of(c.context, s.original);
  s.factor = s.kind == Kind::kLlama3 ? required(rope, "factor") : rope.positive("factor", ratio);
  if (s.kind == Kind::kLlama3) {
    s.low_freq_factor = required(rope, "low_freq_factor");
    s.high_freq_factor = required(rope, "high_freq_factor");
    return s;
  }
  s.attention_factor = rope.positive_or_zero("attention_factor");
  if (s.kind == Kind::kYarn) {
    // transformers reads 0 as "not given" for these four keys.
    const auto given = [&](const char* key, double fallback) {
      return rope.has(key) && rope.at(key) == 0 ? fallback : rope.positive(key, fallback);
    };
    s.beta_fast = given("beta_fast", 32);
    s.beta_slow = given("beta_slow", 1);
    s.truncate = rope.flag("truncate", true);
    s.mscale = given("mscale", 0);
    s.mscale_all_dim = given("mscale_all_dim", 0);
    (void)rope.flag("finetuned", false);
    return s;
  }
  s.short_factor = rope.numbers("short_factor");
  s.long_factor = rope.numbers("long_factor");
  return s;
}

// `key` names the object, which may be null.
Rope read_object(const Keys& keys, const std::string& key, const json& value, RopeKeys which,
                 const ModelConfig& c, double theta) {
  Rope rope;
  rope.theta = theta;
  if (value.is_null()) return rope;
  if (!value.is_object()) keys.wrong(key, "null or an object");
  const Keys object(value, keys.where() + ": " + key);
  refuse_unknown(object, key);
  rope.theta = object.positive("rope_theta", theta);
  rope.partial = object.positive("partial_rotary_factor", 1);
  rope.scaling = read_scaling(object, keys, which, c);
  return rope;
}

// The key of the object with the scaling of frequencies. The older key takes precedence, as in transformers.
const char* key_of(const Keys& keys) {
  const bool older =
      keys.has("rope_scaling") && !(keys.at("rope_scaling").is_object() && keys.at("rope_scaling").empty());
  return older ? "rope_scaling" : "rope_parameters";
}

void read_local_and_global(const Keys& keys, ModelConfig& c) {
  constexpr RopeKeys kWhich = RopeKeys::kLocalAndGlobal;
  const double global = keys.positive("rope_theta", 1e6), local = keys.positive("rope_local_base_freq", 1e4);
  const auto nested = [&](const char* layers) {
    const json& object = keys.at("rope_parameters");
    return object.contains(layers) ? object[layers] : json();
  };
  c.block.rope.theta = global;
  c.block.window_rope = Rope{.theta = local};
  if (keys.has("rope_parameters")) {
    if (!keys.at("rope_parameters").is_object()) keys.wrong("rope_parameters", "null or an object");
    for (const auto& item : keys.at("rope_parameters").items()) {
      if (item.key() == kLocal || item.key() == kGlobal) continue;
      keys.wrong("rope_parameters", fmt::format("an object with \"{}\" and \"{}\"", kGlobal, kLocal));
    }
    c.block.rope =
        read_object(keys, std::string("rope_parameters: ") + kGlobal, nested(kGlobal), kWhich, c, global);
    c.block.window_rope =
        read_object(keys, std::string("rope_parameters: ") + kLocal, nested(kLocal), kWhich, c, local);
    if (c.block.window_rope->scaling.kind != Kind::kNone)
      keys.unsupported("rope_parameters", "\"rope_type\" \"default\" of the layers with a window");
  }
  if (keys.has("rope_scaling"))
    c.block.rope = read_object(keys, "rope_scaling", keys.at("rope_scaling"), kWhich, c, c.block.rope.theta);
  if (keys.positive("partial_rotary_factor", 1) != 1) keys.unsupported("partial_rotary_factor", "1");
  if (c.block.rope.partial != 1 || c.block.window_rope->partial != 1)
    keys.unsupported("rope_parameters", "\"partial_rotary_factor\" 1");
}

// The fraction of a head that rotates: beside the object with the scaling, or within it, which counts.
double read_partial(const Keys& keys, const char* object, double fallback, const ModelConfig& c) {
  if (keys.has(object) && keys.at(object).contains("partial_rotary_factor")) return c.block.rope.partial;
  const double by_columns =
      keys.has("rotary_dim") ? static_cast<double>(keys.size("rotary_dim")) / static_cast<double>(c.head_size)
                             : fallback;
  return keys.positive("partial_rotary_factor", by_columns);
}

// The JSON object of a scaling. LongRoPE's original context is a key next to the object, and its factor
// follows from that context.
json scaling_object(const RopeScaling& s, std::int64_t context) {
  nlohmann::ordered_json out;
  for (const NamedKind& kind : kKinds) {
    if (kind.kind == s.kind) out["rope_type"] = kind.name;
  }
  const bool longrope = s.kind == Kind::kLongRope;
  if (!longrope || s.factor != ratio_of(context, s.original)) out["factor"] = s.factor;
  if (s.kind == Kind::kLinear) return out;
  if (!longrope) out["original_max_position_embeddings"] = s.original;
  if (s.kind == Kind::kLlama3) {
    out["low_freq_factor"] = s.low_freq_factor;
    out["high_freq_factor"] = s.high_freq_factor;
    return out;
  }
  if (s.attention_factor > 0) out["attention_factor"] = s.attention_factor;
  if (s.kind == Kind::kYarn) {
    out["beta_fast"] = s.beta_fast;
    out["beta_slow"] = s.beta_slow;
    if (!s.truncate) out["truncate"] = false;
    if (s.mscale > 0) out["mscale"] = s.mscale;
    if (s.mscale_all_dim > 0) out["mscale_all_dim"] = s.mscale_all_dim;
    return out;
  }
  out["short_factor"] = s.short_factor;
  out["long_factor"] = s.long_factor;
  return out;
}

}  // namespace

void read_rope(const Keys& keys, RopeKeys which, ModelConfig& c, double default_partial) {
  if (which == RopeKeys::kLocalAndGlobal) return read_local_and_global(keys, c);
  const double theta = keys.positive("rope_theta", 10000);
  const char* const key = key_of(keys);
  const bool interleaved = c.block.rope.interleaved;
  c.block.rope = read_object(keys, key, keys.has(key) ? keys.at(key) : json(), which, c, theta);
  c.block.rope.interleaved = interleaved;
  if (keys.has(key) && std::string_view(key) == "rope_scaling" && !keys.at(key).contains("rope_type") &&
      !keys.at(key).contains("type"))
    keys.unsupported(key, "null, or an object with \"rope_type\"");
  const double partial = keys.positive("partial_rotary_factor", c.block.rope.partial);
  if (which == RopeKeys::kLong || which == RopeKeys::kPartial) {
    c.block.rope.partial = read_partial(keys, key, default_partial, c);
  } else if (partial != 1 || c.block.rope.partial != 1) {
    keys.unsupported(keys.has("partial_rotary_factor") ? "partial_rotary_factor" : key, "1");
  }
}

void write_rope(const ModelConfig& c, RopeKeys which, nlohmann::ordered_json& out) {
  const Rope& rope = c.block.rope;
  out["rope_theta"] = rope.theta;
  if (c.block.window_rope) out["rope_local_base_freq"] = c.block.window_rope->theta;
  if (which == RopeKeys::kLong || which == RopeKeys::kPartial) out["partial_rotary_factor"] = rope.partial;
  if (rope.scaling.kind == Kind::kNone) return;
  if (which == RopeKeys::kLong) out["original_max_position_embeddings"] = rope.scaling.original;
  out["rope_scaling"] = scaling_object(rope.scaling, c.context);
}

}  // namespace zg::hf
