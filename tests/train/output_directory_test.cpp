// The directory of a run's results: whose it is, what is replaced in it, and what happens where it has no
// room.
#include "ziggurat/train/output_directory.hpp"

#include <signal.h>
#include <sys/resource.h>

#include <fstream>

#include "train/checkpoint_fixture.hpp"
#include "train/checkpointer.hpp"
#include "ziggurat/train/observers.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class OutputDirectories : public CheckpointFixture {};

// While one of these lives, a file cannot grow beyond so many bytes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  sighandler_t handler_;
  rlimit before_{};
};

TEST_F(OutputDirectories, BelongToOneRun) {
  const RunConfig one = config("out", {});
  {
    const OutputDirectory first(one);
    const Error error = usage_error([&] { return OutputDirectory(one), 0; });
    EXPECT_EQ(error.where(), "output.dir " + directory_ + "/out");
    EXPECT_HAS(error.message(), "is in use by another run, which writes its log and its model there");
  }
  EXPECT_FALSE(fs::exists(directory_ + "/out")) << "a run that was refused leaves nothing";
  EXPECT_NO_THROW(OutputDirectory{one});
}

// The run's own checkpoints may lie there, too.
TEST_F(OutputDirectories, MayHaveTheCheckpoints) {
  const Strings settings = small(2) + Strings{"checkpoint.path=" + directory_ + "/out"};
  const RunConfig one = config("out", settings);
  OutputDirectory output(one);
  Trainer trainer(one);
  trainer.prepare();
  trainer.run({});
  EXPECT_EQ(list_checkpoints(directory_ + "/out").front().number, 2);
}

TEST_F(OutputDirectories, SayWhatTheyReplace) {
  const auto outcome = [&](const Strings& settings) {
    const RunConfig one = config("out", small(1) + Strings{"checkpoint.every=0"} + settings);
    OutputDirectory output(one);
    Trainer trainer(one);
    trainer.prepare();
    testing::internal::CaptureStderr();
    const auto log = output.begin(trainer);
    const std::string said = testing::internal::GetCapturedStderr();
    trainer.run({log.get()});
    EXPECT_EQ(trainer.save_model(), one.model_dir());
    return said;
  };
  EXPECT_EQ(outcome({}), "");
  EXPECT_HAS(outcome({}),
             "info: log.jsonl and model of an earlier run in " + directory_ + "/out will be replaced\n");
  const std::string other = outcome({"optimizer.params.lr=0.5", "seed=77"});
  EXPECT_HAS(other, "warning: log.jsonl and model");
  EXPECT_HAS(other, "differs in optimizer.params.lr, seed. Another output.dir keeps it");
  test::write_file(directory_ + "/out/config.json", "no configuration");
  EXPECT_HAS(outcome({}), "its configuration is not known");
}

TEST_F(OutputDirectories, KeysThatDifferAreNamed) {
  EXPECT_EQ(differing_keys(R"({"a": {"b": 1, "c": 2}, "d": 3})", R"({"a": {"b": 1, "c": 3}, "e": 3})", {}),
            (std::vector<std::string>{"a.c", "d", "e"}));
  EXPECT_EQ(differing_keys(R"({"a": 1, "b": 2})", R"({"b": 2, "a": 7})", {"a"}), std::vector<std::string>{});
  EXPECT_EQ(differing_keys("{", "{}", {}), std::vector<std::string>{""});
}

StepRecord record_of(std::int64_t step) {
  StepRecord r;
  r.step = step;
  r.result.seconds = 1;
  return r;
}

// A full disk under the log: the training goes on, and no record is lost where room comes.
TEST_F(OutputDirectories, ALogWithoutRoomWaits) {
  const std::string path = directory_ + "/log.jsonl";
  const auto steps_in = [&] {
    std::vector<std::int64_t> steps;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) steps.push_back(nlohmann::json::parse(line).at("step"));
    return steps;
  };
  testing::internal::CaptureStderr();
  {
    StepLog log(path);
    log.on_step(record_of(1));
    {
      const FileSizeLimit limit(fs::file_size(path) + 100);  // the next record fits in part
      log.on_step(record_of(2));
      EXPECT_EQ(steps_in(), std::vector<std::int64_t>{1}) << "whole lines alone";
      log.on_step(record_of(3));
    }
    log.on_step(record_of(4));
    EXPECT_EQ(steps_in(), (std::vector<std::int64_t>{1, 2, 3, 4}));
    const FileSizeLimit limit(fs::file_size(path) + 100);
    log.on_step(record_of(5));
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_HAS(said, "cannot be written: File too large (errno 27); records wait in memory from step 2 on");
  EXPECT_HAS(said, "has all records again, of steps 2 to 4");
  EXPECT_HAS(said, "records wait in memory from step 5 on");
  EXPECT_HAS_NOT(said, "lacks");
  EXPECT_EQ(steps_in(), (std::vector<std::int64_t>{1, 2, 3, 4, 5})) << "the last try had room";
}

