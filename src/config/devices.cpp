// What the run trains on: "devices" and the section "cuda".
#include <fmt/format.h>

#include <charconv>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr const char* kForms = "\"auto\" (a GPU where there is one), \"host\" or \"cuda:N\"";

// The number behind "cuda:" or "host:"; none if there is no number.
std::optional<int> number_after(const std::string& text, std::size_t at) {
  int n = 0;
  const char *begin = text.data() + at, *end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(begin, end, n);
  if (error != std::errc() || stopped != end || begin == end || n < 0) return std::nullopt;
  return n;
}

}  // namespace

void read_devices(Section& root, const Machine& machine, RunConfig& run) {
  const std::string text = root.text("devices", "auto");
  DeviceConfig& out = run.device;
  if (text == "auto") {
    const bool gpu = machine.has_gpu && machine.has_gpu();
    out.kind = gpu ? DeviceConfig::Kind::kCuda : DeviceConfig::Kind::kHost;
  } else if (text == "host" || text == "host:1") {
    out.kind = DeviceConfig::Kind::kHost;
  } else if (text == "cuda") {
    out.kind = DeviceConfig::Kind::kCuda;
  } else if (text.rfind("cuda:", 0) == 0 && text.find(',') == std::string::npos) {
    const std::optional<int> n = number_after(text, 5);
    if (!n) root.wrong("devices", kForms, "cuda:0 is the first GPU");
    out.kind = DeviceConfig::Kind::kCuda;
    out.index = *n;
  } else {
    const bool several = text.rfind("host:", 0) == 0 || text.rfind("cuda:", 0) == 0;
    root.wrong("devices", kForms, several ? "a run trains on one device" : "ziggurat probe lists the GPUs");
  }
  auto cuda = root.section("cuda");
  if (!cuda) return;
  out.deterministic = cuda->boolean("deterministic", out.deterministic);
  out.tf32 = cuda->boolean("tf32", out.tf32);
  out.pin = cuda->boolean("pin", out.pin);
  out.graphs = cuda->boolean("graphs", out.graphs);
  out.attention = cuda->choice(
      "attention", AttentionKernel::kAuto,
      {{"auto", AttentionKernel::kAuto}, {"own", AttentionKernel::kOwn}, {"cudnn", AttentionKernel::kCudnn}});
  using Direct = DeviceConfig::Direct;
  out.direct = cuda->choice("gpudirect_storage", Direct::kAuto,
                            {{"auto", Direct::kAuto}, {"on", Direct::kOn}, {"off", Direct::kOff}});
  if (out.direct == Direct::kOn && out.kind != DeviceConfig::Kind::kCuda)
    cuda->wrong("gpudirect_storage", "\"auto\" or \"off\": this run trains on the processor");
  cuda->finish();
}

}  // namespace zg::config
