#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.hpp"
#include "ziggurat/train/merge.hpp"

namespace zg::cli {

void add_merge(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string base, adapter, out;
  };
  auto f = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("merge", "Merge adapters (LoRA) into their model");
  command->add_option("base", f->base, "Hugging Face directory of the model")->required();
  command->add_option("adapter", f->adapter, "Directory of adapters, as PEFT or a run has written it")
      ->required();
  command->add_option("out", f->out, "Directory for the merged model")->required();
  command->footer(
      "Sums are made in fp32 and rounded once: to bf16 where all weights of the model are bf16, else to "
      "fp32.\n\n"
      "Examples:\n"
      "  ziggurat merge Qwen3-8B runs/qwen3-8b-lora/adapter Qwen3-8B-merged");
  command->callback([f, &exit_code] {
    const auto changed = static_cast<long long>(merge_adapters(f->base, f->adapter, f->out));
    std::printf("%s: %lld matrices of %s have changed\n", f->out.c_str(), changed, f->base.c_str());
    exit_code = 0;
  });
}

}  // namespace zg::cli
