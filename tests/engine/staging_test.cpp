// The engine's own copies: one a step in each direction, from and to pinned memory.
#include <set>

#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

// The host device, with hooks that a GPU would have, and with a list of the copies on the engine's stream.
class WatchedDevice final : public Device {
 public:
  struct Copy {
    bool to_device;
    std::int64_t bytes;
    bool pinned;
  };
  explicit WatchedDevice(std::int64_t budget) : inner_(make_host_device(budget, nullptr)) {}
  std::vector<Copy> take_copies() { return std::exchange(copies_, {}); }
  bool nothing_pinned() const { return pinned_.empty(); }

  std::string describe() const override { return inner_->describe(); }
  bool is_host() const override { return true; }
  Arena& arena() override { return inner_->arena(); }
  Ops& ops() override { return inner_->ops(); }
  std::unique_ptr<Stream> make_stream(const std::string& name) override { return inner_->make_stream(name); }
  Arena::Hooks host_hooks() override {
    return {[this](void* at, std::int64_t bytes) { pinned_[static_cast<char*>(at)] = bytes; },
            [this](void* at, std::int64_t) { pinned_.erase(static_cast<char*>(at)); }};
  }
  void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    note(stream, true, host, bytes);
    inner_->copy_to_device(stream, device, host, bytes);
  }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    note(stream, false, host, bytes);
    inner_->copy_to_host(stream, host, device, bytes);
  }

 private:
  // The store's streams have copies of their own, on other threads.
  void note(const Stream& stream, bool to_device, const void* host, std::int64_t bytes) {
    if (stream.name() != "compute") return;
    const char* const at = static_cast<const char*>(host);
    auto next = pinned_.upper_bound(const_cast<char*>(at));
    const bool pinned =
        next != pinned_.begin() && std::prev(next)->first + std::prev(next)->second >= at + bytes;
    copies_.push_back({to_device, bytes, pinned});
  }

  std::unique_ptr<Device> inner_;
  std::map<char*, std::int64_t> pinned_;
  std::vector<Copy> copies_;
};

TEST(Staging, OneCopyAStepInEachDirection) {
  for (const Accumulation order : {Accumulation::kLayerMajor, Accumulation::kMicroBatchMajor}) {
    const TinySetup s{.layout = {.micro_batch = {2, 13}, .micro_batches = 3, .accumulation = order}};
    const Model model(s.model, s.dtype, host_ops());
    const Layout layout(model, s.layout);
    const StepPrograms programs(layout, UpdateTiming::kDeferred);
    const Budgets budgets{layout.table.total_charge(Tier::kDevice), layout.table.total_charge(Tier::kHost)};
    WatchedDevice device(budgets.device + layout.workspace_charge());
    const auto host = make_host_arena("host memory", budgets.host);
    {
      TensorStore store({.table = &layout.table, .device = &device, .host = host.get(), .budgets = budgets});
      StepExecutor engine({&layout, &programs, &device, &store, nullptr, 0});
      engine.initialize([](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
        for (std::int64_t i = begin; i < end; ++i)
          out[i - begin] = static_cast<float>(reference_element(p, i));
      });
      (void)device.take_copies();
      const LinkBytes own = engine_traffic_per_step(layout);
      const auto expect_copies = [&](std::int64_t up) {
        const auto copies = device.take_copies();
        ASSERT_EQ(copies.size(), 2u);
        EXPECT_TRUE(copies[0].to_device);
        EXPECT_FALSE(copies[1].to_device);
        EXPECT_EQ(copies[0].bytes, up);
        EXPECT_EQ(copies[1].bytes, own[kToHost]);
        for (const auto& c : copies) EXPECT_TRUE(c.pinned) << c.bytes;
      };
      for (int step = 0; step < 2; ++step) {
        std::vector<Batch> batches;
        std::vector<MicroBatch> micro_batches;
        for (std::int64_t m = 0; m < 3; ++m) batches.push_back(tiny_batch(s, step, m));
        for (const Batch& b : batches) micro_batches.push_back({b.ids.data(), b.targets.data()});
        UpdateRule rule;
        rule.params.step = step + 1;
        (void)engine.train_step(step, micro_batches, rule, step == 0 ? Then::kTrain : Then::kPause);
        expect_copies(own[kToDevice]);
      }
      engine.flush();
      EXPECT_TRUE(device.take_copies().empty());
      const Batch batch = tiny_batch(s, 9, 0);
      (void)engine.evaluate(1, [&](std::int64_t) {
        return MicroBatch{batch.ids.data(), batch.targets.data()};
      });
      // As many micro-batches as are evaluated together.
      const std::int64_t absent = 3 - layout.options.live_micro_batches();
      expect_copies(own[kToDevice] - absent * 2 * 4 * s.layout.micro_batch.rows());
      EXPECT_FALSE(device.nothing_pinned());
    }
    EXPECT_TRUE(device.nothing_pinned()) << "the engine gave its memory back";
  }
}

}  // namespace
}  // namespace zg::test
