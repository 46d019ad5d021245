// The fake NCCL: that it carries calls out, and finds misuse.
#include "tests/cuda/comm/fake_nccl.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "device/cuda/device_buffer.hpp"
#include "support/errors.hpp"

namespace zg::test {
namespace {

// Two ranks, driven by one thread.
class FakeNcclTest : public testing::Test {
 protected:
  FakeNcclTest() {
    const comm::NcclId id = nccl_.make_id();
    for (int r = 0; r < 2; ++r) {
      runtime_->use_device(r);
      stream_[r] = runtime_->create_stream(false);
      memory_[r] = std::make_unique<cuda::DeviceBuffer>(*runtime_, r, 4096);
      std::memset(memory_[r]->data(), r + 1, 4096);
      comm_[r] = nccl_.init(2, id, r);
    }
    settle();
  }
  ~FakeNcclTest() override {
    for (int r = 0; r < 2; ++r) {
      if (comm_[r] != nullptr) nccl_.abort(comm_[r]);
      runtime_->use_device(r);
      runtime_->synchronize(stream_[r]);
      runtime_->destroy_stream(stream_[r]);
      memory_[r].reset();
    }
  }
  char* at(int rank, std::int64_t offset) { return static_cast<char*>(memory_[rank]->data()) + offset; }
  void settle() {
    for (int r = 0; r < 2; ++r) {
      runtime_->use_device(r);
      while (!nccl_.settled(comm_[r])) {
      }
    }
  }
  void gather(int rank, std::int64_t bytes) {
    runtime_->use_device(rank);
    nccl_.all_gather(comm_[rank], at(rank, 0), at(rank, 1024), bytes, stream_[rank]);
  }
  // One mistake has been found, which says so.
  void expect_mistake(const std::string& what) {
    const auto mistakes = nccl_.take_mistakes();
    ASSERT_EQ(mistakes.size(), 1u) << what;
    EXPECT_HAS(mistakes[0], what);
  }

  std::shared_ptr<FakeRuntime> runtime_ =
      std::make_shared<FakeRuntime>(FakeOptions{.devices = 2, .memory = 1 << 20, .granule = 4096});
  FakeNccl nccl_{runtime_};
  cuda::StreamHandle stream_[2] = {};
  std::unique_ptr<cuda::DeviceBuffer> memory_[2];
  comm::NcclComm comm_[2] = {};
};

TEST_F(FakeNcclTest, MovesBytes) {
  for (int r = 0; r < 2; ++r) gather(r, 100);
  settle();
  for (int r = 0; r < 2; ++r) {
    runtime_->use_device(r);
    nccl_.begin_group();
    nccl_.send(comm_[r], at(r, 0), 10, 1 - r, stream_[r]);
    nccl_.receive(comm_[r], at(r, 2048), 10, 1 - r, stream_[r]);
    nccl_.end_group();
  }
  settle();
  for (int r = 0; r < 2; ++r) {
    runtime_->use_device(r);
    runtime_->synchronize(stream_[r]);
    EXPECT_EQ(*at(r, 1024), 1);
    EXPECT_EQ(*at(r, 1024 + 199), 2);
    EXPECT_EQ(*at(r, 2048 + 9), 2 - r);
    nccl_.finalize(comm_[r]);
  }
  settle();
  for (int r = 0; r < 2; ++r) nccl_.destroy(std::exchange(comm_[r], nullptr));
}

TEST_F(FakeNcclTest, FindsCallsThatDiffer) {
  gather(0, 100), gather(1, 99);
  settle();
  runtime_->synchronize(stream_[0]), runtime_->synchronize(stream_[1]);
  expect_mistake("the calls of two ranks differ");
  EXPECT_THROW(nccl_.settled(comm_[0]), Error);
}

TEST_F(FakeNcclTest, FindsMessagesThatDiffer) {
  runtime_->use_device(0);
  nccl_.send(comm_[0], at(0, 0), 10, 1, stream_[0]);
  runtime_->use_device(1);
  nccl_.receive(comm_[1], at(1, 0), 11, 0, stream_[1]);
  settle();
  runtime_->synchronize(stream_[0]), runtime_->synchronize(stream_[1]);
  expect_mistake("rank 0 sends 10 bytes, and rank 1 receives 11");
}

TEST_F(FakeNcclTest, FindsACallBeforeTheLastHasSettled) {
  gather(0, 100);
  EXPECT_THROW(gather(0, 100), Error);
  expect_mistake("the call before has not settled");
}

TEST_F(FakeNcclTest, FindsAStreamOrMemoryOfAnotherDevice) {
  runtime_->use_device(0);
  nccl_.all_gather(comm_[0], at(0, 0), at(0, 1024), 10, stream_[1]);
  EXPECT_THROW(settle(), Error);
  EXPECT_HAS(runtime_->take_mistakes().at(0), "the stream is another device's");
  runtime_->use_device(1);
  nccl_.all_gather(comm_[1], at(1, 0), at(0, 1024), 10, stream_[1]);
  EXPECT_THROW(while (!nccl_.settled(comm_[1])){}, Error);
  EXPECT_HAS(runtime_->take_mistakes().at(0), "another device's memory");
  EXPECT_THROW(nccl_.all_gather(comm_[0], at(0, 0), at(0, 1024), 10, stream_[0]), Error);
  expect_mistake("the thread's device is 1, the communicator's 0");
}

TEST_F(FakeNcclTest, FindsGroupsThatDoNotMatch) {
  EXPECT_THROW(nccl_.end_group(), Error);
  expect_mistake("a group ends that did not begin");
  nccl_.begin_group();
  EXPECT_THROW(nccl_.begin_group(), Error);
  expect_mistake("a group inside a group");
  nccl_.end_group();
}

TEST_F(FakeNcclTest, FindsACommunicatorThatDidNotEnd) {
  EXPECT_THROW(nccl_.destroy(comm_[0]), Error);
  expect_mistake("the communicator has not ended");
}

}  // namespace
}  // namespace zg::test
