// The "threads" section.
#include "config/config_fixture.hpp"

namespace zg {
namespace {

class ConfigThreads : public ConfigTest {};

TEST_F(ConfigThreads, AreReadAsTheyStand) {
  const RunConfig none = load_set({});
  EXPECT_EQ(none.threads.compute, std::nullopt);
  EXPECT_EQ(none.threads.reserved, std::nullopt);
  EXPECT_EQ(none.threads.bind, Binding::kAuto);
  const RunConfig autos =
      load_over(R"({"threads": {"compute": "auto", "reserved": "auto", "bind": "auto"}})");
  EXPECT_EQ(autos.threads.compute, std::nullopt);
  EXPECT_EQ(autos.threads.reserved, std::nullopt);
  EXPECT_EQ(autos.threads.bind, Binding::kAuto);
  EXPECT_TRUE(autos.warnings.empty());
  const RunConfig all = load_over(R"({"threads": {"compute": 12, "reserved": 0, "bind": false}})");
  EXPECT_EQ(all.threads.compute, 12);
  EXPECT_EQ(all.threads.reserved, 0);
  EXPECT_EQ(all.threads.bind, Binding::kOff);
  EXPECT_EQ(load_set({"threads.bind=true"}).threads.bind, Binding::kOn);
  EXPECT_EQ(load_set({"threads.compute=3"}).threads.compute, 3);
}

TEST_F(ConfigThreads, MistakesAreNamed) {
  struct Case {
    const char* overlay;
    const char* key;
    const char* part;  // of message or hint
  };
  const Case cases[] = {
      {R"({"threads": {"compute": 0}})", "threads.compute", "found 0, expected a whole number, 1 to"},
      {R"({"threads": {"compute": 1.5}})", "threads.compute", "a whole number"},
      {R"({"threads": {"compute": "all"}})", "threads.compute",
       "found text \"all\", expected \"auto\", or a whole"},
      {R"({"threads": {"compute": true}})", "threads.compute", "\"auto\", or a whole number"},
      {R"({"threads": {"reserved": -1}})", "threads.reserved", "0 to"},
      {R"({"threads": {"reserved": 100000}})", "threads.reserved", "0 to"},
      {R"({"threads": {"bind": 1}})", "threads.bind", "true, false or \"auto\""},
      {R"({"threads": {"bind": "always"}})", "threads.bind", "true, false or \"auto\""},
      {R"({"threads": {"computes": 2}})", "threads.computes", "did you mean compute?"},
      {R"({"threads": 4})", "threads", "\"threads\": {\"compute\": 4}"},
      {R"({"threads": "auto"})", "threads", "an object"},
      {R"({"num_threads": 4})", "num_threads", "did you mean threads.compute?"},
      {R"({"reserved": 1})", "reserved", "did you mean threads.reserved?"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.overlay);
    const Error error = usage_error([&] { return load_over(c.overlay); });
    EXPECT_EQ(error.where(), directory_ + "/over.json: " + c.key);
    EXPECT_HAS(error.what(), c.part);
  }
}

}  // namespace
}  // namespace zg
