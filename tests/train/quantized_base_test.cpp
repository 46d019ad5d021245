// Runs that quantise their model first: the entries that they make in the cache, and the messages of runs
// that cannot make one.
#include "train/quantized_base.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <future>
#include <regex>
#include <set>

#include "support/families.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/train/quantize.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;
using test::read_file;

class QuantizedBases : public CheckpointFixture {
 protected:
  QuantizedBases() { save_model(); }

  // Matrices of several bands, and widths that are multiples of 32. `last`: the last element of the last
  // matrix.
  void save_model(std::optional<float> last = {}) const {
    ModelConfig c = test::FamilyFile("qwen3").config();
    c.vocab_size = 256, c.width = 64, c.inner = 160, c.heads = 4, c.kv_heads = 2, c.head_size = 16;
    const Model model(c, DType::kF32, host_ops());
    save_hf(model_, model, DType::kBF16,
            [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
              for (std::int64_t i = begin; i < end; ++i)
                out[i - begin] =
                    static_cast<float>(test::family_weight(c, p, i / p.whole_cols, i % p.whole_cols));
              const bool of_last = p.name.ends_with(fmt::format("{}.mlp.down_proj.weight", c.layers - 1));
              if (last && of_last && end == p.count()) out[end - begin - 1] = *last;
            });
    test::write_file(model_ + "/tokenizer.json", "{}");
  }
  RunConfig run_of(const std::string& out, const Strings& more) const {
    return on_book(Strings{"model.from=" + model_, "model.quantize_cache=" + cache_, "lora.rank=4",
                           "data.seq_len=16", "data.validation=0.2", "eval.batches=1", "steps=2",
                           "train_batch_size=4", "train_micro_batch_size_per_gpu=2", "optimizer.type=AdamW",
                           "optimizer.params.lr=0.02", "output.dir=" + directory_ + "/" + out} +
                   more);
  }
  RunConfig quantized(const Strings& more = {}) const {
    return run_of("none", Strings{"model.quantize=nf4"} + more);
  }
  // Returns the run's outcome and the text of its log.
  std::pair<Outcome, std::string> train(const std::string& out, const Strings& more,
                                        std::optional<std::string> resume = {}) const {
    testing::internal::CaptureStderr();
    Outcome o;
    try {
      Trainer trainer(run_of(out, more), {.resume = std::move(resume)});
      trainer.start();
      Steps steps;
      o.summary = trainer.run({&steps});
      o.losses = steps.losses, o.norms = steps.norms;
      trainer.save_model(trainer.plan().config.model_dir());
    } catch (...) {
      (void)testing::internal::GetCapturedStderr();
      throw;
    }
    return {o, testing::internal::GetCapturedStderr()};
  }
  std::string adapter(const std::string& out, const char* file) const {
    return read_file(directory_ + "/" + out + "/adapter/" + file);
  }
  std::set<std::string> names_in_cache() const {
    std::set<std::string> names;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(cache_, none)) names.insert(entry.path().filename());
    return names;
  }
  // The entries, without their locks.
  Strings entries() const {
    Strings paths;
    for (const std::string& name : names_in_cache()) {
      if (!name.ends_with(".lock")) paths.push_back(cache_ + "/" + name);
    }
    return paths;
  }
  static std::size_t count(const std::string& text, const std::string& part) {
    std::size_t n = 0;
    for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++n;
    return n;
  }

  const std::string model_ = directory_ + "/base", cache_ = directory_ + "/cache/of/models";
};

