// The store over a CUDA device: which waits are left to the streams of the device.
#include <future>

#include "device/cuda/device.hpp"
#include "store/rig.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/host_blas.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kBytes = std::int64_t{6} << 20;

// A store of `segments` segments over a device whose copies can be held. The programs: `fill` writes all of
// them at the host, `use` then reads them at the device, the second operation the first segment once more.
// `hand_over` writes the first segment at the device, and then reads it there.
struct WaitingRig {
  explicit WaitingRig(int segments) {
    TensorTable table(0, 4096);
    for (int i = 0; i < segments; ++i) {
      std::string name = "t";
      name += std::to_string(i);
      table.add({.name = name, .dtype = DType::kF32, .count = kBytes / 4, .lowest = Tier::kHost});
    }
    FakeOptions options;
    options.granule = 4096;
    options.memory = segments * kBytes + (std::int64_t{64} << 20);
    auto made = std::make_unique<FakeRuntime>(options);
    fake = made.get();
    const Budgets budgets{segments * kBytes, segments * kBytes};
    rig = std::make_unique<Rig>(
        table, budgets, cuda::make_device({.budget = budgets.device}, std::move(made), make_host_blas),
        [&](Device&) { return make_nvme(Nvme::kMemory, table, ""); });
    std::vector<AccessStep> all;
    for (SegmentId id = 0; id < rig->table.segment_count(); ++id) {
      fill_program.add_op({{{id, Tier::kHost, Access::kOverwrite, false}}});
      all.push_back({id, Tier::kDevice, Access::kRead, false});
    }
    use.add_op(all);
    use.add_op({{all.front()}});
    hand_over.add_op({{{0, Tier::kDevice, Access::kOverwrite, false}}});
    hand_over.add_op({{all.front()}});
    for (Program* program : {&fill_program, &use, &hand_over}) program->finish(rig->table.segment_count());
    stream = rig->device->make_stream("compute");
  }
  ~WaitingRig() {
    fake->hold_copies(false);
    stream->synchronize();
  }

  // All content is at the host afterwards, and nowhere else.
  void fill_all() {
    TensorStore& store = *rig->store;
    store.run(&fill_program, nullptr);
    std::vector<Lease> leases;
    for (SegmentId id = 0; id < rig->table.segment_count(); ++id) {
      store.acquire_op(nullptr, leases);
      fill(leases[0].data(), leases[0].bytes(), id, 1);
      leases.clear();
    }
    store.run(nullptr, nullptr);
  }
  void pass(std::vector<Lease>& leases) {
    for (Lease& lease : leases) lease.release_after(*stream, stream->record());
  }

  FakeRuntime* fake = nullptr;
  std::unique_ptr<Rig> rig;
  Program fill_program{"fill"}, use{"use"}, hand_over{"hand over"};
  std::unique_ptr<Stream> stream;
};

// The issuing thread goes on while no copy has even begun, and the stream reads what they brought.
TEST(WaitingStore, AStreamWaitsForCopiesAndTheIssuingThreadDoesNot) {
  WaitingRig w(5);  // the copies' link has room for fewer at once
  TensorStore& store = *w.rig->store;
  w.fill_all();
  std::vector<char> out(kBytes);
  Staging staged(*w.rig->device, 5 * kBytes);
  char* const copy = static_cast<char*>(staged.data());
  w.fake->hold_copies(true);
  store.run(&w.use, nullptr);
  std::vector<Lease> first, second;
  auto issuing = std::async(std::launch::async, [&] {
    store.acquire_op(w.stream.get(), first);
    for (int i = 0; i < 5; ++i)
      w.rig->device->copy_to_host(*w.stream, copy + i * kBytes, first[static_cast<std::size_t>(i)].data(),
                                  kBytes);
    w.pass(first);
    store.acquire_op(w.stream.get(), second);
    w.pass(second);
  });
  const bool went_on = issuing.wait_for(std::chrono::seconds(30)) == std::future_status::ready;
  EXPECT_TRUE(went_on);
  EXPECT_EQ(store.statistics().waited_for[static_cast<std::size_t>(WaitCause::kCopies)], 0);
  EXPECT_EQ(store.statistics().links[kToDevice].transfers, 0);
  const auto held = std::chrono::milliseconds(30);
  std::this_thread::sleep_for(held);
  w.fake->hold_copies(false);
  issuing.get();
  w.stream->synchronize();
  for (SegmentId id = 0; id < 5; ++id) EXPECT_TRUE(holds(copy + id * kBytes, kBytes, id, 1)) << id;
  EXPECT_GE(w.stream->waited_seconds(), 0.02);
  EXPECT_LE(w.stream->waited_seconds(), w.stream->busy_seconds());
  store.run(nullptr, nullptr);
  EXPECT_EQ(store.statistics().links[kToDevice].transfers, 5);
}

// The same where another stream has the bytes: what it writes is what the second stream reads.
TEST(WaitingStore, AStreamWaitsForAnotherAndTheIssuingThreadDoesNot) {
  WaitingRig w(1);
  TensorStore& store = *w.rig->store;
  const std::unique_ptr<Stream> writer = w.rig->device->make_stream("writer");
  Staging written(*w.rig->device, kBytes), read(*w.rig->device, kBytes);
  fill(static_cast<char*>(written.data()), kBytes, 0, 7);
  w.fake->hold_copies(true);
  store.run(&w.hand_over, nullptr);
  std::vector<Lease> first, second;
  auto issuing = std::async(std::launch::async, [&] {
    store.acquire_op(writer.get(), first);
    w.rig->device->copy_to_device(*writer, first[0].data(), written.data(), kBytes);
    for (Lease& lease : first) lease.release_after(*writer, writer->record());
    store.acquire_op(w.stream.get(), second);
    w.rig->device->copy_to_host(*w.stream, read.data(), second[0].data(), kBytes);
    w.pass(second);
  });
  EXPECT_EQ(issuing.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  w.fake->hold_copies(false);
  issuing.get();
  w.stream->synchronize();
  EXPECT_TRUE(holds(static_cast<char*>(read.data()), kBytes, 0, 7));
  store.run(nullptr, nullptr);
}

}  // namespace
}  // namespace zg::test
