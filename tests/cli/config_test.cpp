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
  EXPECT_EQ(
      lines[2],
      "| `eval.every` | whole number, 0 or more | `0` | Steps between evaluations; 0: at the end only. |");
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
    EXPECT_NE(("\n" + text).find(std::string("\n") + name + "\n"), std::string::npos) << name;
  }
  EXPECT_NE(text.find("  aio.queues: whole number, 1 to 64; default: 1\n      Rings"), std::string::npos)
      << text;
  EXPECT_EQ(text.find('`'), std::string::npos);
}

TEST_F(ConfigKeys, MistakesAreNamed) {
  const Outcome section = run({"config", "keys", "--section", "tier"});
  EXPECT_EQ(section.code, 2);
  EXPECT_NE(section.err.find("--section: found \"tier\""), std::string::npos) << section.err;
  EXPECT_NE(section.err.find("did you mean tiers?"), std::string::npos) << section.err;
  const Outcome format = run({"config", "keys", "--format", "html"});
  EXPECT_EQ(format.code, 2);
  EXPECT_NE(format.err.find("--format"), std::string::npos) << format.err;
  EXPECT_EQ(run({"config"}).code, 2);
}

}  // namespace
}  // namespace zg::cli_test
