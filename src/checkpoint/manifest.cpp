#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

using Json = nlohmann::ordered_json;

// The end of each manifest: the hash of all before it.
constexpr std::string_view kTail = ",\n  \"xxh3\": \"0123456789abcdef\"\n}\n";
constexpr std::size_t kDigits = kTail.find('0');
constexpr const char* kKind = "ziggurat checkpoint";
constexpr const char* kHeaderHash = "header_xxh3";  // of a file of tensors
constexpr const char* kHash = "xxh3";               // of all of a file
// More than any checkpoint has, and so little that sums of them are numbers, too.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;
constexpr std::int64_t kMostRanks = 1 << 24;

std::string tail_of(std::string_view before) {
  std::string tail(kTail);
  return tail.replace(kDigits, 16, io::hash_text(io::hash_of(before)));
}

// Reads one object, and says where something is missing or of another type.
class Reader {
 public:
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail("found no object");
  }
  template <class T>
  T get(const char* key) const {
    const auto it = object_.find(key);
    if (it == object_.end()) fail(fmt::format("lacks the key \"{}\"", key));
    try {
      return it->get<T>();
    } catch (const nlohmann::json::exception&) {
      fail(fmt::format("has a \"{}\" of another type", key));
    }
  }
  // A whole number in [0, most].
  std::int64_t count(const char* key, std::int64_t most = kMostNumber) const { return number(key, 0, most); }
  std::int64_t number(const char* key, std::int64_t least, std::int64_t most) const {
    const auto it = object_.find(key);
    if (it == object_.end() || !it->is_number_integer()) fail(fmt::format("has no whole number \"{}\"", key));
    const bool above =
        it->is_number_unsigned() && it->get<std::uint64_t>() > static_cast<std::uint64_t>(most);
    if (above || it->get<std::int64_t>() < least || it->get<std::int64_t>() > most)
      fail(fmt::format("has {} as \"{}\", {} to {} expected", it->dump(), key, least, most));
    return it->get<std::int64_t>();
  }
  int small(const char* key, int least = 0) const {
    const auto number = static_cast<int>(count(key, kMostRanks));
    if (number < least) fail(fmt::format("has {} as \"{}\", {} at least expected", number, key, least));
    return number;
  }
  double number_or_nan(const char* key) const {
    return json(key).is_null() ? std::nan("") : get<double>(key);
  }
  std::string digits(const char* key, const char* what) const {
    auto text = get<std::string>(key);
    if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
      fail(fmt::format("has a \"{}\" that is no {}: 16 digits, 0-9 and a-f, are expected", key, what));
    return text;
  }
  std::uint64_t hash(const char* key) const { return std::stoull(digits(key, "hash"), nullptr, 16); }
  const Json& json(const char* key) const {
    const auto it = object_.find(key);
    if (it == object_.end()) fail(fmt::format("lacks the key \"{}\"", key));
    return *it;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Errc::kUsage, where_, what, "no version of this program has written this checkpoint");
  }

 private:
  const Json& object_;
  const std::string where_;
};

Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

Json json_of(const CheckpointFile& file, const char* hash) {
  return {{"name", file.name}, {"bytes", file.bytes}, {hash, io::hash_text(file.header_hash)}};
}

CheckpointFile read_file(const Json& json, const std::string& where, const char* hash) {
  const Reader file(json, where);
  CheckpointFile f{file.get<std::string>("name"), file.count("bytes", kMostBytes), file.hash(hash)};
  if (f.name.empty() || f.name[0] == '.' || f.name.find('/') != std::string::npos)
    file.fail("names a file outside of its directory");
  if (!is_of_checkpoint(f.name) || f.name == kManifestName)
    file.fail(fmt::format("names a file {}, which no checkpoint has", f.name));
  return f;
}

// All names differ, and their bytes can be added up.
void check_files(const std::vector<CheckpointFile>& files, const Reader& r) {
  std::set<std::string> names;
  std::int64_t bytes = 0;
  for (const CheckpointFile& file : files) {
    if (!names.insert(file.name).second) r.fail(fmt::format("names {} twice", file.name));
    if (file.bytes > kMostBytes - bytes) r.fail(fmt::format("has files of more than {} bytes", kMostBytes));
    bytes += file.bytes;
  }
}

}  // namespace

bool is_of_checkpoint(std::string_view name) {
  // '#' stands for five digits or more.
  const auto fits = [&](std::string_view form) {
    std::size_t at = 0;
    for (const char c : form) {
      if (c != '#') {
        if (at >= name.size() || name[at++] != c) return false;
        continue;
      }
      const std::size_t end = std::min(name.find_first_not_of("0123456789", at), name.size());
      if (end - at < 5 || end - at > 8) return false;
      at = end;
    }
    return at == name.size();
  };
  return name == kManifestName || name == "index.json" || fits("rank-#.safetensors") || fits("rank-#.pins") ||
         fits("state-#-of-#.safetensors");
}

bool CheckpointFile::is_pins() const {
  constexpr std::string_view kEnd = ".pins";
  return name.size() > kEnd.size() && name.compare(name.size() - kEnd.size(), kEnd.size(), kEnd) == 0;
}

std::int64_t CheckpointManifest::bytes() const {
  return std::accumulate(files.begin(), files.end(), std::int64_t{0},
                         [](std::int64_t sum, const CheckpointFile& file) { return sum + file.bytes; });
}