TEST_F(QuantizedBases, TheFirstRunMakesThemAndOthersTakeThem) {
  for (const char* code : {"nf4", "fp8", "int4"}) {
    SCOPED_TRACE(code);
    fs::remove_all(cache_);
    const std::string direct = directory_ + "/direct-" + code;
    (void)quantize_model(model_, direct, parse_code(code));
    const Outcome expected = train("direct", {"model.from=" + direct}).first;
    const auto expect_same = [&](const Outcome& o, const std::string& out) {
      EXPECT_EQ(o.losses, expected.losses);
      EXPECT_EQ(o.norms, expected.norms);
      EXPECT_TRUE(adapter(out, "adapter_model.safetensors") ==
                  adapter("direct", "adapter_model.safetensors"));
      EXPECT_HAS(adapter(out, "adapter_config.json"), "\"base_model_name_or_path\": \"" + model_ + "\"");
    };
    const Strings settings{fmt::format("model.quantize={}", code)};
    const auto [first, said] = train("first", settings);
    expect_same(first, "first");
    ASSERT_EQ(entries().size(), 1u);
    const std::string entry = entries().front();
    EXPECT_TRUE(std::regex_match(fs::path(entry).filename().string(),
                                 std::regex(fmt::format("base-{}-[0-9a-f]{{16}}", code))))
        << entry;
    EXPECT_HAS(said, fmt::format("model: {} is quantised to {} in {}", model_, code, entry));
    EXPECT_HAS(said, fmt::format("matrices in {}", code));
    EXPECT_HAS(said, "largest error");
    std::set<std::string> names, expected_names;
    for (const auto& file : fs::directory_iterator(entry)) names.insert(file.path().filename());
    for (const auto& file : fs::directory_iterator(direct)) expected_names.insert(file.path().filename());
    EXPECT_EQ(names, expected_names);
    for (const std::string& name : expected_names)
      EXPECT_TRUE(read_file(entry + "/" + name) == read_file(direct + "/" + name)) << name;

    const auto made = fs::last_write_time(entry + "/model.safetensors");
    const auto [second, said_then] = train("second", settings + Strings{"lora.base=codes"});
    expect_same(second, "second");
    EXPECT_HAS(said_then, fmt::format("model: {} in {} is taken from {}", model_, code, entry));
    EXPECT_HAS_NOT(said_then, "is quantised to");
    EXPECT_EQ(fs::last_write_time(entry + "/model.safetensors"), made);
  }
  EXPECT_HAS(Trainer(quantized(), {}).describe(), "from " + model_ + " in nf4");
}

TEST_F(QuantizedBases, AChangedModelGetsAnother) {
  const std::string first = quantized_base(quantized());
  EXPECT_EQ(quantized_base(quantized()), first);
  save_model(0.5f);
  const std::string second = quantized_base(quantized());
  EXPECT_NE(second, first);
  EXPECT_FALSE(read_file(first + "/model.safetensors") == read_file(second + "/model.safetensors"));
  test::write_file(model_ + "/config.json", read_file(model_ + "/config.json") + "\n");
  EXPECT_NE(quantized_base(quantized()), second);
  // Other paths of the same model, and changes on which its matrices do not depend, need no new entry.
  const std::string third = quantized_base(quantized());
  test::write_file(model_ + "/tokenizer.json", "{ }");
  EXPECT_EQ(quantized_base(quantized({"model.from=" + model_ + "/"})), third);
  EXPECT_EQ(quantized_base(quantized({"model.from=" + directory_ + "/./base/../base"})), third);
  EXPECT_NE(quantized_base(quantized({"model.quantize=fp8"})), third);
  EXPECT_EQ(entries().size(), 4u);
}

// The user ends it, or an element of the last matrix has no code.
TEST_F(QuantizedBases, WhatEndsEarlyLeavesNothing) {
  int calls = 0;
  const Error stopped = test::error_of([&] {
    Trainer trainer(quantized(), {.stop = [&] { return ++calls > 3; }});
    return 0;
  });
  EXPECT_EQ(stopped.code(), Errc::kInterrupted);
  EXPECT_EQ(stopped.exit_code(), 130);
  EXPECT_HAS(stopped.message(), "interrupted while it was quantised");
  EXPECT_EQ(entries(), Strings{});
  save_model(INFINITY);
  EXPECT_HAS(usage_error([&] { return quantized_base(quantized()); }).message(), "which has no code");
  EXPECT_EQ(entries(), Strings{});
  save_model();
  const std::string entry = quantized_base(quantized());
  EXPECT_EQ(entries(), Strings{entry});
}

TEST_F(QuantizedBases, RunsAtOnceMakeOne) {
  testing::internal::CaptureStderr();
  std::vector<std::future<std::string>> runs;
  for (int i = 0; i < 4; ++i)
    runs.push_back(std::async(std::launch::async, [&] { return quantized_base(quantized()); }));
  std::set<std::string> paths;
  for (auto& run : runs) paths.insert(run.get());
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(paths.size(), 1u);
  EXPECT_EQ(count(said, "is quantised to"), 1u) << said;
  EXPECT_EQ(count(said, "is taken from"), 3u) << said;
  const std::string name = fs::path(*paths.begin()).filename();
  EXPECT_EQ(names_in_cache(), (std::set<std::string>{name, name + ".lock"}));
}

