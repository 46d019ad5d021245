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

const Keys& cuda_keys() {
  using Direct = DeviceConfig::Direct;
  static const DeviceConfig d;
  static const Keys keys({
      {"deterministic", BoolSpec{d.deterministic},
       "The same bits in every run: no sums by atomics, and of libraries only what promises so."},
      {"attention",
       ChoiceSpec(d.attention, {{"auto", AttentionKernel::kAuto},
                                {"own", AttentionKernel::kOwn},
                                {"cudnn", AttentionKernel::kCudnn}}),
       "Kernel of attention. `\"cudnn\"` must be there and take the shape. `\"auto\"`: cuDNN's where it "
       "takes the shape "
       "and the run need not be deterministic, since its deterministic backward takes memory by the square "
       "of the "
       "sequence."},
      {"tf32", BoolSpec{d.tf32}, "Products of fp32 with 10 bits of mantissa."},
      {"pin", BoolSpec{d.pin},
       "Registers the host tier with CUDA, so that copies run by themselves and at full speed."},
      {"graphs", BoolSpec{d.graphs},
       "Operations of forward and backward that come again with the same operands are launched as a whole "
       "(CUDA graphs). "
       "For steps of many short operations, where the GPU waits for the processor."},
      {"gpudirect_storage",
       ChoiceSpec(d.direct, {{"auto", Direct::kAuto}, {"on", Direct::kOn}, {"off", Direct::kOff}}),
       "Drives read into and write from the GPU's memory, past host memory (NVIDIA's cuFile, found when the "
       "run starts). "
       "`\"auto\"`: where that spares host memory."},
  });
  return keys;
}

}  // namespace

std::vector<Key> device_keys() {
  return {{"devices",
           TextSpec{"auto"},
           "What the run trains on: the processor, or a GPU as CUDA counts them. `\"auto\"`: the first GPU, "
           "or the "
           "processor where there is none. `--devices` is short for it.",
           {},
           "`\"auto\"`, `\"host\"` or `\"cuda:N\"`"},
          {"cuda", SectionSpec{cuda_keys}, "Training on a GPU."},
          {"threads", SectionSpec{threads_keys}, "Which cores compute."}};
}

void read_devices(Section& root, const Machine& machine, RunConfig& run) {
  const std::string text = root.text("devices");
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
  out.deterministic = cuda->boolean("deterministic");
  out.tf32 = cuda->boolean("tf32");
  out.pin = cuda->boolean("pin");
  out.graphs = cuda->boolean("graphs");
  using Direct = DeviceConfig::Direct;
  out.attention = cuda->choice<AttentionKernel>("attention");
  out.direct = cuda->choice<Direct>("gpudirect_storage");
  if (out.direct == Direct::kOn && out.kind != DeviceConfig::Kind::kCuda)
    cuda->wrong("gpudirect_storage", "\"auto\" or \"off\": this run trains on the processor");
  cuda->finish();
}

}  // namespace zg::config
