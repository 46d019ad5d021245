// What the run trains on: "devices" and the section "cuda".
#include <fmt/format.h>

#include <charconv>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr const char* kForms = "\"auto\" (a GPU where there is one), \"host\", \"host:N\" or \"cuda:N\"";
constexpr int kMostRanks = 256;

// The number after "cuda:" or "host:"; none if it is no whole number from 0 on.
std::optional<int> number_of(std::string_view text) {
  int index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc() || end != text.data() + text.size() || index < 0) return std::nullopt;
  return index;
}

const Keys& cuda_keys() {
  using D = DeviceConfig;
  using Direct = D::Direct;
  static const Keys keys({
      {"deterministic", &D::deterministic, BoolSpec{},
       "The same bits in every run: no sums by atomics, and of libraries only what promises so."},
      {"attention", &D::attention,
       ChoiceSpec(AttentionKernel::kAuto, {{"auto", AttentionKernel::kAuto},
                                           {"own", AttentionKernel::kOwn},
                                           {"cudnn", AttentionKernel::kCudnn}}),
       "Kernel of attention. `\"cudnn\"` must be there and take the shape. `\"auto\"`: cuDNN's where it "
       "takes the shape and the run need not be deterministic, since its deterministic backward takes memory "
       "by the square of the sequence."},
      {"tf32", &D::tf32, BoolSpec{}, "Products of fp32 with 10 bits of mantissa."},
      {"pin", &D::pin, BoolSpec{},
       "Registers the host tier with CUDA, so that copies run by themselves and at full speed."},
      {"graphs", &D::graphs, BoolSpec{},
       "Operations of forward and backward that come again with the same operands are launched as a whole "
       "(CUDA graphs). For steps of many short operations, where the GPU waits for the processor."},
      {"gpudirect_storage", &D::direct,
       ChoiceSpec(Direct::kAuto, {{"auto", Direct::kAuto}, {"on", Direct::kOn}, {"off", Direct::kOff}}),
       "Drives read into and write from the GPU's memory, past host memory (NVIDIA's cuFile, found when the "
       "run starts). `\"auto\"`: where that spares host memory."},
  });
  return keys;
}

}  // namespace

std::vector<Key> device_keys() {
  return {
      {"devices",
       TextSpec{"auto"},
       "What the run trains on: the processor, or a GPU as CUDA counts them. `\"auto\"`: the first GPU, or "
       "the processor where there is none. `\"host:N\"`: N ranks on the processor, which share its memory "
       "and drives; under an MPI launcher, of each process. `--devices` is short for it.",
       {},
       "`\"auto\"`, `\"host\"`, `\"host:N\"` or `\"cuda:N\"`"},
      {"cuda", SectionSpec{cuda_keys}, "Training on a GPU."},
      {"parallel", SectionSpec{parallel_keys}, "What holds for all ranks together."},
      {"threads", SectionSpec{threads_keys}, "Which cores compute."}};
}

void read_devices(Section& root, const Machine& machine, RunConfig& run) {
  const std::string text = root.text("devices");
  DeviceConfig& out = run.device;
  if (text == "auto") {
    const bool gpu = machine.has_gpu && machine.has_gpu();
    out.kind = gpu ? DeviceConfig::Kind::kCuda : DeviceConfig::Kind::kHost;
  } else if (text == "host") {
    out.kind = DeviceConfig::Kind::kHost;
  } else if (text.rfind("host:", 0) == 0) {
    const std::optional<int> ranks = number_of(std::string_view(text).substr(5));
    if (!ranks || *ranks < 1 || *ranks > kMostRanks)
      root.wrong("devices", kForms, fmt::format("host:4 has four ranks; at most {}", kMostRanks));
    out.kind = DeviceConfig::Kind::kHost;
    out.ranks = *ranks;
  } else if (text == "cuda") {
    out.kind = DeviceConfig::Kind::kCuda;
  } else if (text.rfind("cuda:", 0) == 0 && text.find(',') == std::string::npos) {
    const std::optional<int> index = number_of(std::string_view(text).substr(5));
    if (!index) root.wrong("devices", kForms, "cuda:0 is the first GPU");
    out.kind = DeviceConfig::Kind::kCuda;
    out.index = *index;
  } else {
    root.wrong("devices", kForms,
               text.rfind("cuda:", 0) == 0 ? "a run trains on one GPU" : "ziggurat probe lists the GPUs");
  }
  auto cuda = root.section("cuda");
  if (!cuda) return;
  cuda->read_into(out);
  cuda->finish();
}

}  // namespace zg::config
