// Ranks that fail, hang, or call what the others do not: everyone learns it, and whose fault it is.
#include <atomic>

#include "comm/worlds.hpp"
#include "support/errors.hpp"

namespace zg::test {
namespace {

// What each rank's stream throws; empty: nothing.
std::vector<std::string> failures(int size, double timeout,
                                  const std::function<void(CommRank&, Stream&, const Place&)>& body) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  const auto one = [&](CommRank& rank, const Place& place) {
    try {
      const auto stream = place.stream("comm");
      body(rank, *stream, place);
      stream->synchronize();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::kComm);
      texts[static_cast<std::size_t>(rank.rank())] = e.what();
    }
  };
  in_world(size, one, {.timeout_seconds = timeout});
  return texts;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(CommFailure, ARankThatFailsEndsTheCallsOfAllOthers) {
  const auto texts = failures(4, 60, [](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "world");
    Operand<float> data(place, 100);
    if (rank.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return rank.fail(Error(Errc::kIo, "nvme tier, drive 1", "I/O error", "the drive fails"));
    }
    comm->all_reduce(stream, data.data(), 100, DType::kF32, Reduction::kSum);
    comm->barrier(stream);
    stream.synchronize();
  });
  for (const int r : {0, 1, 3}) {
    EXPECT_TRUE(contains(texts[static_cast<std::size_t>(r)], "rank 2: nvme tier, drive 1: I/O error"))
        << texts[static_cast<std::size_t>(r)];
  }
  EXPECT_EQ(texts[2], "");
}

TEST(CommFailure, ARankThatHangsIsNamed) {
  std::atomic<int> ended{0};
  const auto texts = failures(3, 1, [&](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "data");
    Operand<float> data(place, 100);
    comm->broadcast(stream, data.data(), 100, DType::kF32, 0);
    stream.synchronize();
    if (rank.rank() == 1) {  // until all others have given up
      while (ended.load() < 2) std::this_thread::yield();
      return;
    }
    comm->all_gather(stream, data.data(), data.data() + 33 * rank.rank(), 0, DType::kF32);
    try {
      stream.synchronize();
    } catch (...) {
      ++ended;
      throw;
    }
  });
  for (const int r : {0, 2}) {
    const std::string& text = texts[static_cast<std::size_t>(r)];
    EXPECT_TRUE(contains(text, "rank 1")) << text;
    EXPECT_TRUE(contains(text, "all-gather of 0 f32")) << text;
    EXPECT_TRUE(contains(text, "made its call 1 last, broadcast of 100 f32")) << text;
    EXPECT_TRUE(contains(text, "raise parallel.timeout_seconds of the configuration")) << text;
    EXPECT_TRUE(contains(text, "in a program: CommOptions::timeout_seconds")) << text;
  }
}

TEST(CommFailure, CallsThatDifferAreRefusedByAll) {
  const auto texts = failures(2, 60, [](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "world");
    Operand<float> data(place, 100);
    comm->all_reduce(stream, data.data(), rank.rank() == 0 ? 100 : 99, DType::kF32, Reduction::kSum);
    stream.synchronize();
  });
  for (const std::string& text : texts) {
    EXPECT_TRUE(contains(text, "all-reduce of 100 f32 (sum)")) << text;
    EXPECT_TRUE(contains(text, "all-reduce of 99 f32 (sum)")) << text;
  }
}

TEST(CommFailure, AReceiveOfAnotherSizeIsRefused) {
  const auto texts = failures(2, 60, [](CommRank& rank, Stream& stream, const Place& place) {
    const auto comm = rank.group(all_of(rank), "pipeline");
    Operand<float> data(place, 100);
    if (rank.rank() == 0) comm->send(stream, data.data(), 100, DType::kF32, 1);
    if (rank.rank() == 1) comm->receive(stream, data.data(), 50, DType::kF32, 0);
    stream.synchronize();
  });
  for (const std::string& text : texts)
    EXPECT_TRUE(contains(text, "rank 1 expects 50 f32 of rank 0, which sends 100 f32")) << text;
}

// A failure is not forgotten: later calls fail at once.
TEST(CommFailure, NothingGoesOnAfterAFailure) {
  World world = make_world(2, {.timeout_seconds = 60});
  world.ranks[1]->fail(Error(Errc::kMemory, "host tier", "no room"));
  const auto stream = Place(world.devices.empty() ? nullptr : world.devices[0].get()).stream("comm");
  const auto comm = world.ranks[0]->group(all_of(*world.ranks[0]), "world");
  comm->barrier(*stream);
  EXPECT_THROW(stream->synchronize(), Error);
}

}  // namespace
}  // namespace zg::test
