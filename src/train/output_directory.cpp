#include "ziggurat/train/output_directory.hpp"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/checkpoint/directory_lock.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Creates a file to check, since on a full disk or a read-only file system a directory can still be opened.
void check_writable(const std::string& directory) {
  std::string name = directory + "/.ziggurat-XXXXXX";
  const int fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) {
    throw Error(Errc::kUsage, "output.dir " + directory, "cannot be written to: " + errno_text(errno),
                "choose a directory that can be written");
  }
  (void)::close(fd);
  (void)::unlink(name.c_str());
}

void add_leaves(const Json& json, const std::string& key,
                std::set<std::pair<std::string, std::string>>& leaves) {
  if (!json.is_object()) {
    leaves.emplace(key, json.dump(-1, ' ', false, Json::error_handler_t::replace));
    return;
  }
  for (const auto& [name, value] : json.items())
    add_leaves(value, key.empty() ? name : key + "." + name, leaves);
}

// Warns if the new run replaces the results of a run with other settings.
void say_what_is_replaced(const RunConfig& config) {
  const std::string& out = config.output_dir;
  std::vector<std::string> there;
  std::error_code unknown;
  for (const char* name : {"log.jsonl", config.lora.on() ? "adapter" : "model"}) {
    if (fs::exists(out + "/" + name, unknown)) there.emplace_back(name);
  }
  if (there.empty()) return;
  std::vector<std::string> keys{""};
  try {
    keys = differing_keys(read_text_file(out + "/config.json", "a run's configuration"), config.resolved_json,
                          {"output.dir", "steps"});
  } catch (const Error&) {  // the earlier run's settings are unknown
  }
  const std::string what = fmt::format("{} of an earlier run in {}", fmt::join(there, " and "), out);
  if (keys.empty()) return log::info("{} will be replaced", what);
  constexpr std::size_t kShown = 3;
  const std::string rest = keys.size() > kShown ? fmt::format(" and {} more", keys.size() - kShown) : "";
  keys.resize(std::min(keys.size(), kShown));
  log::warning(
      "{} will be replaced; its configuration {}. Another output.dir keeps it", what,
      keys[0].empty() ? "is not known" : fmt::format("differs in {}{}", fmt::join(keys, ", "), rest));
}

// Truncates the log after the checkpoint's last step, to the state that it had in an uninterrupted run.
void go_on_with_log(const Trainer& trainer, const std::string& path) {
  const std::int64_t done = trainer.first_step();
  const RunConfig& config = trainer.plan().config;
  const bool evaluated = done == config.steps || (config.eval_every > 0 && done % config.eval_every == 0);
  const std::int64_t records = cut_log(path, done, evaluated);
  if (records < done)
    log::warning("{} has the records of {} steps, not of the {} that the checkpoint has", path, records,
                 done);
}

}  // namespace

std::vector<std::string> differing_keys(const std::string& a, const std::string& b,
                                        const std::vector<std::string>& left_out) {
  std::set<std::pair<std::string, std::string>> leaves[2];
  const std::string* texts[] = {&a, &b};
  for (int i = 0; i < 2; ++i) {
    const Json json = Json::parse(*texts[i], nullptr, false);
    if (!json.is_object()) return {""};
    add_leaves(json, "", leaves[i]);
  }
  std::vector<std::pair<std::string, std::string>> differ;
  std::set_symmetric_difference(leaves[0].begin(), leaves[0].end(), leaves[1].begin(), leaves[1].end(),
                                std::back_inserter(differ));
  std::vector<std::string> keys;
  for (const auto& [key, value] : differ) {
    const bool counts = std::find(left_out.begin(), left_out.end(), key) == left_out.end();
    if (counts && (keys.empty() || keys.back() != key)) keys.push_back(key);
  }
  return keys;
}

OutputDirectory::OutputDirectory(const RunConfig& config)
    : lock_(std::make_unique<DirectoryLock>("output.dir", config.output_dir,
                                            "which writes its log and its model there")) {
  check_writable(config.output_dir);
}

OutputDirectory::~OutputDirectory() = default;

std::unique_ptr<StepLog> OutputDirectory::begin(const Trainer& trainer) {
  const RunConfig& config = trainer.plan().config;
  const std::string file = config.output_dir + "/log.jsonl";
  if (trainer.first_step() > 0) {
    go_on_with_log(trainer, file);
  } else {
    say_what_is_replaced(config);
  }
  write_file_atomically(config.output_dir + "/config.json", config.resolved_json);
  return std::make_unique<StepLog>(file, trainer.first_step());
}

}  // namespace zg
