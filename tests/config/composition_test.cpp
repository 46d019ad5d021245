// The table of what can be combined: its choices are what their settings make, and each of its exclusions
// refuses, or warns.
#include "config/composition_cases.hpp"
#include "config/config_fixture.hpp"

namespace zg {
namespace {

class Composition : public ConfigTest {
 protected:
  using Fixed = std::vector<std::optional<std::size_t>>;
  static const std::vector<Axis>& axes() { return composition_axes(); }
  static std::size_t axis(const char* name) {
    std::size_t a = 0;
    while (a < axes().size() && std::strcmp(axes()[a].name, name) != 0) ++a;
    EXPECT_LT(a, axes().size()) << name;
    return a;
  }
  static std::size_t choice(std::size_t axis, const char* name) {
    const auto& all = axes()[axis].choices;
    std::size_t c = 0;
    while (c < all.size() && std::strcmp(all[c].name, name) != 0) ++c;
    EXPECT_LT(c, all.size()) << name;
    return c;
  }
  // A run with these choices, and of the others the first that go with them.
  static Picks with(const Fixed& fixed) {
    Picks picks(axes().size());
    const auto in_order = [](std::size_t a, const Picks&) {
      std::vector<std::size_t> all(axes()[a].choices.size());
      for (std::size_t c = 0; c < all.size(); ++c) all[c] = c;
      return all;
    };
    EXPECT_TRUE(complete(picks, fixed, in_order));
    return picks;
  }
  // With a batch for each of the ranks.
  static Strings with_batch(const Picks& picks) {
    Strings settings = settings_of(picks);
    settings.emplace_back("train_batch_size=16");
    return settings;
  }
  RunConfig load_picks(const Picks& picks) const { return load_set(with_batch(picks)); }
};

TEST_F(Composition, EveryChoiceIsWhatItsSettingsMake) {
  for (std::size_t a = 0; a < axes().size(); ++a) {
    for (std::size_t c = 0; c < axes()[a].choices.size(); ++c) {
      Fixed fixed(axes().size());
      fixed[a] = c;
      const Picks picks = with(fixed);
      SCOPED_TRACE(names_of(picks));
      const RunConfig run = load_picks(picks);
      for (std::size_t i = 0; i < picks.size(); ++i)
        EXPECT_TRUE(axes()[i].choices[picks[i]].holds(run)) << axes()[i].name;
      EXPECT_NO_THROW(check_composition(run));
      for (const Exclusion& e : exclusions()) EXPECT_EQ(misfit(e, run), "");
    }
  }
}

// A run that has both sides, and otherwise nothing that does not go together.
TEST_F(Composition, EveryExclusionRefusesOrWarns) {
  int pairs = 0;
  for (const Exclusion& e : exclusions()) {
    const std::size_t a = axis(e.first.axis), b = axis(e.second.axis);
    for (const char* first : e.first.choices) {
      for (const char* second : e.second.choices) {
        // A file that says so is refused before: the tier or the device of a section is missing.
        const bool in_files = std::string(e.second.axis) != "NVMe tier" &&
                              !(std::string(first) == "below 1" && std::string(second) == "anywhere");
        if (!in_files) continue;
        Fixed fixed(axes().size());
        fixed[a] = choice(a, first);
        fixed[b] = choice(b, second);
        const Picks picks = with(fixed);
        SCOPED_TRACE(names_of(picks));
        Strings settings = with_batch(picks);
        // A number that does not fit.
        const std::string of = e.first.axis;
        if (e.numbers != nullptr) {
          settings.push_back(of == "tensor parallelism"    ? "parallel.tensor=3"
                             : of == "context parallelism" ? "parallel.context=3"
                             : of == "expert parallelism"  ? "parallel.experts=3"
                             : of == "pipeline"            ? "parallel.pipeline=3"
                                                           : "zero_optimization.zero_hpz_partition_size=3");
        }
        ++pairs;
        if (e.drop == nullptr) {
          const Error error = usage_error([&] { return load_set(settings); });
          const bool placed = std::any_of(e.keys.begin(), e.keys.end(), [&](const char* key) {
            return error.where() == std::string("--set: ") + key;
          });
          EXPECT_TRUE(placed) << error.where();
          EXPECT_HAS(error.message(), fmt::format("{} {} cannot be combined with {} {}: {}", e.first.axis,
                                                  first, e.second.axis, second, e.reason));
          EXPECT_EQ(error.hint(), e.instead);
        } else {
          const RunConfig run = load_set(settings);
          EXPECT_TRUE(warns(run, fmt::format("has no effect: {}; {}", e.reason, e.instead)));
          EXPECT_EQ(misfit(e, run), "");
        }
      }
    }
  }
  EXPECT_GT(pairs, 25);
}

// Combinations that no file can bring about, but a run that a program made can.
TEST_F(Composition, RunsOfProgramsAreChecked) {
  RunConfig run = load_set({"zero_optimization.stage=3"});
  EXPECT_NO_THROW(check_composition(run));
  run.offload_param = OffloadTarget::kNvme;
  const Error drive = usage_error([&] { return check_composition(run), 0; });
  EXPECT_EQ(drive.where(), "zero_optimization.offload_param.device");
  EXPECT_HAS(drive.message(), "there is no drive to demote it to");
  run.offload_param = OffloadTarget::kDevice;
  run.offload_optimizer = OffloadTarget::kNvme;
  EXPECT_EQ(usage_error([&] { return check_composition(run), 0; }).where(),
            "zero_optimization.offload_optimizer.device");
  run.offload_optimizer = OffloadTarget::kAuto;
  run.host_update_share = 0.5;
  EXPECT_NO_THROW(check_composition(run));  // without effect
  EXPECT_TRUE(std::any_of(exclusions().begin(), exclusions().end(), [&](const Exclusion& e) {
    return misfit(e, run).find("the plan finds what is updated where") != std::string::npos;
  }));
}

// The key that the user gave is named, not another that says the same.
TEST_F(Composition, TheKeyThatIsGivenIsBlamed) {
  struct Case {
    const char* overlay;
    const char* key;
  };
  const Case cases[] = {
      {R"({"devices": "host:4", "zero_optimization": {"stage": 3, "mics_shard_size": 3}})",
       "zero_optimization.mics_shard_size"},
      {R"({"devices": "host", "aio": {"use_gds": true}})", "aio.use_gds"},
      {R"({"devices": "host", "cuda": {"gpudirect_storage": "on"}})", "cuda.gpudirect_storage"},
      {R"({"zero_optimization": {"cpu_offload": true}})", "zero_optimization.cpu_offload"},
      {R"({"zero_optimization": {"stage": 1, "cpu_offload_param": true}})",
       "zero_optimization.cpu_offload_param"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.overlay);
    EXPECT_EQ(usage_error([&] { return load_over(c.overlay); }).where(), directory_ + "/over.json: " + c.key);
  }
  const RunConfig one = load_over(R"({"zero_optimization": {"stage": 3, "mics_shard_size": 8}})");
  EXPECT_TRUE(warns(one, "over.json: zero_optimization.mics_shard_size: has no effect: one rank holds"));
  EXPECT_EQ(one.shard_group, 0);
}

TEST_F(Composition, TheTextHasTheWholeTable) {
  const std::string text = composition_text();
  for (const Axis& a : axes()) {
    EXPECT_HAS(text, std::string("\n") + a.name + "\n");
    for (const Axis::Choice& c : a.choices) {
      EXPECT_HAS(text, fmt::format("\n  {:<18} {}\n", c.name, c.meaning));
      for (const char* setting : c.settings) EXPECT_HAS(text, setting);
    }
  }
  const std::size_t refused = text.find("\nRefused"), without = text.find("\nWithout effect");
  for (const Exclusion& e : exclusions()) {
    const std::size_t at = text.find(e.reason, e.drop == nullptr ? refused : without);
    ASSERT_NE(at, std::string::npos) << e.reason;
    EXPECT_EQ(at < without, e.drop == nullptr) << e.reason;
    EXPECT_HAS(text.substr(at), e.instead);
  }
  EXPECT_HAS(text, "offload_param cpu or nvme, with ZeRO stage 0, 1 or 2\n");
}

}  // namespace
}  // namespace zg
