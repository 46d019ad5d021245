#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/printable.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/quantize.hpp"

namespace zg::cli {

void add_quantize(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string from, out, to = "nf4";
  };
  auto f = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("quantize", "Write a model with its layers' matrices in 4 or 8 bits");
  command->add_option("from", f->from, "Hugging Face directory of the model, with plain weights")->required();
  command->add_option("out", f->out, "Directory for the quantised model")->required();
  command->add_option("--to", f->to, "nf4, nf4_double, fp8 or int4")->capture_default_str();
  command->footer(
      "  nf4         0.56 bytes a weight, as bitsandbytes reads it (load_in_4bit): the base of QLoRA\n"
      "  nf4_double  0.52 bytes, the same with scales in 8 bits (bnb_4bit_use_double_quant)\n"
      "  int4        0.52 bytes, as compressed-tensors reads it (pack-quantized)\n"
      "  fp8         1 byte, as transformers reads it (quant_method fp8): nearly the results of bf16\n"
      "Norms, biases, the embedding and the output matrix keep their type. The same model gives the same "
      "bytes.\nMemory for the codes of a matrix suffices.\n\n"
      "Examples:\n"
      "  ziggurat quantize Qwen3-8B Qwen3-8B-nf4\n"
      "  ziggurat quantize Qwen3-8B Qwen3-8B-fp8 --to fp8");
  command->callback([f, &exit_code] {
    const CodedSave saved =
        quantize_model(f->from, f->out, parse_code(f->to), [&](std::int64_t done, std::int64_t all) {
          if (interrupted())
            throw Error(Errc::kInterrupted, f->out,
                        "interrupted while it was written; nothing of it is left");
          log::progress(fmt::format("{}: {:.0f}% of the matrices", printable(f->out),
                                    100 * static_cast<double>(done) / static_cast<double>(all)));
        });
    log::progress("");
    std::printf("%s: %lld matrices in %s, %s in all; largest error %.3g, in %s\n", printable(f->out).c_str(),
                static_cast<long long>(saved.matrices), f->to.c_str(), format_bytes(saved.bytes).c_str(),
                saved.largest_error, printable(saved.largest_error_in).c_str());
    exit_code = 0;
  });
}

}  // namespace zg::cli
