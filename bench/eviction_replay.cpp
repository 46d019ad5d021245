// How much NVMe traffic a policy costs: the steps of GPT-2 124M and of a GPT-3-like model with 96 layers, as
// programs alone (no weight is allocated), replayed under budgets from 5% to 100% of all their bytes.
//
//   bench_eviction_replay [--out bench/results/eviction_replay_DATE] [--only gpt2]
//
// Writes OUT.md and OUT.json, a row for each budget: NVMe bytes a step, read + written, by policy, and the
// bound that nobody can pass. Deterministic: there is nothing to time.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/step/step_program.hpp"
#include "ziggurat/store/placement.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg {
namespace {

struct Subject {
  std::string name, text;
  ModelConfig model;
  LayoutOptions layout;
  UpdateTiming timing = UpdateTiming::kDeferred;
  double device_factor = 2;  // of the smallest device budget
  bool variation = false;    // counted in the summary, without a table of its own
};

// GPT-2 124M in all other ways to train it, so that no choice rests on one schedule.
std::vector<Subject> variations() {
  std::vector<Subject> all;
  for (int bits = 0; bits < 16; ++bits) {
    for (const double factor : {1.25, 2.0, 4.0}) {
      Subject s;
      s.layout.micro_batch = {4, 1024};
      s.layout.micro_batches = (bits & 1) != 0 ? 8 : 1;
      s.layout.accumulation = (bits & 2) != 0 ? Accumulation::kMicroBatchMajor : Accumulation::kLayerMajor;
      s.layout.recompute = (bits & 4) == 0;
      s.layout.drives = 1;
      s.timing = (bits & 8) != 0 ? UpdateTiming::kEarly : UpdateTiming::kDeferred;
      s.device_factor = factor;
      s.variation = true;
      s.name = fmt::format("gpt2-124m-x{}-{}-{}-{}-device-x{}", s.layout.micro_batches,
                           (bits & 2) != 0 ? "micro-batch-major" : "layer-major",
                           (bits & 4) != 0 ? "kept" : "recomputed", (bits & 8) != 0 ? "early" : "deferred",
                           factor);
      s.text = s.name;
      all.push_back(s);
    }
  }
  return all;
}

std::vector<Subject> subjects() {
  std::vector<Subject> all;
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly}) {
    const char* when = timing == UpdateTiming::kDeferred ? "deferred" : "early";
    Subject small;
    small.name = fmt::format("gpt2-124m-{}", when);
    small.text = fmt::format("GPT-2 124M, bf16, 8 micro-batches of 4 x 1024 tokens, {} update", when);
    small.layout.micro_batch = {4, 1024};
    small.layout.micro_batches = 8;
    small.layout.drives = 1;
    small.timing = timing;
    all.push_back(small);
    Subject large;
    large.name = fmt::format("gpt3-96-layers-{}", when);
    large.text =
        fmt::format("96 layers of width 12288, bf16, 8 micro-batches of 1 x 2048 tokens, {} update", when);
    large.model.context = 2048;
    large.model.width = 12288;
    large.model.layers = large.model.heads = large.model.kv_heads = 96;
    large.model.head_size = 128;
    large.model.inner = 4 * 12288;
    large.layout.micro_batch = {1, 2048};
    large.layout.micro_batches = 8;
    large.layout.drives = 1;
    large.layout.state_segment_bytes = 64 * kMiB;
    large.timing = timing;
    all.push_back(large);
  }
  for (const Subject& s : variations()) all.push_back(s);
  return all;
}

AccessTrace trace_of(const Subject& subject) {
  const Model model(subject.model, DType::kBF16, host_ops());
  const Layout layout(model, subject.layout);
  StepPrograms programs(layout, subject.timing);
  AccessTrace trace;
  trace.table = layout.table;
  trace.programs.push_back(std::move(programs.step.program));
  trace.sequence = {0};
  return trace;
}

struct Candidate {
  std::string name;
  PolicyFactory policy;
  bool by_value = false;
};

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
  for (const double cost : {0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 32.0}) {
    all.push_back({fmt::format("next-use, write cost {}", cost), next_use_policy({.write_cost = cost})});
  }
  all.push_back({"LRU", lru_policy()});
  all.push_back({"CLOCK", clock_policy()});
  all.push_back({"pinned by value", next_use_policy(), true});
  return all;
}

