// `ziggurat config keys`.
#include <set>

#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

class ConfigKeys : public CliTest {
 protected:
  // What the program prints, which must succeed.
  std::string keys(const Strings& flags) const {
    const Outcome o = run(Strings{"config", "keys"} + flags);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.err, "");
    return o.out;
  }
};

TEST_F(ConfigKeys, SectionsOfTheSameColumnsAreOneTable) {
  const Strings lines =
      lines_of(keys({"--format", "markdown", "--section", "eval", "--section", "tiers.nvme"}));
  ASSERT_EQ(lines.size(), 8u);
  EXPECT_EQ(lines[0], "| key | type | default | meaning |");
  EXPECT_EQ(lines[1], "| --- | --- | --- | --- |");
  EXPECT_EQ(lines[2],
            "| `eval.every` | whole number, 0 to 1000000000 | `0` | Steps between evaluations; 0: at the end "
            "only. |");
  EXPECT_EQ(lines[4].rfind("| `tiers.nvme[].path` | text | required | ", 0), 0u) << lines[4];
}

TEST_F(ConfigKeys, WithoutSectionsAllOfThemArePrinted) {
  const std::string text = keys({}), tables = keys({"--format", "markdown"});
  std::set<std::string> names;
  for (const std::string& line : lines_of(tables)) {
    if (line.rfind("### ", 0) == 0) names.insert(line.substr(4));
  }
  for (const char* name : {"run", "batch", "aio", "tiers.ram", "optimizer.params", "model.llama",
                           "deepspeed-no-effect", "deepspeed-refused"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
    EXPECT_HAS("\n" + text, std::string("\n") + name + "\n") << name;
  }
  EXPECT_HAS(text, "  aio.queues: whole number, 1 to 64; default: 1\n      Queues of a drive");
  EXPECT_EQ(text.find('`'), std::string::npos);
}

TEST_F(ConfigKeys, MistakesAreNamed) {
  const Outcome section = run({"config", "keys", "--section", "tier"});
  EXPECT_EQ(section.code, 2);
  EXPECT_HAS(section.err, "--section: found \"tier\"");
  EXPECT_HAS(section.err, "did you mean tiers?");
  const Outcome format = run({"config", "keys", "--format", "html"});
  EXPECT_EQ(format.code, 2);
  EXPECT_HAS(format.err, "--format");
  EXPECT_EQ(run({"config"}).code, 2);
}

}  // namespace
}  // namespace zg::cli_test
