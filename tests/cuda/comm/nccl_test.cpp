// Ranks on GPUs beyond what every back end must do: NCCL's failures, memory, and when it may be called.
#include "comm/nccl_ranks.hpp"

#include <dlfcn.h>

#include "support/errors.hpp"
#include "tests/cuda/comm/worlds_emulated.hpp"
#include "ziggurat/comm/gpu.hpp"

namespace zg::test {
namespace {

// What synchronize() throws on each rank's stream after body(rank, stream, place); empty: nothing.
std::vector<std::string> texts_of(EmulatedWorld& made,
                                  const std::function<void(CommRank&, Stream&, const Place&)>& body) {
  std::vector<std::string> texts(made.world.ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    threads.emplace_back([&, i] {
      const Place place(made.world.devices[i].get());
      const auto stream = place.stream("comm");
      try {
        body(*made.world.ranks[i], *stream, place);
        stream->synchronize();
      } catch (const Error& e) {
        texts[i] = e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

void reduce_twice(CommRank& rank, Stream& stream, const Place& place) {
  const auto comm = rank.group(all_of(rank), "world");
  Operand<float> data(place, 100000);
  comm->all_reduce(stream, data.data(), 100000, DType::kF32, Reduction::kSum);
  comm->all_reduce(stream, data.data(), 100000, DType::kF32, Reduction::kSum);
  stream.synchronize();
}

TEST(NcclRanks, StagingIsABoundedPartOfTheArena) {
  EmulatedWorld made = make_emulated_world(3, {.staging_bytes = 64 << 10});
  constexpr std::int64_t kConnecting = 2 * 3 * 256;
  for (const auto& device : made.world.devices)
    EXPECT_EQ(device->arena().in_use(), (64 << 10) + device->arena().charge(kConnecting));
  const auto texts = texts_of(made, [](CommRank& rank, Stream& stream, const Place& place) {
    Arena& arena = place.device()->arena();
    const auto comm = rank.group(all_of(rank), "world");
    Operand<float> in(place, 300000), out(place, 100000);
    const std::int64_t before = arena.in_use();
    comm->all_gather(stream, out.data(), in.data(), 100000, DType::kF32);
    stream.synchronize();
    comm->reduce_scatter(stream, in.data(), out.data(), 100000, DType::kF32, Reduction::kSum);
    stream.synchronize();
    EXPECT_EQ(arena.in_use(), before);
  });
  EXPECT_EQ(texts, std::vector<std::string>(3));
  // 400,000 bytes in chunks of 32 KiB, and the connections.
  EXPECT_EQ(made.nccl->calls("send"), 3 * 2 * (13 + 1));
  made.world.ranks.clear();
  for (const auto& device : made.world.devices) EXPECT_EQ(device->arena().in_use(), 0);
}

TEST(NcclRanks, NoRoomForStagingIsAnErrorBeforeAnyCall) {
  const Error error =
      error_of([] { (void)make_emulated_world(2, {.budget = 1 << 20, .staging_bytes = 2 << 20}); });
  EXPECT_EQ(error.code(), Errc::kMemory);
  EXPECT_HAS(error.message(), "no room for the 2.0 MiB in which ranks exchange");
  EXPECT_HAS(error.hint(), "raise tiers.device");
}

// The first communicator that reduces has what was set aside, a second one takes as much of what is left.
TEST(NcclRanks, ASecondCommunicatorThatReducesNeedsRoomOfItsOwn) {
  EmulatedWorld made = make_emulated_world(2, {.budget = 3 << 20, .staging_bytes = 2 << 20});
  const auto reduce_in_two = [](CommRank& rank, Stream& stream, const Place& place) {
    const auto first = rank.group(all_of(rank), "first"), second = rank.group(all_of(rank), "second");
    Operand<float> data(place, 1000);
    for (const auto& comm : {first.get(), second.get()}) {
      comm->all_reduce(stream, data.data(), 1000, DType::kF32, Reduction::kSum);
      stream.synchronize();
    }
  };
  for (const std::string& text : texts_of(made, reduce_in_two))
    EXPECT_HAS(text, "group second: the device's budget has no 2.0 MiB for communication");
}

TEST(NcclRanks, WhatNcclNeverDoesIsAborted) {
  EmulatedWorld made = make_emulated_world(2, {.timeout_seconds = 1});
  made.nccl->hang(true);
  for (const std::string& text : texts_of(made, reduce_twice)) {
    EXPECT_HAS(text,
               "all members have joined all-reduce of 100000 f32 (sum), but NCCL has not done it in 1 s");
    EXPECT_HAS(text, "NCCL_DEBUG=INFO");
  }
  EXPECT_EQ(made.nccl->calls("abort"), 2);
}

TEST(NcclRanks, AnAsynchronousErrorEndsTheCallsOfAll) {
  EmulatedWorld made = make_emulated_world(3, {});
  const auto texts = texts_of(made, [&](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "world");
    Operand<float> data(place, 100);
    comm->broadcast(stream, data.data(), 100, DType::kF32, 0);
    comm->barrier(stream);
    stream.synchronize();
    made.nccl->hang(true);
    comm->barrier(stream);
    for (int i = 0; i < 2; ++i)
      comm->broadcast(stream, data.data(), 100, DType::kF32, 0);  // one behind the other
    if (rank.rank() == 1) made.nccl->break_all("a link is lost");
    stream.synchronize();
  });
  for (const std::string& text : texts) EXPECT_HAS(text, "a link is lost");
  EXPECT_EQ(made.nccl->calls("abort"), 3);
}

TEST(NcclRanks, ACallThatNcclRefusesOnOneRankEndsAll) {
  for (const char* const name : {"send", "all_gather", "end_group", "init"}) {
    SCOPED_TRACE(name);
    EmulatedWorld made = make_emulated_world(2, {});
    made.nccl->fail(name, 2);
    for (const std::string& text : texts_of(made, reduce_twice))
      EXPECT_HAS(text, "a fault that the test asked for");
  }
}

// Three members in as many processes begin by a send to the next one, of several blocks.
TEST(NcclProcesses, MessagesGoRoundARing) {
  constexpr std::int64_t kCount = (std::int64_t{9} << 20) / 4;
  EmulatedWorld made = make_emulated_world(3, {.processes = {1, 1, 1}});
  const auto texts = texts_of(made, [](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "world");
    const auto value = [](int of, std::int64_t i) { return static_cast<float>(of * kCount + i % 8191); };
    std::vector<float> mine, expected;
    for (std::int64_t i = 0; i < kCount; ++i) {
      mine.push_back(value(rank.rank(), i));
      expected.push_back(value((rank.rank() + 2) % 3, i));
    }
    Operand<float> sent(place, std::move(mine)), received(place, kCount);
    comm->send(stream, sent.data(), kCount, DType::kF32, (rank.rank() + 1) % 3);
    const auto back = place.stream("back");
    comm->receive(*back, received.data(), kCount, DType::kF32, (rank.rank() + 2) % 3);
    back->synchronize();
    stream.synchronize();
    EXPECT_EQ(received.read(), expected);
    EXPECT_EQ(comm->traffic(), (CommTraffic{4 * kCount, 4 * kCount, 2}));
  });
  EXPECT_EQ(texts, std::vector<std::string>(3));
  EXPECT_EQ(made.nccl->calls("init"), 0);
}

TEST(NcclProcesses, CallsThatDifferAreNamed) {
  EmulatedWorld made = make_emulated_world(3, {.processes = {2, 1}});
  const auto texts = texts_of(made, [](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "world");
    Operand<float> data(place, 100);
    comm->broadcast(stream, data.data(), rank.rank() == 2 ? 99 : 100, DType::kF32, 0);
  });
  for (const std::string& text : texts) {
    EXPECT_HAS(text, "group world: rank ");
    EXPECT_HAS(text, "broadcast of 99 f32 from member 0");
  }
}

// A rank of another process fails while NCCL works: nobody waits for what will never end.
TEST(NcclProcesses, AFailureElsewhereEndsWhatNcclDoes) {
  EmulatedWorld made = make_emulated_world(2, {.timeout_seconds = 20, .processes = {1, 1}});
  const auto texts = texts_of(made, [&](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "world");
    Operand<float> data(place, 100);
    comm->broadcast(stream, data.data(), 100, DType::kF32, 0);
    comm->barrier(stream);
    stream.synchronize();
    const std::int64_t before = made.nccl->calls("broadcast");
    comm->barrier(stream);
    stream.synchronize();
    made.nccl->hang(true);
    comm->broadcast(stream, data.data(), 100, DType::kF32, 0);
    if (rank.rank() == 1) {
      while (made.nccl->calls("broadcast") < before + 2) std::this_thread::yield();
      rank.fail(Error(Errc::kIo, "drive 3", "is gone"));
    }
    stream.synchronize();
  });
  for (const std::string& text : texts) EXPECT_HAS(text, "rank 1: drive 3: is gone");
}

TEST(NcclProcesses, MoreGpusThanASumTakesAreRefused) {
  EmulatedWorld made = make_emulated_world(1, {});
  Device* const device = made.world.devices[0].get();
  made.world.ranks.clear();
  const Error error = error_of([&] {
    (void)comm::make_nccl_ranks({&device, 1}, made.nccl, {}, {1, 64}, nullptr);
  });
  EXPECT_EQ(error.code(), Errc::kUsage);
  EXPECT_HAS(error.what(), "devices: name 65 GPUs in all processes, and at most 64 can be");
}

TEST(NcclRanks, NumbersOfTheHostGoOverSharedMemory) {
  EmulatedWorld made = make_emulated_world(2, {});
  texts_of(made, [&](CommRank& rank, Stream&, const Place&) {
    const auto comm = rank.group(all_of(rank), "numbers");
    HostStream stream("numbers", HostStream::Mode::kInline);
    const double mine = rank.rank() + 1;
    double all[2] = {};
    comm->all_gather(stream, &mine, all, 1, DType::kF64);
    EXPECT_EQ(all[0] + 10 * all[1], 21);
    EXPECT_EQ(comm->traffic(), (CommTraffic{8, 8, 1}));
  });
  EXPECT_EQ(made.nccl->calls("init"), 0);
}

// NCCL loads kernels and takes memory when it connects. (The fake finds it if a stream waits for the host
// then.)
TEST(NcclRanks, ConnectsWhileNoStreamWaitsForTheHost) {
  EmulatedWorld made = make_emulated_world(2, {});
  const auto texts = texts_of(made, [&](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "world");
    const auto other = place.stream("other");
    Operand<float> data(place, 100);
    const Event event = Event::pending();
    other->wait(event);
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      event.set();
    });
    comm->broadcast(stream, data.data(), 100, DType::kF32, 0);
    later.join();
    other->synchronize();
    stream.synchronize();
  });
  EXPECT_EQ(texts, std::vector<std::string>(2));
  EXPECT_EQ(made.runtime->take_mistakes(), std::vector<std::string>());
}

TEST(NcclLibrary, WhatIsMissingIsNamed) {
  std::string why;
  EXPECT_EQ(comm::load_nccl(&why, "libzg_no_such_nccl.so.2"), nullptr);
  EXPECT_HAS(why, "NCCL is not installed: libzg_no_such_nccl.so.2");
  EXPECT_EQ(comm::load_nccl(&why, "libm.so.6"), nullptr);
  EXPECT_HAS(why, "libm.so.6 has no function ncclGetVersion");
}

TEST(NcclLibrary, TellsItsVersion) {
  void* const there = dlopen(comm::kNcclLibrary, RTLD_LAZY | RTLD_LOCAL);
  if (there == nullptr) GTEST_SKIP() << "NCCL is not installed: " << dlerror();
  std::string why;
  const auto nccl = comm::load_nccl(&why);
  ASSERT_NE(nccl, nullptr) << why;
  EXPECT_HAS(nccl->describe(), "NCCL 2.");
  EXPECT_EQ(describe_nccl(), nccl->describe());
}

}  // namespace
}  // namespace zg::test
