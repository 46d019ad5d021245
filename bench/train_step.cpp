// Training steps of a configuration, one JSON line each, for drivers that interleave several programs
// (bench/gpt2_124m.py).
//
//   bench_train_step CONFIG... [--set a.b=c]... [--steps N | --serve] [--trace FILE]
//
// --serve: takes a step for each line "step" on stdin and answers on stdout. Text is random tokens.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "ziggurat/base/file.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/train/machine.hpp"
#include "ziggurat/train/trainer.hpp"

namespace {

using zg::Trainer;

// Tokens below `vocab`, uint16; written once.
std::string random_tokens(const std::string& directory, std::int64_t vocab) {
  const std::string path = directory + "/random.bin";
  std::vector<std::uint16_t> tokens(1 << 20);
  const zg::NamedRandom random(1, "tokens");
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::uint16_t>(random.below(i, static_cast<std::uint64_t>(vocab)));
  std::string bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
  zg::write_file_atomically(path, bytes);
  return path;
}

void print_step(Trainer& trainer, const zg::Roofs& roofs, std::int64_t step, const zg::StepResult& r) {
  const double flops = trainer.plan().flops_per_step();
  const zg::Bound bound = zg::bound_of(roofs, flops, r.traffic);
  nlohmann::ordered_json j;
  j["event"] = "step";
  j["step"] = step;
  j["step_s"] = r.seconds;
  j["tokens_per_s"] = static_cast<double>(r.tokens) / r.seconds;
  j["stall_s"] = r.stall;
  j["forward_s"] = r.phases.forward;
  j["backward_s"] = r.phases.backward;
  j["optimizer_s"] = r.phases.optimizer;
  j["loss"] = r.loss;
  j["flops"] = flops;
  j["roof_share"] = flops / r.seconds / roofs.flops;
  j["nvme_read"] = r.traffic.nvme_read();
  j["nvme_write"] = r.traffic.nvme_write();
  j["h2d"] = r.traffic[zg::kToDevice];
  j["d2h"] = r.traffic[zg::kToHost];
  j["bound_s"] = bound.seconds;
  j["bound_by"] = bound.by;
  j["peak_rss_bytes"] = zg::peak_resident_bytes();
  j["peak_device_bytes"] = trainer.rank().device().arena().peak();
  j["peak_host_bytes"] = trainer.node().host().peak();
  std::printf("%s\n", j.dump().c_str());
  std::fflush(stdout);
}

std::int64_t optimizer_state_bytes(const zg::TensorTable& table) {
  std::int64_t bytes = 0;
  for (zg::SegmentId id = 0; id < table.segment_count(); ++id) {
    const zg::Segment& segment = table.segment(id);
    if (table.tensor(segment.tensor).spec.role == zg::Role::kOptimizerState) bytes += segment.charge;
  }
  return bytes;
}

// What a bound on the step's time is made of, beside the steps themselves.
void print_ready(Trainer& trainer, const zg::Roofs& roofs) {
  const zg::Layout& layout = *trainer.plan().layout;
  std::int64_t on_host = 0;
  for (std::int32_t u = layout.options.device_updates; u <= layout.head_unit(); ++u)
    on_host += layout.unit_state_elements(u);
  nlohmann::ordered_json j;
  j["event"] = "ready";
  j["roof_flops"] = roofs.flops;
  j["roof_h2d"] = roofs.host_to_device;
  j["roof_d2h"] = roofs.device_to_host;
  j["optimizer_state_bytes"] = optimizer_state_bytes(layout.table);
  j["parameters"] = trainer.plan().model->parameter_count();
  j["updated_on_host"] = on_host;
  j["device"] = trainer.rank().device().describe();
  j["description"] = trainer.describe();
  j["device_budget"] = trainer.plan().budgets.device;
  j["host_budget"] = trainer.plan().budgets.host;
  j["nvme_bytes"] = layout.table.nvme_bytes();
  j["checkpoint_bytes"] =
      layout.activation.size() * static_cast<std::size_t>(layout.options.micro_batches) *
      static_cast<std::size_t>(trainer.plan().model->checkpoint_bytes(layout.options.micro_batch));
  std::printf("%s\n", j.dump().c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Training steps of a configuration on random tokens, one JSON line each"};
  zg::ConfigSource source;
  std::int64_t steps = 5;
  bool serve = false;
  std::string trace_file, work = "build/bench";
  app.add_option("config", source.files)->required();
  app.add_option("--set", source.overrides)->allow_extra_args(false);
  app.add_option("--steps", steps);
  app.add_flag("--serve", serve, "A step for each line \"step\" on stdin");
  app.add_option("--trace", trace_file);
  app.add_option("--work", work, "Directory for the tokens");
  CLI11_PARSE(app, argc, argv);
  try {
    std::filesystem::create_directories(work);
    zg::RunConfig config = zg::load_config(source, zg::this_machine());
    config.data.train =
        random_tokens(work, config.model && config.model->vocab_size > 0 ? config.model->vocab_size : 256);
    config.data.validation.clear();
    config.data.validation_share = 0;
    config.output_dir = work;
    zg::Trace trace;
    if (!trace_file.empty()) trace.start();
    Trainer trainer(config, {.trace = &trace});
    trainer.measure();  // before the drives are open: compute and the link alone
    trainer.start();
    std::fprintf(stderr, "%s\n", trainer.describe().c_str());
    print_ready(trainer, trainer.roofs());
    std::string line;
    for (std::int64_t step = 0;
         serve ? static_cast<bool>(std::getline(std::cin, line)) && line == "step" : step < steps; ++step) {
      const bool last = !serve && step + 1 == steps;
      print_step(trainer, trainer.roofs(), step,
                 trainer.train_step(step, last ? zg::Then::kPause : zg::Then::kTrain));
    }
    if (!trace_file.empty()) trace.save(trace_file);
    return 0;
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_train_step: %s\n", e.what());
    return e.exit_code();
  }
}
