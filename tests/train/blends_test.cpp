// Runs on several sources and on packed documents: on any ranks and in any place as on one rank, and resumed
// to the bit.
#include "train/checkpoint_fixture.hpp"

namespace zg {
namespace {

class Blends : public CheckpointFixture {
 protected:
  Blends() {
    std::string lines, more;
    for (int i = 0; i < 60; ++i) {
      const std::string text(static_cast<std::size_t>(i * 7 % 41), static_cast<char>('a' + i % 26));
      lines += fmt::format("{{\"text\": \"{} and so on\"}}\n", text);
      more += i % 3 == 0
                  ? std::string("{\"input_ids\": [70, 71, 72, 73, 74], \"loss_mask\": [0, 0, 1, 1, 1]}\n")
                  : fmt::format("{{\"text\": \"{}\"}}\n", text.substr(0, text.size() / 2));
    }
    write("a.jsonl", lines), write("b.jsonl", more);
  }
  Strings blend(const std::string& packing) const {
    return {
        "data.train=null", "data.packing=" + packing,
        fmt::format(R"(data.blend=[{{"path": "{0}/a.jsonl", "weight": 3}}, {{"path": ["{0}/b*.jsonl"]}}])",
                    directory_)};
  }
};

TEST_F(Blends, GoOnToTheBit) {
  for (const char* packing : {"none", "documents"}) {
    SCOPED_TRACE(packing);
    const Strings settings = blend(packing);
    const std::string whole_name = std::string("whole_") + packing,
                      part_name = std::string("part_") + packing;
    const Outcome whole = run(whole_name, settings + Strings{"steps=6"});
    const Outcome three = run(part_name, settings);
    EXPECT_EQ(three.losses, std::vector<double>(whole.losses.begin(), whole.losses.begin() + 3));
    const std::string kept = directory_ + "/kept_" + packing;
    std::filesystem::copy(three.newest, kept, std::filesystem::copy_options::recursive);
    expect_tail(whole, run(part_name, settings + Strings{"steps=6"}, ""));
    // In other places, and on two ranks that have a part of the batch each.
    const std::string disk = directory_ + "/disk_" + packing;
    std::filesystem::create_directories(disk);
    expect_tail(whole, run("elsewhere_" + std::string(packing),
                           settings + Strings{"steps=6", "tiers.device=600KiB", "tiers.host=300KiB",
                                              "tiers.nvme.0.path=" + disk, "aio.backend=threads"},
                           kept));
  }
}

// The same, and in every place, where each sequence comes once an epoch; that is not gone on with otherwise.
TEST_F(Blends, EpochsGoOnToTheBit) {
  const Strings settings =
      blend("documents") +
      Strings{"data.blend=null", "data.train=" + directory_ + "/a.jsonl", "data.order=epochs"};
  const Outcome whole = run("whole", settings + Strings{"steps=6"});
  const Outcome three = run("part", settings);
  EXPECT_EQ(three.losses, std::vector<double>(whole.losses.begin(), whole.losses.begin() + 3));
  expect_tail(whole, run("elsewhere", settings + Strings{"steps=6"}, three.newest));
  const auto error = test::error_of([&] {
    run("random", settings + Strings{"steps=6", "data.order=random", R"(checkpoint.allow=["data.train"])"},
        three.newest);
  });
  EXPECT_HAS(error.what(), "data.order");
}

// As one rank but for the order of sums, which takes a few roundings of fp32 in each of three steps.
TEST_F(Blends, RanksPackWhatOneRankPacks) {
  const Strings settings =
      blend("documents") + Strings{"eval.every=2", "model.n_head=4", "fp64.enabled=true"};
  const Outcome one = run("one", settings);
  int i = 0;
  for (const Strings& ranks :
       {Strings{"devices=host:2"}, Strings{"devices=host:2", "zero_optimization.stage=3"},
        Strings{"devices=host:2", "parallel.tensor=2"},
        Strings{"devices=host:2", "parallel.tensor=2", "parallel.sequence=true"},
        Strings{"devices=host:2", "parallel.context=2"},
        Strings{"devices=host:2", "parallel.context=2", "parallel.context_method=ulysses"},
        Strings{"devices=host:2", "parallel.pipeline=2", "model.n_layer=2"}}) {
    SCOPED_TRACE(testing::PrintToString(ranks));
    const bool deeper = ranks.back() == "model.n_layer=2";
    const Outcome expected = deeper ? run("deeper", settings + Strings{"model.n_layer=2"}) : one;
    const bool data_parallel = ranks.size() == 1 || ranks.back() == "zero_optimization.stage=3";
    const Strings batch{data_parallel ? "train_micro_batch_size_per_gpu=1"
                                      : "train_micro_batch_size_per_gpu=2"};
    const Outcome found = run(fmt::format("ranks{}", i++), settings + ranks + batch);
    ASSERT_EQ(found.losses.size(), expected.losses.size());
    for (std::size_t s = 0; s < found.losses.size(); ++s) {
      EXPECT_NEAR(found.losses[s], expected.losses[s], 1e-10 * expected.losses[s]);
      EXPECT_NEAR(found.norms[s], expected.norms[s], 1e-9 * expected.norms[s]);
    }
  }
}

// What sources and packing change is refused where a run goes on.
TEST_F(Blends, OtherSourcesAreRefused) {
  const Outcome first = run("first", blend("documents"));
  const auto error = [&](const Strings& settings) {
    const Strings allowed{"steps=6",
                          R"(checkpoint.allow=["data.train"])"};  // what a sample of the tokens shows
    return test::error_of([&] { run("second", settings + allowed, first.newest); });
  };
  EXPECT_HAS(error(blend("none")).what(), "data.packing");
  Strings other = blend("documents");
  other.back() =
      fmt::format(R"(data.blend=[{{"path": "{0}/a.jsonl"}}, {{"path": "{0}/b.jsonl"}}])", directory_);
  EXPECT_HAS(error(other).what(), "data.blend");
}

}  // namespace
}  // namespace zg