std::string CheckpointManifest::text() const {
  Json j;
  j["kind"] = kKind;
  j["format"] = format;
  j["version"] = version;
  j["time"] = time;
  j["run"] = run;
  j["number"] = number;
  j["step"] = step;
  j["updates"] = updates;
  j["skipped"] = skipped;
  j["loss"] = number_or_null(loss);
  if (validation) j["validation"] = {{"step", validation->step}, {"loss", number_or_null(validation->loss)}};
  if (scaler) {
    j["loss_scaler"] = {{"scale", scaler->scale},
                        {"steps", scaler->steps},
                        {"last_overflow", scaler->last_overflow},
                        {"hysteresis", scaler->hysteresis}};
  }
  if (!choice_biases.empty()) j["choice_biases"] = choice_biases;
  j["topology"] = {{"ranks", ranks}, {"processes", processes}, {"shards", shards}, {"zero_stage", stage}};
  j["bits"] = Json::object();
  for (const auto& [key, value] : bits) j["bits"][key] = value;
  j["config"] = config;
  j["files"] = Json::array();
  for (const CheckpointFile& file : files) j["files"].push_back(json_of(file, kHeaderHash));
  if (index) j["index"] = json_of(*index, kHash);
  if (pinned > 0) j["pinned_bytes"] = pinned;
  std::string text = j.dump(2, ' ', false, Json::error_handler_t::replace);
  text.resize(text.size() - 2);  // "\n}", which the tail has
  return text + tail_of(text);
}

CheckpointManifest parse_manifest(const std::string& text, const std::string& where) {
  const auto damaged = [&](const std::string& what) {
    throw Error(Errc::kUsage, where, what, "the checkpoint is damaged: resume from another one");
  };
  if (text.size() <= kTail.size()) damaged(fmt::format("is truncated: it has {} bytes", text.size()));
  const std::string_view before = std::string_view(text).substr(0, text.size() - kTail.size());
  const std::string_view tail = std::string_view(text).substr(before.size());
  const std::string wanted = tail_of(before);
  if (tail != wanted) {
    std::string shape(tail);
    if (shape.replace(kDigits, 16, kTail.substr(kDigits, 16)) != kTail)
      damaged("does not end as a manifest does: it is truncated, or was changed");
    damaged(fmt::format("has XXH3 {} at its end, but {} in fact: it was changed", tail.substr(kDigits, 16),
                        wanted.substr(kDigits, 16)));
  }
  const auto json = parse_json<Json>(text, where, "the checkpoint is damaged: resume from another one");
  const Reader r(json, where);
  if (r.get<std::string>("kind") != kKind) r.fail("is no manifest of a checkpoint");
  CheckpointManifest m;
  m.format = r.count("format");
  if (m.format > CheckpointManifest::kFormat || m.format < 1) {
    throw Error(Errc::kUsage, where,
                fmt::format("has format {}; this program knows formats 1 to {}", m.format,
                            CheckpointManifest::kFormat),
                "resume with the version of the program that wrote it, or a later one");
  }
  m.version = r.get<std::string>("version");
  m.time = r.get<std::string>("time");
  m.run = r.digits("run", "name of a run");
  m.number = r.count("number");
  m.step = r.count("step");
  m.updates = r.count("updates");
  m.skipped = r.count("skipped");
  if (m.updates > m.step || m.skipped != m.step - m.updates)
    r.fail(fmt::format("counts {} updates and {} skipped steps of {}", m.updates, m.skipped, m.step));
  m.loss = r.number_or_nan("loss");
  if (json.contains("validation")) {
    const Reader v(r.json("validation"), where);
    m.validation = Validation{v.count("step"), v.number_or_nan("loss")};
  }
  if (json.contains("loss_scaler")) {
    const Reader s(r.json("loss_scaler"), where);
    m.scaler = LossScaler::State{.scale = s.get<double>("scale"),
                                 .steps = s.count("steps"),
                                 .last_overflow = s.number("last_overflow", -kMostNumber, kMostNumber),
                                 .hysteresis = s.small("hysteresis")};
    if (!(std::isfinite(m.scaler->scale) && m.scaler->scale > 0))
      s.fail(fmt::format("has {} as \"scale\", a number above 0 expected", m.scaler->scale));
  }
  if (json.contains("choice_biases")) {
    m.choice_biases = r.get<std::vector<float>>("choice_biases");
    if (!std::all_of(m.choice_biases.begin(), m.choice_biases.end(), [](float b) { return std::isfinite(b); }))
      r.fail("has \"choice_biases\" that are not finite");
  }
  const Reader t(r.json("topology"), where);
  m.ranks = t.small("ranks", 1);
  m.processes = t.small("processes", 1);
  m.shards = t.small("shards", 1);
  m.stage = t.small("zero_stage");
  const Reader bits(r.json("bits"), where);
  for (const auto& [key, value] : r.json("bits").items())
    m.bits.emplace_back(key, bits.get<std::string>(key.c_str()));
  m.config = r.get<std::string>("config");
  const Json& files = r.json("files");
  if (!files.is_array()) r.fail("has \"files\" that are no list");
  for (const Json& file : files) m.files.push_back(read_file(file, where, kHeaderHash));
  check_files(m.files, r);
  if (json.contains("index")) m.index = read_file(r.json("index"), where, kHash);
  if (json.contains("pinned_bytes")) m.pinned = r.count("pinned_bytes", kMostBytes);
  return m;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

std::string program_version() {
  return ZG_VERSION;
}

}  // namespace zg
