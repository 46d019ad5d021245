// `ziggurat trace`: records the accesses of a run, shows them, and replays them under other policies and
// budgets.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/trace_show.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/store/placement.hpp"
#include "ziggurat/store/replay.hpp"
#include "ziggurat/train/machine.hpp"
#include "ziggurat/train/record_trace.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg::cli {
namespace {

struct RecordFlags {
  ConfigSource source;
  std::string out;
  std::int64_t steps = 0;
};
struct ReplayFlags {
  std::string file;
  std::vector<std::string> policies{"next-use", "lru", "clock"}, host, device;
  int rounds = 32;
  bool direct = false;
  bool json = false;
};

// A sentence that says which tier has no room for an operation.
std::string obstacle_text(const AccessTrace& trace, const ReplayResult& r) {
  return fmt::format("no room on the {} for {}, {}, in operation {} of run {}", name_of(r.obstacle->tier),
                     trace.table.segment_name(r.obstacle->segment), format_bytes(r.obstacle->needed),
                     r.obstacle_op, r.obstacle_run);
}

int record(RecordFlags f) {
  if (f.out.empty()) f.out = std::filesystem::path(f.source.files.front()).stem().string() + ".trace";
  const Trainer trainer(load_config(f.source, this_machine()));  // planned, and never started
  const AccessTrace trace = record_trace(trainer.plan(), f.steps);
  try {
    save_trace(trace, f.out);
  } catch (const Error& e) {
    throw Error(Errc::kUsage, "-o " + f.out, e.message(), "name a file that can be written");
  }
  std::int64_t ops = 0;
  for (const std::int32_t which : trace.sequence)
    ops += trace.programs[static_cast<std::size_t>(which)].op_count();
  std::printf("%s: %zu run(s) of %zu program(s), %lld operations, %d segments of %s in all\n", f.out.c_str(),
              trace.sequence.size(), trace.programs.size(), static_cast<long long>(ops),
              trace.table.segment_count(), format_bytes(trace.table.total_charge(Tier::kHost)).c_str());
  return 0;
}

struct Choice {
  std::string name;
  PolicyFactory policy;
  bool pinned = false;
};

Choice choice_of(const std::string& name) {
  if (name == "pinned") return {name, next_use_policy(), true};
  const std::string prefix = "next-use:";
  if (name.rfind(prefix, 0) != 0) {
    if (name == "next-use" || name == "lru" || name == "clock") return {name, policy_by_name(name)};
    throw Error(Errc::kUsage, "--policy", fmt::format("found \"{}\"", name),
                "choose of next-use, next-use:COST, lru, clock and pinned");
  }
  const auto cost = number_in<double>(std::string_view(name).substr(prefix.size()));
  if (!cost || !(*cost >= 0 && *cost <= 1e9)) {
    throw Error(Errc::kUsage, "--policy",
                fmt::format("found \"{}\", expected a number, 0 or more, behind next-use:", name),
                "for example next-use:0.5");
  }
  return {name, next_use_policy({.write_cost = *cost})};
}

// Parses sizes such as "5%" (of `all` bytes) or "48MiB", in whole pages.
std::vector<std::int64_t> sizes_of(const char* flag, const std::vector<std::string>& texts, std::int64_t all,
                                   std::int64_t otherwise) {
  if (texts.empty()) return {otherwise};
  std::vector<std::int64_t> sizes;
  for (const std::string& text : texts) {
    std::optional<std::int64_t> bytes;
    if (!text.empty() && text.back() == '%') {
      const auto percent = number_in<double>(std::string_view(text).substr(0, text.size() - 1));
      if (percent && *percent >= 0 && *percent <= 1000)
        bytes = static_cast<std::int64_t>(static_cast<double>(all) * *percent / 100);
    } else {
      bytes = parse_bytes(text);
    }
    if (!bytes || *bytes < 0) {
      throw Error(Errc::kUsage, flag,
                  fmt::format("found \"{}\", expected a size or a share of all bytes", text),
                  "for example 64MiB,10%,1.5GiB");
    }
    sizes.push_back(*bytes / 4096 * 4096);
  }
  return sizes;
}

const Program& most_often(const AccessTrace& trace) {
  std::vector<std::int64_t> times(trace.programs.size());
  for (const std::int32_t which : trace.sequence) ++times[static_cast<std::size_t>(which)];
  return trace
      .programs[static_cast<std::size_t>(std::max_element(times.begin(), times.end()) - times.begin())];
}

double served(const ReplayCounts& c) {
  return c.accesses == 0 ? 1 : static_cast<double>(c.hits + c.host_hits) / static_cast<double>(c.accesses);
}

nlohmann::ordered_json json_of(const AccessTrace& trace, const Choice& c, const ReplayResult& r) {
  if (r.obstacle) return {{"policy", c.name}, {"fits", false}, {"obstacle", obstacle_text(trace, r)}};
  const ReplayCounts& n = r.counts_per_round;
  return {{"policy", c.name},
          {"fits", true},
          {"nvme_read", r.per_round.nvme_read()},
          {"nvme_write", r.per_round.nvme_write()},
          {"host_to_device", r.per_round[kToDevice]},
          {"device_to_host", r.per_round[kToHost]},
          {"direct_read", r.per_round[kDirectRead]},
          {"direct_write", r.per_round[kDirectWrite]},
          {"accesses", n.accesses},
          {"hits", n.hits},
          {"host_hits", n.host_hits},
          {"device_evictions", n.device_evictions},
          {"host_evictions", n.host_evictions},
          {"cycle", r.cycle},
          {"peak", {{"device", r.peak.device}, {"host", r.peak.host}}}};
}

[[noreturn]] void nothing_fits(const AccessTrace& trace, std::int64_t device, bool direct,
                               const std::string& why) {
  const auto least = smallest_budgets(trace, device, progress_of("smallest budgets"), direct);
  log::progress("");
  if (!least)
    throw Error(Errc::kMemory, "replay", why, "it fits no budgets: what may not be demoted is too much");
  throw Error(Errc::kMemory, "replay", why,
              fmt::format("the smallest budgets that do: --device {}, and with device {} --host {}",
                          least->device, format_bytes(std::max(device, least->device)), least->host));
}

int run_replay(const ReplayFlags& f) {
  std::vector<Choice> choices;
  for (const std::string& name : f.policies) choices.push_back(choice_of(name));
  const AccessTrace trace = load_trace(f.file);
  const std::int64_t all = trace.table.total_charge(Tier::kHost);
  const auto devices =
      sizes_of("--device", f.device, trace.table.total_charge(Tier::kDevice), trace.budgets.device);
  const auto hosts = sizes_of("--host", f.host, all, trace.budgets.host);
  auto results = nlohmann::ordered_json::array();
  std::string text, obstacle;
  bool any = false, unsteady = false;
  for (const std::int64_t device : devices) {
    for (const std::int64_t host : hosts) {
      const Budgets budgets{device, host, f.direct};
      const auto line = [&](const std::string& policy, const std::string& rest) {
        text +=
            fmt::format("{:>10} {:>10}  {:<14} {}\n", format_bytes(device), format_bytes(host), policy, rest);
      };
      auto rows = nlohmann::ordered_json::array();
      for (const Choice& c : choices) {
        ReplayOptions o;
        o.rounds = f.rounds;
        o.progress = progress_of(
            fmt::format("device {}, host {}, {}:", format_bytes(device), format_bytes(host), c.name));
        if (c.pinned) o.keep = keep_by_value(trace.table, most_often(trace), host);
        const ReplayResult r = replay(trace, budgets, c.policy, o);
        rows.push_back(json_of(trace, c, r));
        if (r.obstacle) {
          obstacle = obstacle_text(trace, r);
          line(c.name, "does not fit: " + obstacle);
          continue;
        }
        any = true;
        unsteady = unsteady || r.cycle == 0;
        line(c.name,
             fmt::format("{:>10} {:>10} {:>10} {:>10}{} {:>7.1f}%{}", format_bytes(r.per_round.nvme_read()),
                         format_bytes(r.per_round.nvme_write()), format_bytes(r.per_round[kToDevice]),
                         format_bytes(r.per_round[kToHost]),
                         f.direct ? fmt::format(" {:>10} {:>10}", format_bytes(r.per_round[kDirectRead]),
                                                format_bytes(r.per_round[kDirectWrite]))
                                  : "",
                         100 * served(r.counts_per_round), r.cycle == 0 ? " *" : ""));
      }
      const NvmeBound bound = nvme_bound(trace, budgets, f.rounds);
      line("bound", fmt::format("{:>10} {:>10}", format_bytes(bound.read), format_bytes(bound.write)));
      results.push_back({{"device", device},
                         {"host", host},
                         {"policies", rows},
                         {"bound", {{"nvme_read", bound.read}, {"nvme_write", bound.write}}}});
    }
  }
  log::progress("");
  if (!any) nothing_fits(trace, devices.front(), f.direct, obstacle);
  if (f.json) {
    const nlohmann::ordered_json j = {{"file", f.file}, {"bytes", all}, {"results", results}};
    std::printf("%s\n", j.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
    return 0;
  }
  std::printf("trace      %s: %s in all, %zu run(s) a round; bytes of one round in the steady state\n",
              f.file.c_str(), format_bytes(all).c_str(), trace.sequence.size());
  std::printf("%10s %10s  %-14s %10s %10s %10s %10s%s %8s\n", "device", "host", "policy", "NVMe read",
              "NVMe write", "to device", "to host", f.direct ? "  read past  write past" : "", "hits");
  std::printf("%s", text.c_str());
  if (unsteady)
    std::printf("* did not repeat itself within %d rounds: the mean of the second half of them\n", f.rounds);
  return 0;
}

constexpr const char* kFooter =
    "Examples:\n"
    "  ziggurat trace record configs/quickstart.json -o step.trace\n"
    "  ziggurat trace show step.trace\n"
    "  ziggurat trace replay step.trace --host 10%,25%,50%\n"
    "A trace holds what a run asks of the tensor store: tensors, and operations with what "
    "each of them reads and writes.\n"
    "A replay decides as the store would, but moves nothing, so that budgets beyond this "
    "machine's memory can be tried.";

constexpr const char* kReplayFooter =
    "Examples:\n"
    "  ziggurat trace replay step.trace --host 5%,10%,25%,50%,100%\n"
    "  ziggurat trace replay step.trace --policy next-use,next-use:1,pinned --host 64MiB "
    "--device 32MiB,48MiB\n"
    "  ziggurat trace replay step.trace --host 10% --json | jq "
    "'.results[].policies[].nvme_read'\n"
    "Policies:\n"
    "  next-use       evicts what is needed farthest in the future, but what is needed once "
    "a round in an order that\n"
    "                 spreads its reads over the round; next-use:COST has no such order, and "
    "evicts a clean copy in place of\n"
    "                 a dirty one whose next use is at most (1 + COST) times as far\n"
    "  lru, clock     evict the least recently used copy; clock approximates that with a bit "
    "for each copy\n"
    "  pinned         pins at the host what saves most NVMe bytes per byte held; the rest is "
    "evicted by next use\n"
    "How to read the result:\n"
    "  A round is the whole trace, which is repeated until it moves the same bytes again. "
    "hits: share of the accesses that\n"
    "  need content and find it at the device or the host. bound: bytes that no decision can "
    "avoid, whatever the policy.";

}  // namespace

void add_trace(CLI::App& app, int& exit_code) {
  CLI::App* trace = app.add_subcommand(
      "trace", "Record the memory accesses of a run; compare eviction policies and budgets");
  trace->require_subcommand(1);
  trace->footer(kFooter);

  auto r = std::make_shared<RecordFlags>();
  CLI::App* rec = trace->add_subcommand(
      "record", "Write the memory accesses of a training run to a file, without running it");
  rec->add_option("config", r->source.files, "Configuration files, as for ziggurat train")->required();
  rec->add_option("--set", r->source.overrides,
                  "Override one key (may be repeated): --set tiers.device=48MiB")
      ->allow_extra_args(false);
  rec->add_option("-o,--out", r->out,
                  "File to write (default: NAME.trace in the current directory, of the first configuration "
                  "NAME.json)");
  rec->add_option("--steps", r->steps,
                  "Record this many steps from the first, with their evaluations (default: one step of the "
                  "steady state, which replays repeat)")
      ->check(whole_number(1, 1000000));
  rec->footer(
      "Examples:\n"
      "  ziggurat trace record configs/quickstart.json -o step.trace\n"
      "  ziggurat trace record configs/gpt2-124m.json --set train_micro_batch_size_per_gpu=8 "
      "-o large.trace\n"
      "  ziggurat trace record configs/quickstart.json --steps 100 -o run.trace\n"
      "The data must be there, since the size of the vocabulary follows from it; no device and "
      "no drive is opened.");
  rec->callback([r, &exit_code] { exit_code = record(*r); });

  add_trace_show(*trace, exit_code);

  auto p = std::make_shared<ReplayFlags>();
  CLI::App* rep =
      trace->add_subcommand("replay", "Say what would move under other eviction policies and budgets");
  rep->add_option("file", p->file, "A trace")->required();
  rep->add_option("--policy", p->policies,
                  "Policies to compare, of next-use, next-use:COST, lru, clock and pinned (see below)")
      ->delimiter(',')
      ->capture_default_str();
  rep->add_option("--host", p->host,
                  "Host budgets to try: sizes, or shares of all bytes, e.g. 64MiB,10% (default: as "
                  "recorded)")
      ->delimiter(',');
  rep->add_option("--device", p->device,
                  "Device budgets to try: sizes, or shares of all bytes, e.g. 64MiB,10% (default: as "
                  "recorded)")
      ->delimiter(',');
  rep->add_flag("--direct", p->direct,
                "As if drives reached the device's memory (GPUDirect Storage); says how many of the NVMe "
                "bytes bypass the host");
  rep->add_option("--rounds", p->rounds, "Most repetitions of the trace")
      ->capture_default_str()
      ->check(whole_number(1, 1000000));
  rep->add_flag("--json", p->json, "Print one JSON object, with sizes in bytes");
  rep->footer(kReplayFooter);
  rep->callback([p, &exit_code] { exit_code = run_replay(*p); });
}

}  // namespace zg::cli
