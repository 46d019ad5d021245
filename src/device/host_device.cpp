#include <cstring>

#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg {
namespace {

// Its "device memory" is an arena of its own, apart from the host tier's, so that tiers, copies and budgets
// work as on a GPU.
class HostDevice : public Device {
 public:
  HostDevice(std::int64_t budget, Trace* trace)
      : arena_(make_host_arena("device memory", budget)), trace_(trace) {}

  std::string describe() const override {
    return fmt::format("host device ({} threads, budget {})", parallelism(), format_bytes(arena_->budget()));
  }
  bool is_host() const override { return true; }
  Arena& arena() override { return *arena_; }
  Ops& ops() override { return host_ops(); }
  std::unique_ptr<Stream> make_stream(const std::string& name) override {
    return std::make_unique<HostStream>(name, HostStream::Mode::kThread, trace_);
  }
  void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    copy(stream, "copy to device", device, host, bytes);
  }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    copy(stream, "copy to host", host, device, bytes);
  }

 private:
  static void copy(Stream& stream, const char* label, void* to, const void* from, std::int64_t bytes) {
    static_cast<HostStream&>(stream).enqueue(label,
                                             [=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  }

  std::unique_ptr<Arena> arena_;
  Trace* trace_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(std::int64_t budget, Trace* trace) {
  return std::make_unique<HostDevice>(budget, trace);
}

}  // namespace zg