TEST_F(OutputDirectories, RecordsWithoutRoomGoToTheModel) {
  const std::string path = directory_ + "/log.jsonl", model = directory_ + "/model";
  fs::create_directories(model);
  testing::internal::CaptureStderr();
  {
    auto log = std::make_unique<StepLog>(path);
    log->on_step(record_of(1));
    log->write_rest_to(model);
    EXPECT_FALSE(fs::exists(model + "/log.jsonl")) << "nothing waits";
    // What waits fits into a file of its own, and not behind the first record.
    const FileSizeLimit limit(fs::file_size(path) + fs::file_size(path) / 2);
    log->on_step(record_of(2));
    log->write_rest_to(model);
    log = nullptr;
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_HAS(said, "/model/log.jsonl has the records from step 2 on, for which ");
  EXPECT_HAS_NOT(said, "lacks");
  EXPECT_EQ(nlohmann::json::parse(read(model + "/log.jsonl")).at("step"), 2);
  testing::internal::CaptureStderr();
  {
    auto log = std::make_unique<StepLog>(path);
    log->on_step(record_of(1));
    const FileSizeLimit limit(fs::file_size(path) + fs::file_size(path) / 2);
    log->on_step(record_of(2));
    log->write_rest_to(directory_ + "/none");
    log = nullptr;
  }
  EXPECT_HAS(testing::internal::GetCapturedStderr(), "lacks the records from step 2 on");
}

TEST_F(OutputDirectories, OfALogThatIsNoFileIsSpoken) {
  fs::create_directories(directory_ + "/log.jsonl");
  EXPECT_THROW(StepLog(directory_ + "/log.jsonl"), Error);
  EXPECT_HAS(test::error_of([] { StepLog log("/dev/full"); }).message(), "no regular file");
}

TEST_F(OutputDirectories, RoomIsAskedForBeforeTheFirstStep) {
  const auto free = static_cast<std::int64_t>(fs::space(directory_).available);
  EXPECT_NO_THROW(check_room({}, {.path = directory_ + "/a/b", .bytes = free / 2}));
  Error error = usage_error([&] { check_room({}, {.path = directory_ + "/a/b", .bytes = 2 * free}); });
  EXPECT_EQ(error.where(), "output.dir " + directory_ + "/a/b");
  EXPECT_HAS(error.message(), "the model and the log take");
  // Beside the checkpoints on the same file system.
  const CheckpointPlace own{"checkpoint.path", directory_ + "/c", 1, free / 3};
  EXPECT_NO_THROW(check_room({own}, {.path = directory_, .bytes = free / 8}));
  error = usage_error([&] { check_room({own}, {.path = directory_, .bytes = free / 2}); });
  EXPECT_HAS(error.message(), "beside the model");
  const FileSizeLimit limit(20'000);  // the tokens of the text have less
  error = usage_error([&] { check_room({}, {.path = directory_, .bytes = 30'000, .largest_file = 20'001}); });
  EXPECT_HAS(error.hint(), "ulimit -f");
  // A run asks.
  error = usage_error([&] { return run("out", {}); });
  EXPECT_HAS(error.hint(), "ulimit -f");
}

// A model whose place cannot be written to in the end goes elsewhere.
TEST_F(OutputDirectories, AModelWithoutRoomGoesElsewhere) {
  const RunConfig one = config("out", small(2));
  Trainer trainer(one);
  trainer.prepare();
  trainer.run({});
  test::write_file(one.model_dir(), "a file stands in its way");
  const std::string saved = trainer.save_model();
  EXPECT_EQ(fs::path(saved).parent_path(), one.checkpoint.path);
  const SafeTensors model(saved + "/model.safetensors");
  EXPECT_GT(model.entries().size(), 0u);
  EXPECT_EQ(read(one.model_dir()), "a file stands in its way");
}

}  // namespace
}  // namespace zg
