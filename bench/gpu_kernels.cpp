// What a GPU can do, and what share of it each op reaches: memory, products, copies between host and device
// beside cudaMemcpyAsync, matrix products and attention at the shapes of GPT-2 124M and 1.5B and of a 7B
// Llama, and every other op with the bytes that it must move.
//
//   bench_gpu_kernels [--device cuda:0|host] [--only roofs,copies,products,attention,ops] [--filter TEXT]
//                     [--attention auto|own|cudnn] [--deterministic] [--rounds 5] [--seconds 120] [--tf32]
//                     [--tiny]
//
// JSON lines on stdout, a table on stderr. Times are medians over rounds in which all cases of a group take
// turns; in a round a case runs as often as hides what a launch costs, on operands that do not fit the
// caches. A share is of the roof that was measured in the same run: bytes read and written per second of the
// fastest simple loop, or FLOP/s of the fastest square product of the same type. `--device host --tiny` tries
// it all out where there is no GPU.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>

#include "bench/gpu_kernels.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg::bench {

std::vector<Shapes> shapes(const Options& o) {
  if (o.tiny) {
    return {{"tiny", false, 2, 64, 64, 2, 32, 256, 515}, {"tiny llama", true, 2, 64, 64, 2, 32, 176, 320}};
  }
  return {{"124M", false, 32, 1024, 768, 12, 64, 3072, 50257},
          {"1.5B", false, 8, 1024, 1600, 25, 64, 6400, 50257},
          {"7B", true, 4, 2048, 4096, 32, 128, 11008, 32000}};
}

#if !defined(ZG_CUDA)
std::unique_ptr<CopyPeer> make_copy_peer(int, std::int64_t) {
  return nullptr;
}
#endif

namespace {

constexpr const char* kSections[] = {"roofs", "copies", "products", "attention", "ops"};

struct Roof {
  double memory = 0;
  std::map<std::string, double> products;  // by type
};

void print(const nlohmann::ordered_json& j) {
  std::printf("%s\n", j.dump().c_str());
  std::fflush(stdout);
}

void print_copy(const nlohmann::ordered_json& j) {
  print(j);
  const std::string peer =
      j.contains("ratio") ? fmt::format("  cudaMemcpyAsync {:>12}  {:.3f}",
                                        format_rate(j["peer_rate"].get<double>()), j["ratio"].get<double>())
                          : std::string();
  const std::string size = j.contains("bytes") ? format_bytes(j["bytes"].get<std::int64_t>()) : "best";
  std::fprintf(stderr, "copy        %-16s %10s  %12s%s\n", j["way"].get<std::string>().c_str(), size.c_str(),
               format_rate(j["rate"].get<double>()).c_str(), peer.c_str());
}

class Bench {
 public:
  Bench(Device& device, const Options& options, int gpu)
      : device_(device),
        options_(options),
        gpu_(gpu),
        stream_(device.make_stream("compute")),
        end_(Clock::now() +
             std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.seconds))) {}

  void run() {
    // Shares are of the roofs, so these are always measured.
    group(roof_cases(device_, options_), true);
    print({{"bench", "roof"}, {"memory", roof_.memory}, {"products", roof_.products}});
    if (options_.wants("copies")) measure_copies(device_, options_, gpu_, end_, print_copy);
    const DType types[] = {DType::kBF16, DType::kF16, DType::kF32};
    if (options_.wants("products")) group(product_cases(device_, options_, DType::kBF16));
    if (options_.wants("attention")) {
      for (const DType t : types) group(attention_cases(device_, options_, t));
    }
    if (options_.wants("ops")) {
      group(update_cases(device_, options_));
      for (const DType t : types) group(op_cases(device_, options_, t));
    }
    // The other types' products are the same library's.
    if (options_.wants("products")) {
      for (const DType t : {DType::kF16, DType::kF32}) group(product_cases(device_, options_, t));
    }
  }

 private:
  void group(std::vector<Case> cases, bool roofs = false) {
    if (!options_.filter.empty() && !roofs) {
      std::erase_if(cases, [&](const Case& c) {
        return fmt::format("{} {} {}", c.op, c.dtype, c.shape).find(options_.filter) == std::string::npos;
      });
    }
    if (cases.empty() || (!roofs && Clock::now() > end_)) {
      if (!cases.empty()) {
        std::fprintf(stderr, "%s in %s: not measured, the time is up\n", cases.front().section.c_str(),
                     cases.front().dtype.c_str());
        print({{"bench", "left_out"}, {"section", cases.front().section}, {"dtype", cases.front().dtype}});
      }
      return;
    }
    const std::vector<Measured> results = measure(device_, *stream_, cases, options_, end_);
    if (roofs) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        double& roof = results[i].flops > 0 ? roof_.products[cases[i].dtype] : roof_.memory;
        roof = std::max(roof, results[i].rate());
      }
    }
    for (std::size_t i = 0; i < cases.size(); ++i) show(cases[i], results[i]);
  }

  void show(const Case& c, const Measured& m) {
    const bool product = m.flops > 0;
    const double roof = product ? roof_.products[c.dtype] : roof_.memory;
    print({{"bench", "op"},
           {"section", c.section},
           {"op", c.op},
           {"dtype", c.dtype},
           {"shape", c.shape},
           {"ms", m.seconds * 1e3},
           {"mad_ms", m.mad * 1e3},
           {"bytes", m.bytes},
           {"flops", m.flops},
           {"rate", m.rate()},
           {"share", m.rate() / roof},
           {"of", product ? "products" : "memory"}});
    std::fprintf(stderr, "%-11s %-5s %-28s %-34s %9.4f ms  %9.2f %s  %5.1f%%\n", c.section.c_str(),
                 c.dtype.c_str(), c.op.c_str(), c.shape.c_str(), m.seconds * 1e3,
                 m.rate() / (product ? 1e12 : 1e9), product ? "TFLOP/s" : "GB/s   ", 100 * m.rate() / roof);
  }

  Device& device_;
  const Options& options_;
  const int gpu_;
  std::unique_ptr<Stream> stream_;
  const Clock::time_point end_;
  Roof roof_;
};

