#include "train/saver.hpp"

#include <filesystem>
#include <string>
#include <vector>

#include "train/files.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {

// Weights, tokenizer and what the model began with of generation_config.json appear together, or not at all.
// Adapters stand beside a model that has the others.
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
    Saver::save(
        to, plan(), [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
          rank().engine().read_master(static_cast<std::int32_t>(&unit - units.data()), p, begin, end, out);
        });
  };
  if (processes_.number() > 0) return save(directory);
  replace_directory(directory, [&](const std::string& fresh) {
    save(fresh);
    if (plan().config.lora.on()) return;
    if (data_->tokenizer() != nullptr) data_->tokenizer()->save(fresh);
    // They say which tokens end a text, and how the turns of a conversation are written.
    for (const char* name : {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"}) {
      const std::string from = plan().config.model_from + "/" + name;
      if (!plan().config.model_from.empty() && std::filesystem::exists(from))
        write_file_atomically(fresh + "/" + name, read_text_file(from, std::string("the model's ") + name));
    }
  });
}

}  // namespace zg