struct Row {
  int percent = 0;
  std::int64_t host = 0;
  std::map<std::string, LinkBytes> moved;  // a step, by policy
  NvmeBound bound;
};

struct Table {
  Subject subject;
  std::int64_t total = 0, device = 0, ops = 0;
  Budgets least;
  std::vector<Row> rows;
};

Table measure(const Subject& subject, int rounds) {
  Table table;
  table.subject = subject;
  const AccessTrace trace = trace_of(subject);
  table.total = trace.table.total_charge(Tier::kHost);
  table.ops = trace.programs[0].op_count();
  const auto note = [&](const std::string& what) {
    return [name = subject.name, what](double share) {
      log::progress(fmt::format("{}: {} {:.0f}%", name, what, 100 * share));
      return !interrupted();
    };
  };
  // Some more than the largest operation needs, so that the next one can be fetched beside it.
  const auto smallest = smallest_budgets(trace, 0, note("smallest budgets"));
  ZG_ASSERT(smallest);
  table.device = round_up(
      static_cast<std::int64_t>(subject.device_factor * static_cast<double>(smallest->device)), 4096);
  table.least = *smallest_budgets(trace, table.device, note("smallest budgets"));
  for (const int percent : {5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100}) {
    Row row;
    row.percent = percent;
    row.host = table.total * percent / 100 / 4096 * 4096;
    const Budgets budgets{table.device, row.host};
    row.bound = nvme_bound(trace, budgets);
    for (const Candidate& c : candidates()) {
      ReplayOptions options;
      options.rounds = rounds;
      options.progress = note(fmt::format("{}% {}", percent, c.name));
      if (c.by_value) options.keep = keep_by_value(trace.table, trace.programs[0], row.host);
      const ReplayResult r = replay(trace, budgets, c.policy, options);
      if (r.obstacle) continue;
      row.moved[c.name] = r.per_round;
    }
    table.rows.push_back(std::move(row));
  }
  log::progress("");
  return table;
}

double gb(std::int64_t bytes) {
  return static_cast<double>(bytes) / 1e9;
}

// What a policy costs in relation to the bound and to the first candidate.
struct Comparison {
  std::vector<double> to_bound, to_first;
  void add(std::int64_t bytes, std::int64_t bound, std::int64_t first) {
    to_bound.push_back(static_cast<double>(bytes) / static_cast<double>(bound));
    to_first.push_back(static_cast<double>(bytes) / static_cast<double>(first));
  }
  std::string text() {
    std::sort(to_bound.begin(), to_bound.end());
    double sum = 0, worst = 0;
    int more = 0, fewer = 0;
    for (const double r : to_first) {
      sum += r;
      worst = std::max(worst, r);
      more += r > 1.001;
      fewer += r < 0.999;
    }
    return fmt::format(" {:.3f} | {:.3f} | {} | {} | {:.3f} | {:.3f} |", to_bound[to_bound.size() / 2],
                       to_bound.back(), more, fewer, sum / static_cast<double>(to_first.size()), worst);
  }
};

std::string summary(const std::vector<Table>& tables, const char* title, bool variations_only) {
  std::string rows_text;
  std::size_t count = 0;
  for (const Candidate& c : candidates()) {
    Comparison bytes, larger;
    for (const Table& t : tables) {
      for (const Row& row : t.rows) {
        const NvmeBound& b = row.bound;
        if (t.subject.variation != variations_only || b.read + b.write == 0 ||
            row.moved.size() != candidates().size())
          continue;
        const LinkBytes &own = row.moved.at(c.name), &first = row.moved.at(candidates()[0].name);
        bytes.add(own.nvme_read() + own.nvme_write(), b.read + b.write,
                  first.nvme_read() + first.nvme_write());
        larger.add(std::max(own.nvme_read(), own.nvme_write()), std::max(b.read, b.write),
                   std::max(first.nvme_read(), first.nvme_write()));
      }
    }
    count = bytes.to_bound.size();
    if (count > 0) rows_text += fmt::format("| {} |{}{}\n", c.name, bytes.text(), larger.text());
  }
  if (count == 0) return "";
  return fmt::format(
             "\n{}: {} rows.\n\n| policy | bytes / bound: median | worst | more | fewer | bytes / cost 0: "
             "mean | worst "
             "| the larger / bound: median | worst | more | fewer | the larger / cost 0: mean | worst |\n"
             "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
             title, count) +
         rows_text;
}

