#include "cli/trace_show.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg::cli {
namespace {

struct Flags {
  std::string file;
  bool json = false;
};

// The trace's programs. Steps of a long run are alike, so only two runs are kept of a program that runs many
// times in a row.
std::vector<const Program*> shortened(const AccessTrace& trace) {
  std::vector<const Program*> programs;
  for (const std::int32_t which : trace.sequence) {
    const Program* p = &trace.programs[static_cast<std::size_t>(which)];
    const std::size_t n = programs.size();
    if (n < 2 || programs[n - 1] != p || programs[n - 2] != p) programs.push_back(p);
  }
  return programs;
}

struct RoleSum {
  std::int64_t tensors = 0, segments = 0, bytes = 0;
};
constexpr Role kRoles[] = {Role::kWeight, Role::kGradient, Role::kOptimizerState, Role::kActivation,
                           Role::kOther};

RoleSum sum_of(const TensorTable& table, Role role) {
  RoleSum sum;
  for (TensorId id = 0; id < table.tensor_count(); ++id) {
    const Tensor& t = table.tensor(id);
    if (t.spec.role != role) continue;
    ++sum.tensors;
    sum.segments += t.segments;
    for (SegmentId s = t.first_segment; s < t.first_segment + t.segments; ++s)
      sum.bytes += table.segment(s).charge;
  }
  return sum;
}

constexpr int kShares[] = {10, 25, 50, 75, 90, 100};

// Quantiles of the reuse distance, weighted by the bytes of the accesses.
std::vector<std::int64_t> distance_quantiles(const AccessTrace& trace) {
  const auto programs = shortened(trace);
  const auto distances = reuse_distances(trace.table, programs);
  std::vector<std::pair<std::int64_t, std::int64_t>> weighted;  // distance, bytes
  std::size_t at = 0;
  double all = 0;
  for (const Program* p : programs) {
    for (std::int32_t i = 0; i < p->access_count(); ++i, ++at) {
      weighted.emplace_back(distances[at], trace.table.segment(p->access(i).segment).charge);
      all += static_cast<double>(weighted.back().second);
    }
  }
  std::sort(weighted.begin(), weighted.end());
  std::vector<std::int64_t> quantiles;
  double sum = 0;
  at = 0;
  for (const int share : kShares) {
    while (at + 1 < weighted.size() && sum + static_cast<double>(weighted[at].second) < all * share / 100)
      sum += static_cast<double>(weighted[at++].second);
    quantiles.push_back(weighted[at].first);
  }
  return quantiles;
}

int show(const Flags& f) {
  const AccessTrace trace = load_trace(f.file);
  const auto quantiles = distance_quantiles(trace);
  const auto least = smallest_budgets(trace, 0, progress_of("smallest budgets"));
  log::progress("");
  std::vector<std::int64_t> times(trace.programs.size());
  for (const std::int32_t which : trace.sequence) ++times[static_cast<std::size_t>(which)];
  if (f.json) {
    nlohmann::ordered_json j = {
        {"file", f.file},
        {"bytes", trace.table.total_charge(Tier::kHost)},
        {"nvme_bytes", trace.table.nvme_bytes()},
        {"tensors", trace.table.tensor_count()},
        {"segments", trace.table.segment_count()},
        {"device_granule", trace.table.device_granule()},
        {"recorded_budgets", {{"device", trace.budgets.device}, {"host", trace.budgets.host}}}};
    for (const Role role : kRoles) {
      const RoleSum sum = sum_of(trace.table, role);
      j["roles"][name_of(role)] = {
          {"tensors", sum.tensors}, {"segments", sum.segments}, {"bytes", sum.bytes}};
    }
    j["programs"] = nlohmann::ordered_json::array();
    for (std::size_t i = 0; i < trace.programs.size(); ++i) {
      const Program& p = trace.programs[i];
      j["programs"].push_back({{"name", p.name()},
                               {"operations", p.op_count()},
                               {"accesses", p.access_count()},
                               {"times", times[i]}});
    }
    for (std::size_t i = 0; i < quantiles.size(); ++i)
      j["reuse_distance_bytes"][std::to_string(kShares[i])] = quantiles[i];
    if (least) j["smallest_budgets"] = {{"device", least->device}, {"host", least->host}};
    std::printf("%s\n", j.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
    return 0;
  }
  std::printf("trace      %s\n", f.file.c_str());
  std::printf("recorded   device %s, in granules of %s, host %s\n",
              format_bytes(trace.budgets.device).c_str(), format_bytes(trace.table.device_granule()).c_str(),
              format_bytes(trace.budgets.host).c_str());
  std::printf("tensors    %d, in %d segments, %s in all, of which %s may be demoted to NVMe\n",
              trace.table.tensor_count(), trace.table.segment_count(),
              format_bytes(trace.table.total_charge(Tier::kHost)).c_str(),
              format_bytes(trace.table.nvme_bytes()).c_str());
  for (const Role role : kRoles) {
    const RoleSum sum = sum_of(trace.table, role);
    if (sum.tensors > 0) {
      std::printf("           %-16s %5lld tensors %7lld segments %10s\n", name_of(role),
                  static_cast<long long>(sum.tensors), static_cast<long long>(sum.segments),
                  format_bytes(sum.bytes).c_str());
    }
  }
  for (std::size_t i = 0; i < trace.programs.size(); ++i) {
    const Program& p = trace.programs[i];
    std::printf("%-10s %-16s %d operations, %d accesses, runs %lld time(s)\n", i == 0 ? "programs" : "",
                p.name().c_str(), p.op_count(), p.access_count(), static_cast<long long>(times[i]));
  }
  std::printf(
      "reuse      bytes of others between two uses, for a share of the bytes that are accessed:\n          ");
  for (std::size_t i = 0; i < quantiles.size(); ++i)
    std::printf(" %d%%: %s%s", kShares[i], format_bytes(quantiles[i]).c_str(),
                i + 1 < quantiles.size() ? "," : "\n");
  if (least) {
    std::printf("smallest   device %s (%lld bytes), and with it host %s (%lld bytes)\n",
                format_bytes(least->device).c_str(), static_cast<long long>(least->device),
                format_bytes(least->host).c_str(), static_cast<long long>(least->host));
  } else {
    std::printf("smallest   it fits no budgets: what may not be demoted is too much\n");
  }
  return 0;
}

}  // namespace

void add_trace_show(CLI::App& trace, int& exit_code) {
  auto s = std::make_shared<Flags>();
  CLI::App* sh =
      trace.add_subcommand("show", "Show what is in a trace: tensors, operations, reuse, smallest budgets");
  sh->add_option("file", s->file, "A trace")->required();
  sh->add_flag("--json", s->json, "Print one JSON object");
  sh->footer(
      "Examples:\n"
      "  ziggurat trace show step.trace\n"
      "  ziggurat trace show step.trace --json | jq .smallest_budgets\n"
      "How to read the reuse: if 50% of the accessed bytes have at most 2 GiB of other bytes "
      "between two uses, a memory a\n"
      "little larger than 2 GiB serves half of the accessed bytes under LRU. Where a program "
      "runs many times in a row, two\n"
      "of its runs are looked at.");
  sh->callback([s, &exit_code] { exit_code = show(*s); });
}

std::function<bool(double)> progress_of(const std::string& what) {
  return [what](double share) {
    log::progress(fmt::format("{} {:.0f}%", what, 100 * share));
    return !interrupted();
  };
}

}  // namespace zg::cli