TEST_F(QuantizedBases, AWaitIsSaidAndEnds) {
  const std::string entry = quantized_base(quantized());
  fs::remove_all(entry);
  const int fd = ::open((entry + ".lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(try_lock(fd), 0);
  int calls = 0;
  testing::internal::CaptureStderr();
  const Error stopped =
      test::error_of([&] { return quantized_base(quantized(), [&] { return ++calls > 2; }); });
  const std::string said = testing::internal::GetCapturedStderr();
  (void)::close(fd);
  EXPECT_EQ(stopped.code(), Errc::kInterrupted);
  EXPECT_EQ(count(said, "another run makes " + entry + "; waiting for it"), 1u) << said;
  EXPECT_EQ(quantized_base(quantized()), entry) << "the lock of a run that has ended holds nobody up";
}

TEST_F(QuantizedBases, ACacheWithoutRoomOrPlaceIsRefused) {
  Error error = usage_error(
      [&] { return quantized_base(quantized(), {}, [](const std::string&) { return std::int64_t{1000}; }); });
  EXPECT_EQ(error.where(), "model.quantize_cache " + cache_);
  EXPECT_HAS(error.message(), "has 1000 B free; " + model_ + " in nf4 takes");
  EXPECT_EQ(entries(), Strings{});
  // As many bytes as the tensors have suffice.
  const std::int64_t bytes = quantized_bytes(model_, SavedCode::kNf4);
  EXPECT_EQ(bytes, quantize_model(model_, directory_ + "/direct", SavedCode::kNf4).bytes);
  EXPECT_NO_THROW((void)quantized_base(quantized(), {}, [&](const std::string&) { return bytes; }));
  test::write_file(directory_ + "/file", "");
  error = usage_error(
      [&] { return quantized_base(quantized({"model.quantize_cache=" + directory_ + "/file/below"})); });
  EXPECT_EQ(error.where(), "model.quantize_cache " + directory_ + "/file/below");
  EXPECT_HAS(error.hint(), "name another");
}

TEST_F(QuantizedBases, LieInTheUsersCache) {
  RunConfig run = quantized();
  run.quantize.cache = "";
  const auto place = [&] { return fs::path(quantized_base(run)).parent_path().string(); };
  ::setenv("HOME", (directory_ + "/home").c_str(), 1);
  ::setenv("XDG_CACHE_HOME", (directory_ + "/xdg").c_str(), 1);
  EXPECT_EQ(place(), directory_ + "/xdg/ziggurat/models");
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(place(), directory_ + "/home/.cache/ziggurat/models") << "as the specification has it";
  ::unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(place(), directory_ + "/home/.cache/ziggurat/models");
  ::unsetenv("HOME");
  EXPECT_EQ(usage_error(place).where(), "model.quantize_cache");
}

TEST_F(QuantizedBases, WhatCannotBeQuantizedIsRefused) {
  const auto refused = [&](const Strings& more, const std::string& said) {
    const Error error = usage_error([&] {
      Trainer trainer(quantized(more), {});
      return 0;
    });
    EXPECT_HAS(error.what(), said);
    EXPECT_FALSE(fs::exists(cache_));
    return error;
  };
  const std::string coded = test::reference_directory() + "coded/nf4";
  const Error error = refused({"model.from=" + coded},
                              "is nf4, and " + coded + " has matrices that are coded in few bits already");
  EXPECT_EQ(error.where(), "model.quantize");
  EXPECT_HAS(error.hint(), "remove the key");
  refused({"model.from=" + directory_ + "/nowhere"}, directory_ + "/nowhere");
  refused({"lora.target=[\"none\"]"}, "matches no module");  // before anything is quantised
  fs::remove(model_ + "/model.safetensors");
  refused({}, "model.safetensors");
}

// A checkpoint holds the elements that its run was given.
TEST_F(QuantizedBases, ARunGoesOnWithTheSameCodeAlone) {
  const Strings nf4{"model.quantize=nf4", "checkpoint.every=1"};
  const Outcome whole = train("whole", nf4).first;
  (void)train("part", nf4 + Strings{"steps=1"});
  for (const Strings& other : {Strings{"model.quantize=fp8"}, Strings{"model.quantize=null"}}) {
    const Error error = usage_error([&] { return train("part", nf4 + other, "").first.losses.size(); });
    EXPECT_HAS(error.message(), other.front().ends_with("fp8") ? "model.quantize is fp8, was nf4"
                                                               : "model.quantize is none, was nf4");
  }
  const Outcome rest = train("part", nf4, "").first;
  ASSERT_EQ(rest.losses.size(), 1u);
  EXPECT_EQ(rest.losses.back(), whole.losses.back());
  EXPECT_TRUE(adapter("part", "adapter_model.safetensors") == adapter("whole", "adapter_model.safetensors"));
}

}  // namespace
}  // namespace zg