Options parse(int argc, char** argv) {
  Options o;
  CLI::App app("What a device can do, and what share of it each op reaches");
  app.add_option("--device", o.device, "host, or cuda:N")->capture_default_str();
  app.add_option("--only", o.only, "of roofs, copies, products, attention, ops; with commas");
  app.add_option("--filter", o.filter, "cases whose op, type or shape holds this text");
  app.add_option("--attention", o.attention, "whose")
      ->check(CLI::IsMember({"auto", "own", "cudnn"}))
      ->capture_default_str();
  app.add_flag("--deterministic", o.deterministic, "sums in a fixed order, as in runs by default");
  app.add_option("--rounds", o.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seconds", o.seconds, "after which nothing new begins")->capture_default_str();
  app.add_flag("--tf32", o.tf32, "products of f32 with 10 bits of mantissa");
  app.add_flag("--tiny", o.tiny, "small shapes, to try it out");
  try {
    app.parse(argc, argv);
    for (const std::string& section : CLI::detail::split(o.only, ',')) {
      if (!section.empty() &&
          std::find(std::begin(kSections), std::end(kSections), section) == std::end(kSections))
        throw CLI::ValidationError("--only", section + " is none of roofs, copies, products, attention, ops");
    }
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e));
  }
  return o;
}

// Nearly all that is free: the slabs of the largest group take some of it.
std::unique_ptr<Device> make_device(const Options& o, int gpu) {
  if (gpu < 0) return make_host_device(o.tiny ? kGiB : 8 * kGiB, nullptr);
  CudaOptions options{.device = gpu, .deterministic = o.deterministic, .tf32 = o.tf32};
  options.attention = o.attention == "own"     ? AttentionKernel::kOwn
                      : o.attention == "cudnn" ? AttentionKernel::kCudnn
                                               : AttentionKernel::kAuto;
  std::string why;
  for (const GpuInfo& g : list_gpus(&why)) {
    if (g.device == gpu) options.budget = std::min(40 * kGiB, g.free - 2 * kGiB);
  }
  return make_cuda_device(options);
}

int gpu_of(const std::string& device) {
  if (device == "host") return -1;
  if (device.rfind("cuda:", 0) == 0 && device.find_first_not_of("0123456789", 5) == std::string::npos &&
      device.size() > 5)
    return std::atoi(device.c_str() + 5);
  throw Error(Errc::kUsage, "--device " + device, "is neither host nor cuda:N");
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  using namespace zg::bench;
  const Options options = parse(argc, argv);
  try {
    const int gpu = gpu_of(options.device);
    const std::unique_ptr<zg::Device> device = make_device(options, gpu);
    print({{"bench", "device"},
           {"device", device->describe()},
           {"attention", options.attention},
           {"rounds", options.rounds}});
    Bench(*device, options, gpu).run();
    return 0;
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_gpu_kernels: %s\n", e.what());
    return e.exit_code();
  }
}
