// The "threads" section: which cores compute, and which are kept for others. Whether the machine has them is
// found out by the session: a configuration is read anywhere.
#include <fmt/format.h>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr int kMostCores = 8192;  // more is a slip of the pen on any machine

// None for "auto".
std::optional<int> read_count(Section& threads, const char* key, int least) {
  const Json* value = threads.find(key);
  if (value == nullptr || threads.is_auto(key)) return std::nullopt;
  if (!value->is_number())
    threads.wrong(key, fmt::format("\"auto\", or a whole number, {} to {}", least, kMostCores));
  return static_cast<int>(threads.integer(key, {.min = least, .max = kMostCores}));
}

}  // namespace

void read_threads(Section& root, RunConfig& run) {
  const Json* value = root.find("threads");
  if (value != nullptr && value->is_number())
    root.wrong("threads", "an object", "a limit is \"threads\": {\"compute\": " + value->dump() + "}");
  auto threads = root.section("threads");
  if (!threads) return;
  run.threads.compute = read_count(*threads, "compute", 1);
  run.threads.reserved = read_count(*threads, "reserved", 0);
  if (threads->has("bind") && !threads->is_auto("bind")) {
    if (!threads->find("bind")->is_boolean()) threads->wrong("bind", "true, false or \"auto\"");
    run.threads.bind = threads->boolean("bind", false) ? Binding::kOn : Binding::kOff;
  }
  threads->finish();
}

}  // namespace zg::config
