#include "train/saver.hpp"

#include <filesystem>
#include <string>
#include <vector>

#include "train/checkpointer.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/files.hpp"

namespace zg {

// Weights, tokenizer and the original model's generation_config.json and the like appear together or not at
// all. Adapters are saved without the other files, which their base model has.
void Trainer::save_model(const std::string& directory) {
  const auto save = [&](const std::string& to) {
    if (!comm_.empty()) {
      return on_ranks([&](int r) {
        Saver saver(*this, r);
        plans_[static_cast<std::size_t>(r)].rank == 0 ? saver.write(to) : saver.follow();
      });
    }
    rank().engine().flush();
    const auto& units = plan().model->units();
    StepExecutor& engine = rank().engine();
    Saver::save(to, plan(), *plan().model, engine.choice_biases(),
                [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
                  engine.read_master(static_cast<std::int32_t>(&unit - units.data()), p, begin, end, out);
                });
  };
  if (processes_.number() > 0) return save(directory);
  replace_directory(directory, [&](const std::string& fresh) {
    save(fresh);
    if (plan().config.lora.on()) return;
    if (data_->tokenizer() != nullptr) data_->tokenizer()->save(fresh);
    // These files say which tokens end a text, and how the turns of a conversation are written.
    for (const char* name : {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"}) {
      const std::string from = plan().config.model_from + "/" + name;
      if (!plan().config.model_from.empty() && std::filesystem::exists(from))
        write_file_atomically(fresh + "/" + name, read_text_file(from, std::string("the model's ") + name));
    }
  });
}

namespace {

// Directories that the configuration names, to which the model may go if its own directory has no room.
std::vector<std::string> other_places(const RunConfig& config) {
  std::vector<std::string> places;
  if (config.checkpoint.asked()) places.push_back(config.checkpoint.path);
  if (!config.checkpoint.exports.path.empty()) places.push_back(config.checkpoint.exports.path);
  if (config.aio.backend != io::Backend::kRam) {
    for (const io::DriveOptions& drive : config.tiers.nvme) places.push_back(drive.path);
  }
  places.emplace_back(".");
  std::vector<std::string> names;
  for (const std::string& place : places) {
    // A new name, so that no file of the user is replaced.
    names.push_back(place + "/ziggurat-" + std::filesystem::path(config.model_dir()).filename().string() +
                    "-" + random_digits());
  }
  return names;
}

}  // namespace

// Ranks that have begun to send cannot start again, so the free space is checked first. A directory that is
// known to have too little is not tried, since an incomplete model is useless.
std::string Trainer::save_model() {
  const RunConfig& config = plan().config;
  const std::string wanted = config.model_dir();
  if (processes_.number() > 0) return save_model(wanted), wanted;
  const std::int64_t bytes = results().weights;
  const auto try_at = [&](const std::string& place) -> std::optional<Error> {
    if (const std::int64_t free = free_bytes_at(place); free < bytes) {
      return Error(Errc::kIo, place,
                   fmt::format("has {} free, the model takes {}", format_bytes(free), format_bytes(bytes)),
                   "make room there");
    }
    try {
      save_model(place);
      return std::nullopt;
    } catch (const Error& error) {
      if (error.code() != Errc::kIo || !comm_.empty()) throw;
      return error;
    }
  };
  const std::optional<Error> failed = try_at(wanted);
  if (!failed) return wanted;
  log::warning("the model cannot be saved to {}: {}: {}", wanted, failed->where(), failed->message());
  for (const std::string& place : other_places(config)) {
    const std::optional<Error> also = try_at(place);
    if (!also) return place;
    log::warning("nor to {}: {}", place, also->message());
  }
  throw Error(*failed);
}

}  // namespace zg
