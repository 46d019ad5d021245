// What the tests of runs share: a text, and runs of a tiny model on it.
#pragma once
#include <string>

#include "config/config_fixture.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {

class RunTest : public ConfigTest {
 protected:
  RunTest() {
    std::string text;
    while (text.size() < 4000) text += "all work and no play makes jack a dull boy, ";
    write("book.txt", text);
  }
  // The base on the text, with these settings.
  RunConfig on_book(const Strings& settings) const {
    Strings all{"data.train=" + directory_ + "/book.txt", "output.dir=" + directory_ + "/out"};
    all.insert(all.end(), settings.begin(), settings.end());
    return load_set(all);
  }
  // A smaller model than the base's; `overrides` come after `settings`.
  RunConfig tiny(Strings settings, const Strings& overrides) const {
    settings.insert(settings.begin(), {"data.seq_len=16", "model.n_embd=32", "model.n_positions=32"});
    settings.insert(settings.end(), overrides.begin(), overrides.end());
    return on_book(settings);
  }
  // The same with little memory, so that most of the state must go to these drives, folders of the test.
  RunConfig tiny_on_drives(const Strings& drives, const Strings& overrides) const {
    Strings settings{"train_batch_size=4", "tiers.device=400KiB", "tiers.host=400KiB"};
    for (std::size_t i = 0; i < drives.size(); ++i) {
      std::filesystem::create_directories(directory_ + "/" + drives[i]);
      settings.push_back(fmt::format("tiers.nvme.{}.path={}/{}", i, directory_, drives[i]));
    }
    return tiny(settings, overrides);
  }
};

}  // namespace zg
