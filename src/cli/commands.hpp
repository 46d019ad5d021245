// The subcommands of the program. Each add_* declares one; its callback returns through `exit_code`.
#pragma once

namespace CLI {
class App;
}

namespace zg::cli {

void add_train(CLI::App& app, int& exit_code);
void add_generate(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, int& exit_code);
void add_merge(CLI::App& app, int& exit_code);
void add_quantize(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_probe(CLI::App& app, int& exit_code);
void add_io_bench(CLI::App& app, int& exit_code);
void add_io_tune(CLI::App& app, int& exit_code);
void add_trace(CLI::App& app, int& exit_code);
void add_config(CLI::App& app, int& exit_code);
void add_checkpoint(CLI::App& app, int& exit_code);

}  // namespace zg::cli
