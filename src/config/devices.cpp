// The devices of the run: the key "devices" and the section "cuda".
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "config/sections.hpp"
#include "ziggurat/base/parse.hpp"

namespace zg::config {
namespace {

constexpr const char* kForms =
    "\"auto\" (a GPU where there is one), \"host\", \"host:N\", \"cuda:N\", \"cuda:all\", or several GPUs "
    "as in \"cuda:0-3\" and \"cuda:0,2\"";
constexpr int kMostRanks = 256, kMostGpus = 64;

// The number after "cuda:" or "host:"; none if it is no whole number from 0 on.
std::optional<int> number_of(std::string_view text) {
  const std::optional<int> index = number_in<int>(text);
  return index && *index >= 0 ? index : std::nullopt;
}

// The GPUs that "0-3" or "0,2,4-5" names; empty if the text has another form, or names too many.
std::vector<int> gpus_of(std::string_view text) {
  std::vector<int> gpus;
  while (true) {
    const std::string_view part = text.substr(0, text.find(','));
    const std::size_t dash = part.find('-');
    const std::optional<int> first = number_of(part.substr(0, dash)),
                             last = dash == part.npos ? first : number_of(part.substr(dash + 1));
    if (!first || !last || *last < *first || *last - *first >= kMostGpus) return {};
    for (int i = 0; i <= *last - *first; ++i) gpus.push_back(*first + i);
    if (gpus.size() > kMostGpus) return {};
    if (part.size() == text.size()) return gpus;
    text.remove_prefix(part.size() + 1);
  }
}

const Keys& cuda_keys() {
  using D = DeviceConfig;
  using Direct = D::Direct;
  static const Keys keys({
      {"deterministic", &D::deterministic, BoolSpec{},
       "The same bits in every run: no sums by atomics, and only those routines of "
       "libraries that promise the same."},
      {"attention", &D::attention,
       ChoiceSpec(AttentionKernel::kAuto, {{"auto", AttentionKernel::kAuto},
                                           {"own", AttentionKernel::kOwn},
                                           {"cudnn", AttentionKernel::kCudnn}}),
       "Kernel of attention. `\"own\"`: this program's. `\"cudnn\"`: cuDNN's, which must be "
       "installed and take the shape. `\"auto\"`: cuDNN's where it takes the shape and the "
       "run need not be deterministic, since cuDNN's deterministic backward takes memory "
       "that grows with the square of the sequence."},
      {"tf32", &D::tf32, BoolSpec{}, "Products of fp32 matrices are made in TF32, with 10 bits of mantissa."},
      {"pin", &D::pin, BoolSpec{},
       "Registers the host tier with CUDA (pinned memory), so that copies are asynchronous "
       "and run at full speed."},
      {"graphs", &D::graphs, BoolSpec{},
       "Operations of forward and backward that repeat with the same operands are launched "
       "together, as CUDA graphs. For steps of many short operations, where the GPU waits "
       "for the processor."},
      {"gpudirect_storage", &D::direct,
       ChoiceSpec(Direct::kAuto, {{"auto", Direct::kAuto}, {"on", Direct::kOn}, {"off", Direct::kOff}}),
       "Drives read into and write from the GPU's memory, past host memory (NVIDIA's cuFile, found when the "
       "run starts). `\"auto\"`: where that spares host memory."},
  });
  return keys;
}

}  // namespace

std::vector<Key> device_keys() {
  return {{"devices",
           TextSpec{"auto"},
           "What the run trains on: the processor, or GPUs as CUDA counts them. `\"auto\"`: the "
           "first GPU, or the processor where there is none. `\"host:N\"`: N ranks on the "
           "processor (under an MPI launcher, N in each process), which share its memory and "
           "drives. `\"cuda:0-3\"`, `\"cuda:0,2\"`, `\"cuda:all\"`: a rank on each of these GPUs "
           "(under an MPI launcher, on those of each machine). `--devices` sets this key.",
           {},
           "`\"auto\"`, `\"host\"`, `\"host:N\"`, `\"cuda:N\"`, `\"cuda:N-M\"`, `\"cuda:N,M\"` or "
           "`\"cuda:all\"`"},
          {"cuda", SectionSpec{cuda_keys}, "Training on a GPU."},
          {"parallel", SectionSpec{parallel_keys}, "What holds for all ranks together."},
          {"threads", SectionSpec{threads_keys}, "Which cores compute."}};
}

void read_devices(Section& root, const Machine& machine, RunConfig& run) {
  const std::string text = lower(root.text("devices"));
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
  } else if (text.rfind("cuda:", 0) == 0) {
    out.kind = DeviceConfig::Kind::kCuda;
    if (text == "cuda:all") {
      out.gpus.resize(static_cast<std::size_t>(machine.gpu_count ? machine.gpu_count() : 0));
      std::iota(out.gpus.begin(), out.gpus.end(), 0);
      if (out.gpus.empty())
        root.wrong("devices", "GPUs that this build can use", "there is none; ziggurat probe says why");
    } else {
      out.gpus = gpus_of(std::string_view(text).substr(5));
      if (out.gpus.empty())
        root.wrong("devices", kForms, fmt::format("cuda:0 is the first GPU; at most {}", kMostGpus));
    }
    for (const int gpu : out.gpus) {
      if (std::count(out.gpus.begin(), out.gpus.end(), gpu) > 1)
        root.wrong("devices", "each GPU once", fmt::format("it names GPU {} several times", gpu));
    }
    out.ranks = static_cast<int>(out.gpus.size());
  } else {
    root.wrong("devices", kForms, "ziggurat probe lists the GPUs");
  }
  auto cuda = root.section("cuda");
  if (!cuda) return;
  cuda->read_into(out);
  cuda->finish();
}

}  // namespace zg::config
