// The "threads" section: which cores compute, and which are reserved. The trainer checks that the machine has
// them, since a configuration may be read on another machine.
#include <fmt/format.h>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr int kMostCores = 8192;  // more cores than any machine has: a larger number is a typing error

// None if the key is "auto" or absent.
std::optional<int> read_count(Section& threads, const char* key) {
  const Json* value = threads.find(key);
  if (value == nullptr || threads.is_auto(key)) return std::nullopt;
  if (!value->is_number()) threads.wrong(key, "\"auto\", or " + range_text(threads.spec_of<IntSpec>(key)));
  return static_cast<int>(threads.integer(key));
}

}  // namespace

const Keys& threads_keys() {
  static const Keys keys({
      {"compute", IntSpec{.min = 1, .max = kMostCores, .autos = Auto::kOwnMeaning},
       "Threads that compute, in all, at most one a core. `--threads N` sets this key.",
       "`\"auto\"`: one for each core that is not reserved"},
      {"reserved", IntSpec{.max = kMostCores, .autos = Auto::kOwnMeaning},
       "Cores of each NUMA node on which nothing computes, for I/O threads and for threads "
       "that drive a device.",
       "`\"auto\"`: by the number of cores, drives and devices of the node"},
      {"bind", BoolSpec{false, Auto::kOwnMeaning},
       "Binds threads to their cores. With `true` the run ends where that cannot be done.",
       "`\"auto\"`: with several NUMA nodes or reserved cores"},
  });
  return keys;
}

void read_threads(Section& root, RunConfig& run) {
  const Json* value = root.find("threads");
  if (value != nullptr && value->is_number())
    root.wrong("threads", "an object", "a limit is \"threads\": {\"compute\": " + value->dump() + "}");
  auto threads = root.section("threads");
  if (!threads) return;
  run.threads.compute = read_count(*threads, "compute");
  run.threads.reserved = read_count(*threads, "reserved");
  if (threads->has("bind") && !threads->is_auto("bind")) {
    if (!threads->find("bind")->is_boolean()) threads->wrong("bind", "true, false or \"auto\"");
    run.threads.bind = threads->boolean("bind") ? Binding::kOn : Binding::kOff;
  }
  threads->finish();
}

}  // namespace zg::config
