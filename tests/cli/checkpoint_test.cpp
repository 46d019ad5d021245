// Checkpoints as users meet them: Ctrl-C and kill -9, and on from there; the subcommands; damage.
#include <signal.h>
#include <sys/time.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "cli/fixture.hpp"
#include "support/seed.hpp"

namespace zg::cli_test {
namespace {

using Json = nlohmann::json;

class CheckpointTest : public CliTest {
 protected:
  Strings words(const std::string& out, const Strings& settings, const Strings& flags = {}) const {
    return Strings{"train", "config.json", "--devices", "host"} +
           sets(Strings{"output.dir=" + out, "checkpoint.every=1"} + settings) + flags;
  }
  // The records without times and what depends on where copies are.
  std::vector<Json> records(const std::string& out) const {
    std::vector<Json> all = log(out + "/log.jsonl");
    for (Json& r : all) {
      for (const char* key : {"step_ms", "tokens_per_s", "mfu", "phase_ms", "stall_ms", "bound_ms",
                              "bound_by", "peak_bytes", "bytes", "loader_ms", "comm", "ranks", "pipeline"})
        r.erase(key);
    }
    return all;
  }
  void expect_same(const std::string& a, const std::string& b) const {
    EXPECT_EQ(records(a), records(b));
    EXPECT_TRUE(read(a + "/model/model.safetensors") == read(b + "/model/model.safetensors"));
  }
  std::string newest(const std::string& out) const {
    const Outcome o = run(Strings{"checkpoint", "list", out, "--json"});
    EXPECT_EQ(o.code, 0) << o.err;
    const Json list = Json::parse(o.out);
    return list["checkpoints"].empty() ? "" : list["checkpoints"][0]["path"].get<std::string>();
  }
  static int kills() {
    const char* const asked = std::getenv("ZG_TEST_KILLS");
    return asked != nullptr ? std::atoi(asked) : 8;
  }
};

TEST_F(CheckpointTest, AfterCtrlCTheRunGoesOn) {
  const Strings settings{"steps=30", "eval.every=7"};
  ASSERT_EQ(run(words("whole", settings)).code, 0);
  Launch first{.arguments = words("parts", settings + Strings{"checkpoint.every=1000"})};
  first.interrupt_at = "step 7:";  // the validation loss
  const Outcome stopped = run(first);
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  EXPECT_HAS(stopped.err, "info: checkpoint parts/checkpoints/0001-step-");
  const std::size_t done = records("parts").size();
  ASSERT_LT(done, 30u);
  const Outcome rest = run(words("parts", settings, {"--resume"}));
  EXPECT_EQ(rest.code, 0) << rest.err;
  EXPECT_HAS(rest.err, fmt::format("resumes from parts/checkpoints/0001-step-{}", done));
  expect_same("whole", "parts");
  // Once more, with nothing left to do.
  const Outcome again = run(words("parts", settings, {"--resume"}));
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_HAS(again.err, "all 30 steps were done before");
  expect_same("whole", "parts");
}

TEST_F(CheckpointTest, LinesOfTheLogBehindTheCheckpointAreCut) {
  ASSERT_EQ(run(words("whole", {"steps=9", "eval.every=0"})).code, 0);
  ASSERT_EQ(run(words("parts", {"steps=4", "eval.every=0", "checkpoint.keep=9"})).code, 0);
  write("parts/log.jsonl", read("parts/log.jsonl") + "{\"step\": 5, \"loss\": 7}\n{\"step\": 6, \"lo");
  // From the third step, with a path; the log has the fourth, too.
  const Outcome rest =
      run(words("parts", {"steps=9", "eval.every=0"}, {"--resume", "parts/checkpoints/0003-step-3"}));
  EXPECT_EQ(rest.code, 0) << rest.err;
  expect_same("whole", "parts");
  fs::remove(path("parts/log.jsonl"));
  const Outcome bare = run(words("parts", {"steps=10", "eval.every=0"}, {"--resume"}));
  EXPECT_EQ(bare.code, 0) << bare.err;
  EXPECT_HAS(bare.err, "has the records of 0 steps, not of the 9");
}

// In turns, SIGKILL comes right behind the commit of some checkpoint, and an alarm, which nobody handles, at
// a random moment: it ends a process as SIGKILL does, nothing in it runs any more. Some fall into a commit,
// since there is one after each step.
TEST_F(CheckpointTest, ARunThatIsKilledGoesOnToTheSameBits) {
  std::mt19937_64 random(test::test_seed(19));
  struct Kind {
    const char* name;
    Strings settings;
    bool copies = false;  // its checkpoints are copied behind the training
  };
  fs::create_directories(path("disk"));
  const Kind usual[] = {
      {"memory", {}},
      {"drive",
       {"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=disk", "aio.backend=threads"}},
      {"ranks",
       {"devices=host:4", "train_batch_size=8", "train_micro_batch_size_per_gpu=1",
        "zero_optimization.stage=3"}}};
  // Asked for many, more kinds.
  std::vector<Kind> kinds(std::begin(usual), std::end(usual));
  if (kills() > 8) {
    fs::create_directories(path("disk1")), fs::create_directories(path("disk2"));
    const Strings drives{"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=disk",
                         "tiers.nvme.1.path=disk1", "tiers.nvme.2.path=disk2"};
    kinds.push_back({"libaio", drives + Strings{"aio.backend=libaio"}});
    kinds.push_back({"any backend", drives});
    kinds.push_back({"parts",
                     {"devices=host:4", "train_batch_size=8", "train_micro_batch_size_per_gpu=1",
                      "parallel.tensor=2", "zero_optimization.stage=3"}});
    kinds.push_back({"stages",
                     {"devices=host:4", "train_batch_size=8", "train_micro_batch_size_per_gpu=1",
                      "parallel.pipeline=2", "zero_optimization.stage=1"}});
    kinds.push_back(
        {"ranks on drives", drives + Strings{"devices=host:4", "train_batch_size=8", "tiers.host=1600KiB",
                                             "train_micro_batch_size_per_gpu=1", "zero_optimization.stage=3",
                                             "checkpoint.state=pin"}});
    kinds.push_back({"copies", drives, true});
  }
  for (const Kind& kind : kinds) {
    SCOPED_TRACE(kind.name);
    Strings settings = kind.settings + Strings{"steps=40", "eval.every=0", "checkpoint.keep=2"};
    const auto arguments = [&](const std::string& out, const Strings& flags) {
      const Strings copies{"checkpoint.export.path=copies-" + out, "checkpoint.export.every=2"};
      return Strings{"train", "config.json"} +
             sets(Strings{"output.dir=" + out, "checkpoint.every=1"} + settings +
                  (kind.copies ? copies : Strings{})) +
             flags;
    };
    const std::string whole = std::string("whole-") + kind.name, parts = std::string("parts-") + kind.name;
    const auto begin = std::chrono::steady_clock::now();
    const Outcome o = run(arguments(whole, {}));
    ASSERT_EQ(o.code, 0) << o.err;
    const double length = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    int killed = 0, went_on = 0;
    const int wanted = (kills() + static_cast<int>(kinds.size()) - 1) / static_cast<int>(kinds.size());
    for (int i = 0; i < 4 * wanted && killed < wanted; ++i) {
      const double moment = std::uniform_real_distribution<double>(0.2 * length, 0.95 * length)(random);
      const bool behind_commit = i % 2 == 0;
      const std::size_t done = fs::exists(path(parts + "/log.jsonl")) ? records(parts).size() : 0;
      Launch launch{.arguments = arguments(parts, {"--resume"})};
      if (behind_commit) launch.interrupt_at = fmt::format("-step-{}: ", done + 1 + random() % 12);
      launch.signal = SIGKILL;
      launch.in_child = [moment, behind_commit] {
        if (behind_commit) return;
        const auto seconds = static_cast<time_t>(moment);
        const itimerval when{
            {0, 0}, {seconds, static_cast<suseconds_t>(1e6 * (moment - static_cast<double>(seconds)))}};
        (void)::setitimer(ITIMER_REAL, &when, nullptr);
      };
      const Outcome part = run(launch);
      went_on += part.err.find("resumes from") != std::string::npos ? 1 : 0;
      EXPECT_HAS_NOT(part.err, "passed over");
      if (part.signal == SIGALRM || part.signal == SIGKILL) {
        ++killed;
        continue;
      }
      ASSERT_EQ(part.code, 0) << part.err;
      expect_same(whole, parts);
      fs::remove_all(path(parts)), fs::remove_all(path("copies-" + parts));
    }
    EXPECT_EQ(killed, wanted);
    const Outcome rest = run(arguments(parts, {"--resume"}));
    ASSERT_EQ(rest.code, 0) << rest.err;
    went_on += rest.err.find("resumes from") != std::string::npos ? 1 : 0;
    expect_same(whole, parts);
    EXPECT_GT(went_on, 0);
    // Nothing is left but what is kept, and one more where the last kill came between a commit and the
    // removal of the oldest, which the next commit sees to.
    const Json list = Json::parse(run(Strings{"checkpoint", "list", parts, "--json"}).out);
    EXPECT_GE(list["checkpoints"].size(), 2u);
    EXPECT_LE(list["checkpoints"].size(), 3u);
    EXPECT_TRUE(list["unfinished"].empty());
    if (!kind.copies) continue;
    const Json copies = Json::parse(run(Strings{"checkpoint", "list", "copies-" + parts, "--json"}).out);
    ASSERT_EQ(copies["checkpoints"].size(), 1u);
    EXPECT_EQ(copies["checkpoints"][0]["step"], 40);
    EXPECT_TRUE(copies["unfinished"].empty());
    EXPECT_EQ(run(Strings{"checkpoint", "verify", "copies-" + parts}).code, 0);
  }
}

TEST_F(CheckpointTest, SubcommandsListShowVerifyAndDiscard) {
  ASSERT_EQ(run(words("out", {"steps=3", "checkpoint.keep=3"})).code, 0);
  Outcome o = run(Strings{"checkpoint", "list", "out"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(lines_of(o.out).size(), 3u);
  EXPECT_EQ(o.out.rfind("out/checkpoints/0003-step-3  step 3, ", 0), 0u) << o.out;
  EXPECT_EQ(newest("out"), "out/checkpoints/0003-step-3");

  o = run(Strings{"checkpoint", "show", "out", "--tensors"});
  EXPECT_HAS(o.out, "seed: 1337");
  EXPECT_HAS(o.out, "wte.weight.exp_avg F32 [0, 8192) in rank-00000.safetensors");
  const Json shown =
      Json::parse(run(Strings{"checkpoint", "show", "out/checkpoints/0002-step-2", "--json"}).out);
  EXPECT_EQ(shown["step"], 2);
  EXPECT_EQ(shown["bits"]["optimizer.type"], "AdamW");

  o = run(Strings{"checkpoint", "verify", "out"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(lines_of(o.out).size(), 3u);
  EXPECT_HAS(o.out, "all hashes agree");
  std::string file = read("out/checkpoints/0003-step-3/rank-00000.safetensors");
  file[file.size() - 9] = static_cast<char>(file[file.size() - 9] ^ 1);
  write("out/checkpoints/0003-step-3/rank-00000.safetensors", file);
  o = run(Strings{"checkpoint", "verify", "out"});
  EXPECT_EQ(o.code, 2);
  EXPECT_HAS(message_of(o), "1 of 3 checkpoints is damaged");
  EXPECT_HAS(o.out, "damaged: out/checkpoints/0003-step-3/rank-00000.safetensors: has ");
  const Json verified = Json::parse(run(Strings{"checkpoint", "verify", "out", "--json"}).out);
  EXPECT_EQ(verified["checkpoints"][0]["valid"], false);
  EXPECT_EQ(verified["checkpoints"][1]["valid"], true);

  // The damaged one is passed over, and by name it is refused.
  o = run(words("out", {"steps=4"}, {"--resume", "out/checkpoints/0003-step-3"}));
  EXPECT_EQ(o.code, 2);
  EXPECT_HAS(message_of(o), "it was changed");
  o = run(words("out", {"steps=4", "checkpoint.keep=9"}, {"--resume"}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.err, "0003-step-3 is passed over: ");
  EXPECT_HAS(o.err, "resumes from out/checkpoints/0002-step-2");
  EXPECT_EQ(records("out").size(), 4u);

  o = run(Strings{"checkpoint", "discard", "out/checkpoints/0003-step-3"});
  EXPECT_EQ(o.out, "removed out/checkpoints/0003-step-3\n") << o.err;
  EXPECT_FALSE(fs::exists(path("out/checkpoints/0003-step-3")));
  o = run(Strings{"checkpoint", "discard", "out"});
  EXPECT_EQ(o.code, 2);
  EXPECT_HAS(message_of(o), "is no checkpoint");
  o = run(Strings{"checkpoint", "discard", "--all", "out", "--json"});
  EXPECT_EQ(Json::parse(o.out)["removed"].size(), 4u);
  EXPECT_TRUE(fs::is_empty(path("out/checkpoints")));
  EXPECT_HAS(run(Strings{"checkpoint", "list", "out"}).out, "there are no checkpoints in out/checkpoints");
}

// Each says what the last evaluation before it found, also one of the run before.
TEST_F(CheckpointTest, HaveTheLossOfTheLastEvaluation) {
  const Strings settings{"checkpoint.every=1", "checkpoint.keep=9", "eval.every=2", "data.validation=0.2"};
  ASSERT_EQ(run(words("out", settings + Strings{"steps=2"})).code, 0);
  ASSERT_EQ(run(words("out", settings + Strings{"steps=5"}) + Strings{"--resume"}).code, 0);
  std::map<std::int64_t, double> found;
  for (const std::string& line : lines_of(read("out/log.jsonl"))) {
    const Json record = Json::parse(line);
    if (record.contains("val_loss")) found[record["step"]] = record["val_loss"];
  }
  const Json all = Json::parse(run(Strings{"checkpoint", "list", "out", "--json"}).out)["checkpoints"];
  ASSERT_EQ(all.size(), 5u);
  for (const Json& one : all) {
    const std::int64_t step = one["step"], evaluated = step == 5 ? 5 : step / 2 * 2;
    ASSERT_EQ(one.contains("validation"), evaluated > 0) << one;
    if (evaluated == 0) continue;
    EXPECT_EQ(one["validation"]["step"], evaluated);
    EXPECT_EQ(one["validation"]["loss"], found.at(evaluated));
  }
  EXPECT_HAS(run(Strings{"checkpoint", "list", "out"}).out,
             fmt::format(", validation loss {:.4f} at step 2, ", found.at(2)));
}

// A copy is a checkpoint from which a run goes on, and the model of the last one is what the run saves.
TEST_F(CheckpointTest, AreExportedAsACopyAndAsAModel) {
  ASSERT_EQ(run(Strings{"train", "config.json"} +
                sets({"steps=3", "output.dir=out", "checkpoint.every=1", "checkpoint.keep=2",
                      "devices=host:2", "parallel.tensor=2"}))
                .code,
            0);
  Outcome o = run(Strings{"checkpoint", "export", "out", "far/away"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out.rfind("far/away/0003-step-3  a copy of step 3: ", 0), 0u) << o.out;
  for (const char* file : {"rank-00000.safetensors", "rank-00001.safetensors"})
    EXPECT_TRUE(read(std::string("far/away/0003-step-3/") + file) ==
                read(std::string("out/checkpoints/0003-step-3/") + file))
        << file;
  Json there = Json::parse(read("out/checkpoints/0003-step-3/manifest.json"));
  Json here = Json::parse(read("far/away/0003-step-3/manifest.json"));
  EXPECT_EQ(here["index"]["name"], "index.json");
  there.erase("xxh3"), here.erase("xxh3"), here.erase("index");
  EXPECT_EQ(there, here);
  const std::string index = read("far/away/0003-step-3/index.json");
  const Json split = Json::parse(index)["tensors"]["h.0.mlp.c_proj.weight"]["pieces"];
  ASSERT_EQ(split.size(), 2u);  // each rank has some columns of all lines
  EXPECT_NE(split[0]["file"], split[1]["file"]);
  EXPECT_GT(split[1]["lines"], 1);
  EXPECT_EQ(split[1]["first"].get<int>() * 2, split[1]["stride"].get<int>());
  for (const std::string& damaged : {index + " ", "[" + index.substr(1), std::string()}) {
    damaged.empty() ? (void)fs::remove(path("far/away/0003-step-3/index.json"))
                    : write("far/away/0003-step-3/index.json", damaged);
    EXPECT_HAS(run(Strings{"checkpoint", "verify", "far/away"}).out, "index.json");
  }
  write("far/away/0003-step-3/index.json", index);
  o = run(Strings{"checkpoint", "export", "out/checkpoints/0002-step-2", "far/away", "--json"});
  EXPECT_EQ(Json::parse(o.out)["path"], "far/away/0002-step-2") << o.err;
  EXPECT_EQ(run(Strings{"checkpoint", "verify", "far/away"}).code, 0);
  o = run(Strings{"checkpoint", "export", "out", "far/model", "--model"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_TRUE(read("far/model/model.safetensors") == read("out/model/model.safetensors"));
  EXPECT_EQ(read("far/model/config.json"), read("out/model/config.json"));

  const auto refused = [&](const Strings& arguments) {
    const Outcome what = run(Strings{"checkpoint", "export"} + arguments);
    EXPECT_EQ(what.code, 2) << what.err;
    return message_of(what);
  };
  EXPECT_HAS(refused({"out", "far/away"}), "far/away/0003-step-3: is there already");
  EXPECT_HAS(refused({"far", "else"}), "is no checkpoint, and has none in it");
  std::string file = read("far/away/0003-step-3/rank-00001.safetensors");
  file[file.size() - 9] = static_cast<char>(file[file.size() - 9] ^ 1);
  write("far/away/0003-step-3/rank-00001.safetensors", file);
  for (const Strings& flags : {Strings{}, Strings{"--model"}}) {
    EXPECT_HAS(refused(Strings{"far/away", "else"} + flags), "it was changed");
    EXPECT_TRUE(!fs::exists(path("else")) || fs::is_empty(path("else")));
  }
  // The newest of the copies is damaged now, so the run goes on from the other.
  o = run(words("rest", {"steps=4"}, {"--resume", "far/away"}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.err, "resumes from far/away/0002-step-2");
}

TEST_F(CheckpointTest, MistakesAreOneMessage) {
  const auto refused = [&](const Strings& arguments) {
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 2) << o.err;
    return message_of(o);
  };
  EXPECT_HAS(refused({"checkpoint", "list", "nothing"}), "nothing: is no directory");
  EXPECT_HAS(refused({"checkpoint", "show", "."}), "is no checkpoint, and has none in it");
  EXPECT_HAS(refused({"checkpoint", "verify", "."}), "is no checkpoint, and has none in it");
  EXPECT_HAS(refused(words("out", {}, {"--resume", "nothing"})),
             "is no checkpoint: there is no manifest.json");
  EXPECT_FALSE(fs::exists(path("out"))) << "nothing is made before";
  ASSERT_EQ(run(words("out", {"steps=2"})).code, 0);
  const std::string other = refused(words("out", {"steps=3", "seed=5"}, {"--resume"}));
  EXPECT_HAS(other, "seed is 5, was 1337");
  EXPECT_HAS(other, "--set 'checkpoint.allow=[\"seed\"]'");
  EXPECT_HAS(refused(words("out", {"steps=3", "seed=5", "optimizer.params.lr=0.5"}, {"--resume"})),
             "--set 'checkpoint.allow=[\"optimizer.params.lr\", \"seed\"]'");
  EXPECT_HAS(refused(words("out", {"steps=3"})), "which a new run would replace");
  EXPECT_EQ(records("out").size(), 2u) << "the log stays";
  EXPECT_EQ(run(words("out", {"steps=3", "seed=5", "checkpoint.allow=[\"seed\"]"}, {"--resume"})).code, 0);
  EXPECT_HAS(refused(words("out", {"checkpoint.allow=seed"})), "checkpoint.allow");
  EXPECT_HAS(refused(words("out", {"checkpoint.keep=0"})), "checkpoint.keep");
}

TEST_F(CheckpointTest, ARunSaysWhatAKillWouldLose) {
  EXPECT_HAS(train({}).err, "a kill would lose the whole run");
  const Outcome o = run(words("with", {}));
  EXPECT_HAS(o.err, "every step, and when interrupted");
  EXPECT_HAS(o.err, "a kill would lose up to 1 step");
}

}  // namespace
}  // namespace zg::cli_test
