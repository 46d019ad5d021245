// libaio's queue over a kernel that takes only some of what it is given, or none.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "io/aio_queue.hpp"
#include "support.hpp"

namespace zg::io::test {
namespace {

constexpr int kDepth = 8;

class AioTest : public testing::Test {
 protected:
  AioTest() {
    const std::string name = directory_.path() + "/file";
    fd_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    memory_.fill(0, memory_.bytes(), 3);
    EXPECT_EQ(write(fd_, memory_.data(), static_cast<std::size_t>(memory_.bytes())), memory_.bytes());
  }
  ~AioTest() override {
    queue_.reset();
    close(fd_);
  }
  // A queue whose io_submit is `submit`, which may call the kernel's.
  void open_queue(const std::function<int(io_context_t, long, iocb**)>& submit) {
    AioCalls calls;
    calls.submit = submit;
    try {
      queue_ = make_aio_queue(fd_, kDepth, calls);
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void begin_all() {
    for (std::uint32_t id = 0; id < kDepth; ++id) {
      queue_->begin(
          {.op = Op::kRead, .id = id, .offset = id * kPage, .data = back_.at(id * kPage), .bytes = kPage});
    }
  }
  // Until all are done: results by id.
  std::vector<std::int64_t> reap_all() {
    std::vector<std::int64_t> results(kDepth, 1);
    std::vector<BlockDone> done;
    for (int ended = 0; ended < kDepth;) {
      done.clear();
      queue_->reap(done, Queue::kForever);
      for (const BlockDone& block : done) {
        EXPECT_EQ(results.at(block.id), 1) << "done twice";
        results.at(block.id) = block.result;
        ++ended;
      }
    }
    return results;
  }

  TempDir directory_;
  const Memory memory_{kDepth * kPage}, back_{kDepth * kPage};
  int fd_ = -1;
  std::unique_ptr<Queue> queue_;
};

// It takes at most `most` at a time, and every third call none.
TEST_F(AioTest, WhatTheKernelDoesNotTakeFollowsInOrder) {
  for (const long most : {1L, 3L, 7L}) {
    std::vector<long long> offsets;
    int calls = 0;
    open_queue([&](io_context_t context, long count, iocb** requests) {
      if (++calls % 3 == 0) return -EAGAIN;
      const int n = io_submit(context, std::min(count, most), requests);
      for (int i = 0; i < n; ++i) offsets.push_back(requests[i]->u.c.offset);
      return n;
    });
    if (IsSkipped()) return;
    for (int round = 0; round < 5; ++round) {
      std::memset(back_.data(), 0, static_cast<std::size_t>(back_.bytes()));
      offsets.clear();
      begin_all();
      for (const std::int64_t result : reap_all()) EXPECT_EQ(result, kPage);
      EXPECT_EQ(offsets.size(), static_cast<std::size_t>(kDepth));
      EXPECT_TRUE(std::is_sorted(offsets.begin(), offsets.end()));
      EXPECT_EQ(std::memcmp(back_.data(), memory_.data(), static_cast<std::size_t>(back_.bytes())), 0);
    }
  }
}

// With nothing in flight no completion makes room, so only asking again helps: it must, and the wait must not
// be for ever.
TEST_F(AioTest, ABusyKernelIsAskedAgain) {
  int refusals = 3;
  open_queue([&](io_context_t context, long count, iocb** requests) {
    return refusals-- > 0 ? -EAGAIN : io_submit(context, count, requests);
  });
  if (IsSkipped()) return;
  begin_all();
  for (const std::int64_t result : reap_all()) EXPECT_EQ(result, kPage);
  EXPECT_LT(refusals, 0);
}

// What io_submit says of its first request is that one's result, and the others go on.
TEST_F(AioTest, ARequestThatIsRefusedFailsAlone) {
  open_queue([](io_context_t context, long count, iocb** requests) {
    const auto bad = [](const iocb* request) { return request->u.c.offset == 3 * kPage; };
    if (bad(requests[0])) return -EFAULT;
    return io_submit(context, std::find_if(requests, requests + count, bad) - requests, requests);
  });
  if (IsSkipped()) return;
  begin_all();
  const auto results = reap_all();
  for (std::size_t id = 0; id < kDepth; ++id) EXPECT_EQ(results[id], id == 3 ? -EFAULT : kPage) << id;
}

// A context that cannot be had: what is wrong, and what helps.
TEST_F(AioTest, SetUpErrorsHelp) {
  const auto expect = [&](int error, const char* what, const char* hint) {
    AioCalls calls;
    calls.setup = [error](int events, io_context_t*) {
      EXPECT_EQ(events, kDepth + 1);
      return -error;
    };
    const Error e = error_of([&] { make_aio_queue(fd_, kDepth, calls); });
    EXPECT_EQ(e.code(), Errc::kIo);
    EXPECT_EQ(e.where(), "libaio");
    EXPECT_HAS(e.message(), what);
    EXPECT_HAS(e.hint(), hint);
  };
  expect(EAGAIN, "9 more are asked for, and of fs.aio-max-nr = ", "sysctl -w fs.aio-max-nr");
  expect(ENOSYS, "this kernel is built without it", "CONFIG_AIO");
  expect(EPERM, "seccomp", "io_setup");
  expect(ENOMEM, "Cannot allocate memory", "threads");
}

}  // namespace
}  // namespace zg::io::test