std::string markdown(const std::vector<Table>& tables) {
  std::string text =
      "# NVMe bytes a step, by policy\n\n"
      "`bench_eviction_replay`: programs replayed on paper, nothing is timed. GB read + GB written a step, "
      "in the\n"
      "steady state; host budgets as shares of all bytes. \"Bound\": the least reads and the least writes "
      "that any\n"
      "decisions can reach with device and host as one memory (`src/store/replay_bound.cpp`). \"Pinned by "
      "value\":\n"
      "`keep_by_value()` fills the host, the rest streams by next use. `-`: does not fit.\n";
  for (const Table& t : tables) {
    if (t.subject.variation) continue;
    text += fmt::format(
        "\n## {}\n\nAll bytes {:.4g} GB, {} operations, device {:.4g} GB. Smallest host budget: {:.4g} "
        "GB.\n\n",
        t.subject.text, gb(t.total), t.ops, gb(t.device), gb(t.least.host));
    text += "| host | bound |";
    for (const Candidate& c : candidates()) text += fmt::format(" {} |", c.name);
    text += "\n|---|---|";
    for (std::size_t i = 0; i < candidates().size(); ++i) text += "---|";
    text += "\n";
    for (const Row& row : t.rows) {
      text += fmt::format("| {}% | {:.4g} + {:.4g} |", row.percent, gb(row.bound.read), gb(row.bound.write));
      for (const Candidate& c : candidates()) {
        const auto it = row.moved.find(c.name);
        text += it == row.moved.end() ? std::string(" - |")
                                      : fmt::format(" {:.4g} + {:.4g} |", gb(it->second.nvme_read()),
                                                    gb(it->second.nvme_write()));
      }
      text += "\n";
    }
  }
  text +=
      "\n## Against the bound, and against a write cost of 0\n\n"
      "Over all rows where the bound is above 0 and every policy fits. \"Bytes\": read + written, the time "
      "of a\n"
      "half-duplex drive; \"the larger\" of both: the time of a full-duplex one. More, fewer: rows in which "
      "it moves\n"
      "more or fewer than next-use without a write cost, by more than 0.1%.\n";
  text += summary(tables, "The tables above", false) + summary(tables, "48 variations of GPT-2 124M", true);
  return text;
}

// A line for each budget.
std::string json_text(const std::vector<Table>& tables) {
  std::string text = "[";
  for (const Table& t : tables) {
    const nlohmann::ordered_json head = {{"name", t.subject.name},
                                         {"bytes", t.total},
                                         {"operations", t.ops},
                                         {"device", t.device},
                                         {"smallest_device", t.least.device},
                                         {"smallest_host", t.least.host}};
    const std::string fields = head.dump();
    text += fmt::format("{}\n{}, \"rows\": [", &t == &tables.front() ? "" : ",",
                        fields.substr(0, fields.size() - 1));
    for (const Row& row : t.rows) {
      nlohmann::ordered_json j = {{"host_percent", row.percent},
                                  {"bound", {row.bound.read, row.bound.write}}};
      for (const Candidate& c : candidates()) {
        const auto it = row.moved.find(c.name);
        if (it != row.moved.end()) j[c.name] = {it->second.nvme_read(), it->second.nvme_write()};
      }
      text += fmt::format("{}\n {}", &row == &t.rows.front() ? "" : ",", j.dump());
    }
    text += "]}";
  }
  return text + "]\n";
}

}  // namespace
}  // namespace zg

int main(int argc, char** argv) {
  zg::install_interrupt_handler();
  CLI::App app{"NVMe traffic of a training step by policy and host budget, and the least that is possible"};
  std::string out = "eviction_replay", only;
  int rounds = 24;
  app.add_option("--out", out, "Writes OUT.md and OUT.json")->capture_default_str();
  app.add_option("--only", only, "Traces whose name holds this text");
  app.add_option("--rounds", rounds, "Steps that are replayed, at most")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    std::vector<zg::Table> tables;
    for (const zg::Subject& s : zg::subjects()) {
      if (s.name.find(only) != std::string::npos) tables.push_back(zg::measure(s, rounds));
    }
    const std::string text = zg::markdown(tables);
    std::fputs(text.c_str(), stdout);
    zg::write_file_atomically(out + ".md", text);
    zg::write_file_atomically(out + ".json", zg::json_text(tables));
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return e.exit_code();
  }
  return 0;
}
