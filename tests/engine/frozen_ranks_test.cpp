// What is not trained, on several ranks; those of one process are host devices here.
#include "engine/frozen_setup.hpp"
#include "engine/ranks_run.hpp"

namespace zg::test {
namespace {

// On ranks that have shards, with weights that are kept between the passes and that are not, and gathered
// ahead.
TEST(FrozenRanks, WholeUnits) {
  for (const std::size_t trained : {std::size_t{2}, std::size_t{4}}) {
    TinySetup s = tiny(tiny_gpt2(), {"f32", DType::kF32, {}});
    s.clip = 0.5;
    s.layout.micro_batches = 4;
    s.layout.groups = freeze(s, [&](std::size_t u, std::size_t) { return u != trained; });
    const RanksOutcome plain = train_on_ranks(s, {2, 1}, 3);
    s.layout.drives = 1;
    s.room = Room::kSmallest;
    for (const bool keep : {true, false}) {
      for (const std::int32_t ahead : {0, 1}) {
        s.gather_ahead = ahead;
        expect_same(plain, train_on_ranks(s, {2, 2, keep}, 3));
      }
    }
  }
}

}  // namespace
}  // namespace zg::test
