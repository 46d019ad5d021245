// Ranks in several processes, as a launcher starts them (engine.mpi_* in ctest), give the bits of as many
// threads of one process.
#include "comm/worlds.hpp"
#include "engine/ranks_run.hpp"

namespace zg::test {
namespace {

TEST(RanksOverProcesses, HaveTheBitsOfThreads) {
  if (!is_under_mpi()) GTEST_SKIP() << "no launcher has started this process";
  const auto& ranks = mpi_ranks();
  const int world = ranks.front()->size();
  TinySetup s;
  s.layout.micro_batches = 3 * world;
  s.layout.drives = 1;
  s.nvme = Nvme::kRam;
  s.room = Room::kSmallest;
  std::vector<RanksWay> ways{{world, 1, false}, {world, world, false}, {world, world, true}};
  if (world % 2 == 0) ways.push_back({world, 2, false});
  // A stage on each rank, whose neighbours are in other processes, and two of several ranks.
  s.model.layers = std::max(world, 4);
  ways.push_back(in_stages(1, 1, false, world));
  if (world % 2 == 0)
    ways.push_back(in_stages(world / 2, world / 2, false, 2, {PipelineSchedule::kDepthFirst, 2}));
  for (const RanksWay& way : ways) {
    SCOPED_TRACE(testing::Message() << way.shards << " shards, " << way.stages << " stages");
    const RanksOutcome here = train_on(ranks, s, way, 3), threads = train_on_ranks(s, way, 3);
    EXPECT_TRUE(same_bits(here.losses, threads.losses)) << testing::PrintToString(here.losses);
    EXPECT_TRUE(same_bits(here.norms, threads.norms)) << testing::PrintToString(here.norms);
    EXPECT_TRUE(same_bits(here.evals, threads.evals)) << testing::PrintToString(here.evals);
    if (way.shards > 1 || way.stages > 1) continue;  // else a process has not all weights
    for (const auto& [name, bytes] : threads.weights) EXPECT_TRUE(here.weights.at(name) == bytes) << name;
  }
}

// Two of each axis: tensor and context groups are of one process, and each stage is another process.
TEST(GridOverProcesses, HasTheBitsOfThreads) {
  if (!is_under_mpi()) GTEST_SKIP() << "no launcher has started this process";
  const auto& ranks = mpi_ranks();
  ASSERT_EQ(ranks.front()->size(), 8);
  for (const bool llama : {false, true}) {
    TinySetup s;
    s.model = llama ? tiny_llama() : tiny_gpt2();
    s.model.layers = s.model.kv_heads = 4;
    s.layout.micro_batch = {1, 16};
    s.layout.micro_batches = 4;
    s.layout.drives = 1;
    s.room = Room::kSmallest;
    for (const int shards : {1, 2}) {
      RanksWay way{2, shards, false, 2, llama};
      way.context = 2, way.method = shards == 1 ? ContextMethod::kRing : ContextMethod::kUlysses;
      way.stages = 2, way.pipeline = {PipelineSchedule::kBreadthFirst, 2};
      SCOPED_TRACE(testing::Message() << "llama " << llama << ", " << shards << " shards");
      const RanksOutcome here = train_on(ranks, s, way, 3), threads = train_on_ranks(s, way, 3);
      EXPECT_TRUE(same_bits(here.losses, threads.losses)) << testing::PrintToString(here.losses);
      EXPECT_TRUE(same_bits(here.norms, threads.norms)) << testing::PrintToString(here.norms);
      EXPECT_TRUE(same_bits(here.evals, threads.evals)) << testing::PrintToString(here.evals);
      EXPECT_LT(here.weights.size(), threads.weights.size()) << "those of a stage";
      for (const auto& [name, bytes] : here.weights)
        EXPECT_TRUE(same_bits(bytes, threads.weights.at(name))) << name;
    }
  }
}

}  // namespace
}  // namespace zg::test
