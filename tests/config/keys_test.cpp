// The tables of keys: what is read is described, what is described is read, and what they say holds.
#include "ziggurat/config/keys.hpp"

#include "config/config_fixture.hpp"
#include "config/reader.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/model/keys.hpp"

namespace zg {
namespace {

class ConfigKeys : public ConfigTest {
 protected:
  // Together they have every section, every optimizer, every schedule, and both ways to name a model.
  static std::vector<const char*> bases() {
    return {
        R"({"optimizer": {"type": "AdamW",
                              "param_groups": [{"params": "*", "lr_factor": 2, "weight_decay": 0}]},
                "scheduler": {"type": "WarmupDecayLR"}, "tiers": {"nvme": [{"path": "a"}]},
                "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                                      "offload_optimizer": {"device": "cpu"}}})",
        R"({"optimizer": {"type": "SGD"}, "scheduler": {"type": "OneCycle",
                "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}, "fp16": {"enabled": true}})",
        R"({"optimizer": {"type": "Lion"}, "scheduler": {"type": "WarmupCosineLR"},
                "model": {"from": "dir"}, "lora": {"rank": 4}, "data": {"train": null, "blend": [{"path": "a"}]},
                "checkpoint": {"every": 1, "export": {"path": "a"}}})"};
  }
  // The key that a row begins with, as an override names it.
  static std::string key_of(const std::vector<std::string>& row) {
    const std::size_t end = row.at(0).find('`', 1);
    std::string key = row.at(0).substr(1, end - 1);
    for (std::size_t at; (at = key.find("[]")) != std::string::npos;) key.replace(at, 2, ".0");
    return key;
  }
  // Whether a reader asks for it. Mostly with null, which is no value of any key, but what nobody asks for is
  // unknown all the same; a model must be named.
  bool taken(const std::string& key, const char* base, std::string& why_not) const {
    try {
      const bool model = key == "model.from" || key == "model.arch";
      (void)load_over(base, {key + (model ? "=gpt2" : "=null")});
      return true;
    } catch (const Error& error) {
      why_not = error.what();
      return error.where() == "--set: " + key && error.message() != "is not a known key";
    }
  }
};

TEST_F(ConfigKeys, WhatIsDescribedIsRead) {
  int rows = 0;
  for (const KeyTable& table : config_key_tables()) {
    const auto is_table_of = [&](Arch arch) { return table.name == std::string("model.") + name_of(arch); };
    if (std::any_of(std::begin(kFamilies), std::end(kFamilies), is_table_of)) continue;  // below
    for (const auto& row : table.rows) {
      const std::string key = key_of(row);
      std::string why_not;
      bool any = false;
      for (const char* base : bases()) any = any || taken(key, base, why_not);
      EXPECT_TRUE(any) << key << ": " << why_not;
      ++rows;
    }
  }
  EXPECT_GT(rows, 200);
}

// The other way round: there is no way to ask for a key but by its row.
TEST(ConfigKeysDeathTest, WhatIsReadIsDescribed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const config::Keys keys({{"known", config::BoolSpec{}, "A key."}});
  const config::ConfigTree tree;
  std::vector<std::string> warnings;
  config::Section section(tree, tree.root, "", warnings, keys);
  EXPECT_FALSE(section.boolean("known"));
  EXPECT_DEATH((void)section.find("other"), "asks for \"other\", which no row describes");
}

TEST_F(ConfigKeys, EachIsDescribedOnceAndInFull) {
  std::set<std::string> names, keys;
  for (const KeyTable& table : config_key_tables()) {
    SCOPED_TRACE(table.name);
    EXPECT_TRUE(names.insert(table.name).second);
    EXPECT_FALSE(table.rows.empty());
    for (const auto& row : table.rows) {
      SCOPED_TRACE(row.at(0));
      ASSERT_EQ(row.size(), table.header.size());
      if (table.name.rfind("model", 0) != 0) {
        EXPECT_TRUE(keys.insert(row[0]).second);
      }
      EXPECT_EQ(row[0].front(), '`');
      EXPECT_GT(row.back().size(), 5u);
      EXPECT_EQ(row.back().back(), '.');
      const bool alias = row.size() == 4 && row[1].rfind("as `", 0) == 0;
      for (std::size_t i = 1; i + 1 < row.size() && !alias; ++i) EXPECT_FALSE(row[i].empty());
      for (const std::string& cell : row) {
        EXPECT_EQ(std::count(cell.begin(), cell.end(), '`') % 2, 0) << cell;
        EXPECT_EQ(cell.find('\n'), std::string::npos);
      }
    }
  }
}

TEST_F(ConfigKeys, TypesRangesAndDefaultsAreThoseOfTheReaders) {
  const auto row = [](const std::string& table, const std::string& key) {
    for (const KeyTable& t : config_key_tables()) {
      for (const auto& r : t.rows) {
        if (t.name == table && r[0] == "`" + key + "`") return r;
      }
    }
    ADD_FAILURE() << table << " has no " << key;
    return Strings(4);
  };
  EXPECT_EQ(row("aio", "aio.queues")[1], "whole number, 1 to 64");
  EXPECT_EQ(row("aio", "aio.queues")[2], "`1`");
  EXPECT_EQ(row("aio", "aio.block_size")[1],
            "whole number, a multiple of 4096, 4096 to 1073741824, or `\"auto\"`");
  EXPECT_EQ(row("memory", "accumulation")[1], "`\"layer_major\"`, `\"micro_batch_major\"`");
  EXPECT_EQ(row("optimizer.params", "optimizer.params.lr")[2], "`0.001`; Lion: `0.0001`");
  EXPECT_EQ(row("tiers.nvme", "tiers.nvme[].path")[2], "required");
  EXPECT_EQ(row("deepspeed-no-effect", "zero_optimization.overlap_comm")[1],
            "The step's plan says when bytes move, and that changes no result.");
  EXPECT_EQ(row("deepspeed-refused", "zero_optimization.zenflow")[2],
            "Remove the section; updates overlap with the computation anyway.");
}

// ---- the keys of a new model

std::string family_text(Arch arch, const std::string& more) {
  const std::string base =
      arch == Arch::kGpt2
          ? R"("arch": "gpt2", "vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4)"
          : fmt::format(R"("arch": "{}", "vocab_size": 64, "max_position_embeddings": 64, "hidden_size": 32,
               "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96)",
                        name_of(arch));
  return "{" + base + (more.empty() ? "" : ", " + more) + "}";
}

TEST_F(ConfigKeys, DefaultsOfAModelAreThoseThatAreTaken) {
  for (const Arch arch : kFamilies) {
    const std::string without = write_hf_config(parse_model_config(family_text(arch, ""), "model"));
    int compared = 0;
    for (const ModelKey& key : model_keys(arch)) {
      SCOPED_TRACE(key.name);
      const std::string fallback = key.fallback;
      if (fallback == "required") {
        EXPECT_HAS(family_text(arch, ""), fmt::format("\"{}\":", key.name));
        continue;
      }
      if (fallback.find(' ') != std::string::npos) continue;  // in words
      const std::string with = family_text(arch, fmt::format("\"{}\": {}", key.name, fallback));
      EXPECT_EQ(write_hf_config(parse_model_config(with, "model")), without);
      ++compared;
    }
    EXPECT_GE(compared, 8);
  }
}

}  // namespace
}  // namespace zg
