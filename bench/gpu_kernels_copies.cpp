// Copies between host memory and the device, each way and both at once, in turns with the machine's own
// library.
#include <algorithm>
#include <cstring>

#include "bench/gpu_kernels.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/memory.hpp"

namespace zg::bench {
namespace {

const char* name_of(Way way) {
  return way == Way::kToDevice ? "host -> device" : way == Way::kToHost ? "device -> host" : "both at once";
}

// As a run copies: host memory from an arena that the device was told of, a stream for each way.
class Ours {
 public:
  Ours(Device& device, std::int64_t largest)
      : device_(device), bytes_(largest), in_(device.make_stream("in")), out_(device.make_stream("out")) {
    host_ = make_host_memory({.name = "host memory", .budget = 2 * round_up(largest, 2 * kMiB)});
    host_->set_hooks(device.host_hooks());
    for (int i = 0; i < 2; ++i) {
      on_host_[i] = host_->allocate(bytes_);
      on_device_[i] = device.arena().allocate(bytes_);
      if (on_host_[i] == nullptr || on_device_[i] == nullptr)
        throw Error(Errc::kMemory, "bench_gpu_kernels", format_bytes(2 * bytes_) + " to copy cannot be had");
      std::memset(on_host_[i], i + 1, static_cast<std::size_t>(bytes_));
    }
  }
  Ours(const Ours&) = delete;
  Ours& operator=(const Ours&) = delete;
  ~Ours() {
    for (int i = 0; i < 2; ++i) {
      device_.arena().release(on_device_[i], bytes_);
      host_->release(on_host_[i], bytes_);
    }
    host_->set_hooks({});
  }

  double seconds(Way way, std::int64_t bytes, int count) {
    const auto begin = Clock::now();
    for (int i = 0; i < count; ++i) {
      if (way != Way::kToHost) device_.copy_to_device(*in_, on_device_[0], on_host_[0], bytes);
      if (way != Way::kToDevice) device_.copy_to_host(*out_, on_host_[1], on_device_[1], bytes);
    }
    if (way != Way::kToHost) in_->synchronize();
    if (way != Way::kToDevice) out_->synchronize();
    return seconds_between(begin, Clock::now());
  }

  // What arrived is what was sent: pieces of both ends and of the middle, there and back.
  void verify() {
    auto* const from = static_cast<unsigned char*>(on_host_[0]);
    for (std::int64_t i = 0; i < bytes_; ++i) from[i] = static_cast<unsigned char>(i * 31 >> 3);
    device_.copy_to_device(*in_, on_device_[0], from, bytes_);
    in_->synchronize();
    std::memset(on_host_[1], 0, static_cast<std::size_t>(bytes_));
    device_.copy_to_host(*out_, on_host_[1], on_device_[0], bytes_);
    out_->synchronize();
    ZG_ASSERT(std::memcmp(from, on_host_[1], static_cast<std::size_t>(bytes_)) == 0,
              "a copy is not what was copied");
  }

 private:
  Device& device_;
  std::int64_t bytes_;
  std::unique_ptr<Stream> in_, out_;
  std::unique_ptr<HostMemory> host_;
  void* on_host_[2] = {nullptr, nullptr};
  void* on_device_[2] = {nullptr, nullptr};
};

}  // namespace

void measure_copies(Device& device, const Options& options, int gpu, Clock::time_point end,
                    const std::function<void(const nlohmann::ordered_json&)>& print) {
  const std::int64_t largest = options.tiny ? kMiB : 256 * kMiB,
                     in_all = options.tiny ? 2 * kMiB : 512 * kMiB;
  Ours ours(device, largest);
  ours.verify();
  const std::unique_ptr<CopyPeer> peer = gpu < 0 ? nullptr : make_copy_peer(gpu, largest);
  struct Series {
    std::int64_t bytes;
    Way way;
    std::vector<double> ours, peer;
    double rate(const std::vector<double>& seconds) const { return 1 / median(seconds); }
  };
  std::vector<Series> all;
  for (const std::int64_t bytes : {64 * kKiB, 256 * kKiB, kMiB, 4 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}) {
    if (bytes > largest) continue;
    for (const Way way : {Way::kToDevice, Way::kToHost, Way::kBoth}) all.push_back({bytes, way, {}, {}});
  }
  for (int r = -1; r < options.rounds; ++r) {  // the first is not counted
    if (r > 0 && Clock::now() > end) break;
    for (Series& s : all) {
      const int count = static_cast<int>(std::clamp<std::int64_t>(in_all / s.bytes, 2, 2000));
      const double bytes = static_cast<double>(s.bytes) * count * (s.way == Way::kBoth ? 2 : 1);
      const double a = ours.seconds(s.way, s.bytes, count) / bytes;
      const double b = peer == nullptr ? 0 : peer->seconds(s.way, s.bytes, count) / bytes;
      if (r < 0) continue;
      s.ours.push_back(a);
      if (peer != nullptr) s.peer.push_back(b);
    }
  }
  for (const Way way : {Way::kToDevice, Way::kToHost, Way::kBoth}) {
    double best = 0, peer_best = 0;
    for (const Series& s : all) {
      if (s.way != way) continue;
      nlohmann::ordered_json j{{"bench", "copy"}, {"way", name_of(way)}, {"bytes", s.bytes}};
      j["rate"] = s.rate(s.ours);
      best = std::max(best, s.rate(s.ours));
      if (peer != nullptr) {
        j["peer_rate"] = s.rate(s.peer);
        j["ratio"] = s.rate(s.ours) / s.rate(s.peer);
        peer_best = std::max(peer_best, s.rate(s.peer));
      }
      print(j);
    }
    nlohmann::ordered_json j{{"bench", "copy_best"}, {"way", name_of(way)}, {"rate", best}};
    if (peer != nullptr) {
      j["peer_rate"] = peer_best;
      j["ratio"] = best / peer_best;
    }
    print(j);
  }
}

}  // namespace zg::bench
