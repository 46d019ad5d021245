// What is wrong with a configuration is said with its place; what does nothing is a warning.
#include <chrono>
#include <tuple>

#include "config/config_fixture.hpp"

namespace zg {
namespace {

class ConfigErrors : public ConfigTest {};

TEST_F(ConfigErrors, FilesThatAreNoJsonSayWhere) {
  struct Case {
    const char* text;
    const char* position;
    const char* message;
  };
  const Case cases[] = {
      {"{\n  \"steps\": 1,\n}", "3, column 1:", "expected string literal"},
      {"{\n  \"steps\": 01\n}", "2, column 13:", "expected '}'"},
      {"{\n  \"steps\" 1\n}", "2, column 11:", "expected ':'"},
      {"{ \"a\": [1, 2 }", "1, column 14:", "expected ']'"},
      {"{ \"a\": tru }", "1, column 11:", "invalid literal"},
      {"{ \"a\": 1 } x", "1, column 12:", "expected end of input"},
      {"{ /* never closed", "1, column 18:", "missing closing '*/'"},
      {"", "1, column 1:", "unexpected end of input"},
      {"{ \"a\": \"\xff\" }", "1, column 9:", "ill-formed UTF-8"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    const std::string file = write("bad.json", c.text);
    const Error error = usage_error([&] { return load({{file}, {}}); });
    EXPECT_EQ(error.where(), file);
    EXPECT_HAS(error.message(), std::string("line ") + c.position);
    EXPECT_HAS(error.message(), c.message);
  }
  const Error comma = usage_error([&] { return load({{write("c.json", "{\"steps\": 1,\n}")}, {}}); });
  EXPECT_HAS(comma.hint(), "comma");
}

// What other languages have and JSON has not.
TEST_F(ConfigErrors, WhatIsNoJsonComesWithTheMend) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\n  # the steps\n  \"steps\": 1 }", "a comment begins with //, not with #"},
      {"{ \"steps\": 1 # many\n }", "a comment begins with //, not with #"},
      {"{ 'steps': 1 }", "double quotes"},
      {"{ steps: 1 }", "double quotes"},
      {"{ \"bf16\": {\"enabled\": True} }", "write true, in small letters"},
      {"{ \"bf16\": {\"enabled\": FALSE} }", "write false, in small letters"},
      {"{ \"lora\": None }", "write null"},
      {"{ \"gradient_clipping\": NaN }", "JSON has no such number"},
      {"{ \"gradient_clipping\": -Infinity }", "JSON has no such number"},
      {"{ \"steps\": [1,\n ] }", "remove the comma"},
  };
  for (const auto& [text, mend] : cases) {
    SCOPED_TRACE(text);
    EXPECT_HAS(usage_error([&, bad = text] { return load({{write("bad.json", bad)}, {}}); }).hint(), mend);
  }
  // All of that is well inside of texts and comments.
  EXPECT_NO_THROW(
      (void)load_over("// it's # True, None,]\n{\"sample\": {\"prompt\": \"# it's, ] None\"} /* ' # */}"));
}

TEST_F(ConfigErrors, CapitalsComeWithTheMend) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {R"({"train_batch_size": "Auto"})", "train_batch_size", "write \"auto\""},
      {R"({"bf16": {"enabled": "AUTO"}})", "bf16.enabled", "write \"auto\""},
      {R"({"bf16": {"enabled": "True"}})", "bf16.enabled", "write true, without quotes"},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": "Auto"}}})", "optimizer.params.lr",
       "write \"auto\""},
      {R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": "Auto"}})",
       "zero_optimization.reduce_bucket_size", "write \"auto\""},
      {R"({"zero_optimization": {"offload_param": {"device": "CPU"}}})",
       "zero_optimization.offload_param.device", "write \"cpu\""},
      {R"({"scheduler": {"type": "warmuplr"}})", "scheduler.type", "write \"WarmupLR\""},
      {R"({"aio": {"backend": "Auto"}})", "aio.backend", "write \"auto\""},
      {R"({"threads": {"bind": "Auto"}})", "threads.bind", "write \"auto\""},
      {R"({"steps": "None"})", "steps", "write null, or leave the key out"},
  };
  for (const auto& [overlay, path, mend] : cases) {
    SCOPED_TRACE(overlay);
    const Error error = usage_error([&, text = overlay] { return load_over(text); });
    EXPECT_HAS(error.where(), path);
    EXPECT_HAS(error.hint(), mend);
  }
  EXPECT_EQ(load_over(R"({"devices": "HOST"})").device.ranks, 1);
}

TEST_F(ConfigErrors, FilesThatCannotBeRead) {
  EXPECT_EQ(usage_error([&] {
              return load({{directory_ + "/none.json"}, {}});
            }).where(),
            directory_ + "/none.json");
  EXPECT_EQ(usage_error([&] { return load({{directory_}, {}}); }).where(), directory_);
  (void)usage_error([&] { return load({{}, {"steps=1"}}); });
  const Error list = usage_error([&] { return load({{write("l.json", "[1]")}, {}}); });
  EXPECT_HAS(list.message(), "found [1], expected an object");
}

TEST_F(ConfigErrors, DuplicatesAndNestingAreErrors) {
  const std::string twice = write("twice.json", R"({"data": {"train": "a", "seq_len": 1, "train": "b"}})");
  const Error error = usage_error([&] { return load({{twice}, {}}); });
  EXPECT_EQ(error.where(), twice + ": data.train");
  const std::string lines =
      write("lines.json", "{\"steps\": 1,\n \"seed\": 2, // \"steps\": 5\n\n\"st\\u0065ps\": 3}");
  const Error both = usage_error([&] { return load({{lines}, {}}); });
  EXPECT_EQ(both.where(), lines + ": steps");
  EXPECT_HAS(both.message(), "in line 1 and in line 4");
  // The same key in two objects is none.
  EXPECT_NO_THROW((void)load_over(R"({"fp16": {"enabled": false}, "bf16": {"enabled": false}})"));
  const std::string deep = std::string(100000, '[');
  const Error nested = usage_error([&] { return load_over("{\"a\": " + deep + "}"); });
  EXPECT_HAS(nested.message(), "nests objects and lists 100001 deep, 64 at most");
  (void)usage_error([&] { return load_set({"a=" + deep + std::string(100000, ']')}); });
  const Error huge = usage_error([&] { return load_over(R"({"gradient_clipping": 1e999})"); });
  EXPECT_HAS(huge.message(), "1e999");
}

// What nobody writes by hand is one short error, at once.
TEST_F(ConfigErrors, WhatIsHugeIsRefusedInTime) {
  const auto begin = std::chrono::steady_clock::now();
  std::string keys = "{\"a\": 1";
  for (int i = 0; i < 100'000; ++i) keys += fmt::format(", \"k{}\": {}", i, i);
  std::string values = "{\"a\": [0";
  for (int i = 0; i < 1'000'000; ++i) values += ",0";
  const std::string long_key(1'000'000, 'k'), brackets(100'000, '[');
  const std::pair<std::string, const char*> overlays[] = {
      {keys + "}", "more than 2000 keys"},
      {values + "]}", "1000003 values"},
      {"{\"" + long_key + "\": 1}", "has a key of 1000000 characters"},
      {"{\"model\": {\"" + long_key + "\": 1}}", "has a key of 1000000 characters"},
      {"{\"a\": " + brackets + "}", "deep"},
      {std::string("{\"a\0\": 1}", 10), "a zero byte"},
  };
  for (const auto& [overlay, message] : overlays) {
    SCOPED_TRACE(message);
    const Error error = usage_error([&, text = overlay] { return load_over(text); });
    EXPECT_HAS(error.message(), message);
    EXPECT_LT(std::string(error.what()).size(), 1000u);
  }
  const std::pair<std::string, const char*> overrides[] = {
      {long_key + "=1", "has a key of 1000000 characters"},
      {"a=" + brackets, "has a value of 100000 characters"},
      {"a=" + brackets + std::string(100'000, ']'), "deep"},
      {"a." + std::string(200'000, '.') + "=1", "empty key"},
      {"tiers.nvme.99999999999999999999.path=a", "expected a list"},
      {"tiers.nvme.-1.path=a", "expected a list"},
      {"=1", "empty key"},
      {"", "no '='"},
      {"\x1b[31m=1", "is not a known key"},
      {"steps.x=1", "expected a whole number"},
      {"model.0=1", "0"},
  };
  for (const auto& [set, message] : overrides) {
    SCOPED_TRACE(message);
    const Error error = usage_error([&, text = set] { return load_set({text}); });
    EXPECT_HAS(std::string(error.what()), message);
    EXPECT_LT(std::string(error.what()).size(), 1000u);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
}

// Each number alone, and products of numbers each of which is in its range.
TEST_F(ConfigErrors, NumbersThatWouldOverflowAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"steps=1e30", "steps"},
      {"steps=9223372036854775807", "steps"},
      {"steps=-1", "steps"},
      {"eval.every=1e18", "eval.every"},
      {"eval.batches=1e18", "eval.batches"},
      {"checkpoint.keep=9223372036854775807", "checkpoint.keep"},
      {"checkpoint.every_seconds=1e300", "checkpoint.every_seconds"},
      {"pipeline.stages=4294967298", "pipeline.stages"},
      {"parallel.pipeline_group=4294967298", "parallel.pipeline_group"},
      {"parallel.timeout_seconds=1e300", "parallel.timeout_seconds"},
      {"threads.compute=4294967297", "threads.compute"},
      {"aio.queue_depth=4294967297", "aio.queue_depth"},
      {"aio.queues=4294967297", "aio.queues"},
      {"fp16.enabled=true fp16.hysteresis=4294967297", "fp16.hysteresis"},
      {"fp16.enabled=true fp16.loss_scale=1e300", "fp16.loss_scale"},
      {"fp16.enabled=true fp16.loss_scale=1e-300", "fp16.loss_scale"},
      {"fp16.enabled=true fp16.min_loss_scale=1e-300", "fp16.min_loss_scale"},
      {"optimizer.type=AdamW optimizer.params.lr=1e300", "optimizer.params.lr"},
      {"optimizer.type=AdamW optimizer.params.eps=1e-300", "optimizer.params.eps"},
      {"optimizer.type=AdamW optimizer.params.weight_decay=1e300", "optimizer.params.weight_decay"},
      {"gradient_clipping=1e300", "gradient_clipping"},
      {"scheduler.type=WarmupLR scheduler.params.warmup_num_steps=9e18", "warmup_num_steps"},
      {"scheduler.type=WarmupLR scheduler.params.warmup_max_lr=1e300", "warmup_max_lr"},
      {"tiers.host=1e30", "tiers.host"},
      {"tiers.host=9e18", "tiers.host"},
      {"tiers.host=9000000TB", "tiers.host"},
      {"tiers.host=-5MiB", "tiers.host"},
      {"tiers.host=nanMiB", "tiers.host"},
      {"tiers.host=0.0001", "tiers.host"},
      {"tiers.device=1e400GiB", "tiers.device"},
      {"tiers.ram.latency_seconds=1e300", "tiers.ram.latency_seconds"},
      {"data.seq_len=4294967328", "data.seq_len"},
      {"gradient_accumulation_steps=100000 train_batch_size=null", "gradient_accumulation_steps"},
      {"train_batch_size=null train_micro_batch_size_per_gpu=1000000000 gradient_accumulation_steps=65536",
       "train_micro_batch_size_per_gpu"},
      {"train_batch_size=1000000000 train_micro_batch_size_per_gpu=1000000000", "train_batch_size"},
      {"devices=host:256 train_batch_size=null train_micro_batch_size_per_gpu=1000000000 "
       "gradient_accumulation_steps=65536",
       "train_micro_batch_size_per_gpu"},
      {"lora.rank=1e18", "lora.rank"},
      {"lora.rank=2 lora.alpha=1e300", "lora.alpha"},
      {"sample.tokens=1e18", "sample.tokens"},
  };
  for (const auto& [sets, path] : cases) {
    SCOPED_TRACE(sets);
    Strings overrides;
    for (std::string_view rest = sets; !rest.empty();) {
      const std::size_t space = std::min(rest.find(' '), rest.size());
      overrides.emplace_back(rest.substr(0, space));
      rest.remove_prefix(std::min(space + 1, rest.size()));
    }
    const Error error = usage_error([&] { return load_set(overrides); });
    EXPECT_HAS(error.where(), path);
  }
}

struct Bad {
  const char* overlay;  // over the base
  const char* path;     // of the place in the overlay's file
  const char* message;  // part of the error's text, hint included
};

const Bad kBad[] = {
    // Unknown keys, and what they should have been.
    {R"({"zero_optimisation": {}})", "zero_optimisation", "did you mean zero_optimization?"},
    {R"({"zero_optimization": {"offload_optimzer": {}}})", "zero_optimization.offload_optimzer",
     "did you mean offload_optimizer?"},
    {R"({"offload_param": {"device": "cpu"}})", "offload_param",
     "did you mean zero_optimization.offload_param?"},
    {R"({"learning_rate": 1e-3})", "learning_rate", "did you mean optimizer.params.lr?"},
    {R"({"optimizer": {"type": "AdamW", "lr": 1e-3}})", "optimizer.lr", "did you mean optimizer.params.lr?"},
    {R"({"data": {"tran": "x"}})", "data.tran", "did you mean train?"},
    {R"({"model": {"resid_pdrop": 0.1}})", "model.resid_pdrop", "write \"dropout\": {\"residual\": ...}"},
    {R"({"model": {"embd_pdrop": 0.1}})", "model.embd_pdrop", "write \"dropout\": {\"embedding\": ...}"},
    {R"({"model": {"attn_pdrop": 0.1}})", "model.attn_pdrop",
     "the probabilities of attention have no dropout"},
    {R"({"model": {"dropout": {"residual": 1}}})", "model.dropout.residual", "a number from 0 to below 1"},
    {R"({"model": {"dropout": {"attention": 0.1}}})", "model.dropout.attention",
     "known here: embedding, residual"},
    {R"({"eval": {"often": 3}})", "eval.often", "known here: every, batches"},
    {R"({"scheduler": {"type": "WarmupLR", "params": {"cos_min_ratio": 0.1}}})",
     "scheduler.params.cos_min_ratio", "is not a known key"},
    {R"({"tensorboard": {"enabled": false, "outputpath": "x"}})", "tensorboard.outputpath",
     "did you mean output_path?"},
    {R"({"tiers": {"nvme": [{"path": "a", "size": 1}]}})", "tiers.nvme.0.size", "known here: path, bytes"},
    // Types.
    {R"({"steps": "100"})", "steps", "found text \"100\", expected a whole number, 1 to 1000000000"},
    {R"({"steps": 1.5})", "steps", "found 1.5, expected a whole number"},
    {R"({"steps": true})", "steps", "found true, expected a whole number"},
    {R"({"steps": 18446744073709551615})", "steps", "expected a whole number"},
    {R"({"data": "book.txt"})", "data", "found text \"book.txt\", expected an object"},
    {R"({"data": {"train": 3}})", "data.train", "found 3, expected a text"},
    {R"({"bf16": true})", "bf16", "found true, expected an object"},
    {R"({"bf16": {"enabled": "true"}})", "bf16.enabled", "write it without quotes"},
    {R"({"bf16": {"enabled": 1}})", "bf16.enabled", "found 1, expected true or false"},
    {R"({"zero_optimization": {"overlap_comm": "yes"}})", "zero_optimization.overlap_comm",
     "expected true or false"},
    {R"({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}})", "optimizer.params.betas",
     "expected two numbers"},
    {R"({"tiers": {"nvme": "dir"}})", "tiers.nvme", "expected a list"},
    {R"({"tiers": {"nvme": ["dir"]}})", "tiers.nvme.0", "expected an object"},
    {R"({"seed": "auto"})", "seed", "found text \"auto\""},
    // Ranges.
    {R"({"steps": 0})", "steps", "found 0, expected a whole number, 1 to 1000000000"},
    {R"({"seed": -1})", "seed", "0 or more"},
    {R"({"data": {"seq_len": 0}})", "data.seq_len", "found 0"},
    {R"({"data": {"seq_len": 65}})", "data.seq_len", "at most the context of the model, 64"},
    {R"({"data": {"validation": 1}})", "data.validation", "from 0 to below 1"},
    {R"({"data": {"validation": ""}})", "data.validation", "expected a file"},
    {R"({"train_batch_size": 0})", "train_batch_size", "found 0"},
    {R"({"train_batch_size": 9})", "train_batch_size", "9 != 2 * 4 * 1"},
    {R"({"gradient_accumulation_steps": 3})", "train_batch_size", "8 != 2 * 3 * 1"},
    {R"({"optimizer": {"type": "AdamW", "params": {"lr": -1}}})", "optimizer.params.lr", "from 0 to 1e30"},
    {R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}})", "optimizer.params.betas",
     "found [0.9,1.0], expected two numbers from 0 to below 1"},
    {R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.9, 0.9]}}})", "optimizer.params.betas",
     "two numbers"},
    {R"({"optimizer": {"type": "AdamW", "params": {"eps": 0}}})", "optimizer.params.eps", "from 1e-37"},
    {R"({"gradient_clipping": -0.5})", "gradient_clipping", "from 0 to 1e30"},
    {R"({"aio": {"block_size": 1000}})", "aio.block_size", "multiple of 4096"},
    {R"({"aio": {"block_size": 0}})", "aio.block_size", "multiple of 4096"},
    {R"({"aio": {"queue_depth": 5000}})", "aio.queue_depth", "1 to 4096"},
    {R"({"aio": {"queues": 0}})", "aio.queues", "1 to 64"},
    {R"({"tiers": {"nvme": [{"path": "a", "endurance": -1}]}})", "tiers.nvme.0.endurance", "number of bytes"},
    {R"({"tiers": {"nvme": [{"path": "a", "bytes": 64}]}})", "tiers.nvme.0.bytes",
     "found 64, expected 4096 bytes or more"},
    {R"({"tiers": {"nvme": [{"path": "a", "bytes": 64}]}})", "tiers.nvme.0.bytes", "did you mean \"64GiB\"?"},
    {R"({"tiers": {"nvme": [{"path": "b"}, {"path": "a", "bytes": 4095}]}})", "tiers.nvme.1.bytes",
     "4096 bytes"},
    {R"({"tiers": {"nvme": [{"path": "a", "bytes": "3KiB"}]}})", "tiers.nvme.0.bytes", "leave it out"},
    {R"({"aio": {"backend": "iouring"}})", "aio.backend", "did you mean \"io_uring\"?"},
    {R"({"tiers": {"device": "48 sheep"}})", "tiers.device", "a text such as \"48MiB\""},
    {R"({"tiers": {"host": 0}})", "tiers.host", "positive number of bytes"},
    {R"({"tiers": {"host": -4096}})", "tiers.host", "positive number of bytes"},
    {R"({"tiers": {"nvme": [{"bytes": 1}]}})", "tiers.nvme.0.path", "is missing"},
    {R"({"tiers": {"nvme": [{"path": "a"}, {"path": "a"}]}})", "tiers.nvme.1.path", "a second time"},
    {R"({"tiers": {"ram": {"stall_every": 2}}})", "tiers.ram.stall_every", "stall_every_seconds"},
    {R"({"tiers": {"ram": {"stall_every_seconds": 2, "stall_seconds": 2}}})", "tiers.ram", "a stall of 2"},
    {R"({"tiers": {"ram": {"stall_seconds": 0.5}}})", "tiers.ram",
     "stall_every_seconds, which it comes with"},
    {R"({"tiers": {"ram": {"stall_every_seconds": -1}}})", "tiers.ram.stall_every_seconds", "found -1"},
    {R"({"tiers": {"ram": {"change_factor": "2"}}})", "tiers.ram.change_factor", "found text \"2\""},
    {R"({"tiers": {"nvme": [{"path": "a", "ram": 5}]}})", "tiers.nvme.0.ram", "expected an object"},
    {R"({"tiers": {"nvme": [{"path": "a", "ram": {"bytes": 1}}]}})", "tiers.nvme.0.ram.bytes",
     "is not a known key"},
    {R"({"tiers": {"nvme": [{"path": "a"}, {"path": "b", "ram": {"change_factor": 0.5}}]}})",
     "tiers.nvme.1.ram", "a change factor of 0.5"},
    {R"({"aio": {"backend": "ram"}, "tiers": {"nvme": [{"path": "a"}, {"path": "b", "ram": {"duplex": true}}]}})",
     "tiers.nvme.1.ram.duplex", "is true, and that of nvme.0 is false"},
    {R"({"aio": {"backend": "ram"}, "tiers": {"ram": {"duplex": true},
         "nvme": [{"path": "a"}, {"path": "b", "ram": {"bytes_per_second": 1e9}}]}})",
     "tiers.nvme.1.ram.duplex", "is false, and that of nvme.0 is true"},
    {R"({"tiers": {"prefetch_depth": -1}})", "tiers.prefetch_depth", "0 to 4096"},
    {R"({"zero_optimization": {"stage": 4}})", "zero_optimization.stage", "0 to 3"},
    {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}})",
     "scheduler.params.warmup_num_steps", "1 to 1000000000000"},
    {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}})",
     "scheduler.params.warmup_type", "one of \"log\", \"linear\""},
    {R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}})",
     "scheduler.params.cycle_max_lr", "is missing"},
    {R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_mom_rate": 9,
        "decay_step_size": 1, "cycle_first_step_size": 2}}})",
     "scheduler.params.decay_mom_rate", "a momentum in [0, 1)"},
    {R"({"accumulation": "layermajor"})", "accumulation", "did you mean \"layer_major\"?"},
    {R"({"sample": {"tokens": -1}})", "sample.tokens", "0 to"},
    {R"({"output": {"dir": ""}})", "output.dir", "expected a directory"},
    // What does not go together, or is incomplete.
    {R"({"model": {"from": "dir", "arch": "gpt2"}})", "model", "both \"from\" and \"arch\""},
    {R"({"model": {"from": ""}})", "model.from", "expected a directory"},
    {R"({"model": {"from": "dir", "quantize": "nf5"}, "lora": {"rank": 2}})", "model.quantize",
     "did you mean \"nf4\"?"},
    {R"({"model": {"from": "dir", "quantize": 4}, "lora": {"rank": 2}})", "model.quantize",
     "one of \"nf4\", \"nf4_double\", \"fp8\", \"int4\""},
    {R"({"model": {"from": "dir", "quantize": "nf4", "quantize_cache": ""}, "lora": {"rank": 2}})",
     "model.quantize_cache", "expected a directory"},
    {R"({"model": {"from": "dir", "quantize": "nf4"}})", "model.quantize", "the run trains the model itself"},
    {R"({"model": {"quantize": "nf4"}, "lora": {"rank": 2}})", "model.quantize", "the model is new"},
    {R"({"model": null})", "model", "is missing"},
    {R"({"steps": null})", "steps", "is missing"},
    {R"({"data": {"train": ""}})", "data.train", "is missing"},
    {R"({"data": {"tokenizer": "gpt2"}})", "data.tokenizer", "{\"gpt2\": \"directory\"}"},
    {R"({"data": {"tokenizer": {}}})", "data.tokenizer.gpt2", "encoder.json"},
    {R"({"data": {"tokenizer": {"file": ""}}})", "data.tokenizer.file", "a tokenizer.json, a model file"},
    {R"({"data": {"tokenizer": {"file": "a", "gpt2": "b"}}})", "data.tokenizer",
     "both \"gpt2\" and \"file\""},
    {R"({"data": {"token_dtype": "uint8"}})", "data.token_dtype", "did you mean \"uint16\"?"},
    {R"({"train_batch_size": null, "train_micro_batch_size_per_gpu": null})", "train_batch_size", "either"},
    {R"({"aio": {"thread_count": 2, "intra_op_parallelism": 2}})", "aio.thread_count", "old name"},
    {R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}})", "bfloat16", "old name"},
    {R"({"bf16": {"enabled": true}, "fp64": {"enabled": true}})", "fp64", "cannot be combined with bf16"},
    {R"({"fp16": {"enabled": true}, "fp64": {"enabled": true}})", "fp64", "cannot be combined with fp16"},
    {R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "fp16", "cannot be combined with bf16"},
    {R"({"fp16": {"enabled": 1}})", "fp16.enabled", "found 1, expected true or false"},
    {R"({"fp16": {"enabled": true, "loss_scale": -1}})", "fp16.loss_scale", "expected 0, or a number from"},
    {R"({"fp16": {"enabled": true, "initial_scale_power": 128}})", "fp16.initial_scale_power", "0 to 127"},
    {R"({"fp16": {"enabled": true, "initial_scale_power": -1}})", "fp16.initial_scale_power", "0 to 127"},
    {R"({"fp16": {"enabled": true, "loss_scale_window": 0}})", "fp16.loss_scale_window", "1 or more"},
    {R"({"fp16": {"enabled": true, "hysteresis": 0}})", "fp16.hysteresis", "found 0"},
    {R"({"fp16": {"enabled": true, "consecutive_hysteresis": 2}})", "fp16.consecutive_hysteresis",
     "true or false"},
    {R"({"fp16": {"enabled": true, "min_loss_scale": 0}})", "fp16.min_loss_scale", "from 1e-37"},
    {R"({"fp16": {"enabled": true, "initial_scale_power": 3, "min_loss_scale": 9}})", "fp16.min_loss_scale",
     "is 9, more than the scale to begin with, 8"},
    {R"({"fp16": {"enabled": true, "loss_scale_windw": 5}})", "fp16.loss_scale_windw",
     "did you mean loss_scale_window?"},
    {R"({"fp16": {"enabled": false, "loss_scal": 5}})", "fp16.loss_scal", "did you mean loss_scale?"},
    {R"({"loss_scale": 128})", "loss_scale", "did you mean fp16.loss_scale?"},
    {R"({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": true}, "communication_data_type": "fp16"})",
     "communication_data_type", "gradients in fp16 need the loss scale"},
    {R"({"optimizer": {"params": {"lr": 1}}})", "optimizer.type", "is missing"},
    {R"({"scheduler": {"params": {}}})", "scheduler.type", "is missing"},
    {R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})",
     "zero_optimization.offload_param.device", "offload_param cpu cannot be combined with ZeRO stage 2"},
    {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})",
     "zero_optimization.offload_optimizer.device",
     "offload_optimizer cpu cannot be combined with ZeRO stage 0"},
    {R"({"zero_optimization": {"cpu_offload": true}})", "zero_optimization.cpu_offload",
     "stage to 1, 2 or 3"},
    {R"({"zero_optimization": {"stage": 2, "cpu_offload_params": true}})",
     "zero_optimization.cpu_offload_params", "stage to 3"},
    {R"({"zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}})",
     "zero_optimization.cpu_offload", "is the old form of offload_optimizer, which is given too"},
    {R"({"zero_optimization": {"stage": 3, "cpu_offload_param": true, "cpu_offload_params": true}})",
     "zero_optimization.cpu_offload_params", "is another name of cpu_offload_param, which is given too"},
    {R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 4}})",
     "zero_optimization.mics_shard_size", "is 4, and zero_hpz_partition_size is 2"},
    {R"({"devices": "host:4", "gradient_allreduce_op": "sum"})", "gradient_allreduce_op",
     "found text \"sum\", expected \"mean\""},
    {R"({"data_parallel_size": 4})", "data_parallel_size", "is 4, but the run's data-parallel degree is 1"},
    {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})",
     "zero_optimization.offload_param.nvme_path", "is missing"},
    {R"({"zero_optimization": {"stage": 3, "offload_param": {}}})", "zero_optimization.offload_param.device",
     "is missing"},
    {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}})",
     "zero_optimization.offload_param.device", "one of \"none\", \"cpu\", \"nvme\""},
    // What would compute something else than it does here.
    {R"({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}})",
     "fp16.fp16_master_weights_and_grads", "fp32 always"},
    {R"({"amp": {"enabled": true, "opt_level": "O1"}})", "amp.enabled", "use \"bf16\""},
    {R"({"torch_autocast": {"enabled": true}})", "torch_autocast.enabled", "use \"bf16\""},
    {R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})",
     "bf16.bf16_master_weights_and_grads", "bf16_optimizer_states does without it here"},
    {R"({"communication_data_type": "fp16"})", "communication_data_type", "use \"bf16\""},
    {R"({"sparse_attention": {"mode": "fixed"}})", "sparse_attention", "attention is exact"},
    {R"({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}})",
     "compression_training", "is not supported"},
    {R"({"curriculum_learning": {"enabled": true}})", "curriculum_learning.enabled", "not supported"},
    {R"({"data_efficiency": {"enabled": true}})", "data_efficiency.enabled", "not supported"},
    {R"({"progressive_layer_drop": {"enabled": true}})", "progressive_layer_drop.enabled",
     "every layer runs"},
    {R"({"elasticity": {"enabled": true}})", "elasticity.enabled", "train_batch_size"},
    {R"({"moe": {"enabled": true}})", "moe.enabled", "mixtures of experts"},
    {R"({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true}})",
     "zero_optimization.zero_quantized_nontrainable_weights", "kept as they are"},
    {R"({"parallel": {"quantized_gradient_bits": 6}})", "parallel.quantized_gradient_bits", "multiple of 4"},
    {R"({"devices": "host:4", "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}})",
     "zero_optimization.zero_hpz_partition_size", "3 does not divide the 4 ranks"},
    {R"({"devices": "host:4", "zero_optimization": {"stage": 1, "mics_shard_size": 8}})",
     "zero_optimization.mics_shard_size", "8 does not divide the 4 ranks"},
    {R"({"zero_optimization": {"zenflow": {}}})", "zero_optimization.zenflow", "not supported"},
    {R"({"parallel": {"tensor": 0}})", "parallel.tensor", "found 0, expected"},
    {R"({"parallel": {"tensor": 2}})", "parallel.tensor", "are on ranks of their own"},
    {R"({"devices": "host:3", "parallel": {"tensor": 2}})", "parallel.tensor",
     "2 does not divide the 3 ranks"},
    {R"({"devices": "host:4", "parallel": {"tensor": 2}, "zero_optimization": {"stage": 3, "mics_shard_size": 4}})",
     "zero_optimization.mics_shard_size", "4 does not divide the 2 ranks that have the same weights"},
    {R"({"devices": "host:4", "parallel": {"tensor": 2}, "tensor_parallel": {"autotp_size": 4}})",
     "tensor_parallel.autotp_size", "is 4, and another key says 2"},
    {R"({"parallel": {"experts": 2}})", "parallel.experts", "other ranks have the other experts"},
    {R"({"devices": "host:4", "parallel": {"experts": 3}})", "parallel.experts",
     "3 does not divide the 4 ranks"},
    {R"({"devices": "host:6", "train_batch_size": 12, "parallel": {"experts": 3},
         "zero_optimization": {"stage": 3, "mics_shard_size": 2}})",
     "parallel.experts", "neither of 3 and the 2 ranks of a shard group divides the other"},
    {R"({"parallel": {"context": 0}})", "parallel.context", "found 0, expected a whole number, 1"},
    {R"({"parallel": {"context": 2}})", "parallel.context", "one rank has whole sequences"},
    {R"({"devices": "host:4", "parallel": {"context": 3}})", "parallel.context",
     "3 does not divide the 4 ranks, 2 and 4 do"},
    {R"({"devices": "host:4", "parallel": {"context": 8}})", "parallel.context",
     "8 does not divide the 4 ranks, 4 does"},
    {R"({"devices": "host:4", "data": {"seq_len": 30}, "parallel": {"context": 4}})", "parallel.context",
     "set data.seq_len to 24 or 32"},
    {R"({"devices": "host:4", "data": {"seq_len": 3}, "parallel": {"context": 4, "context_method": "ulysses"}})",
     "parallel.context", "set data.seq_len to 4"},
    {R"({"devices": "host:2", "parallel": {"context": 2, "context_method": "rings"}})",
     "parallel.context_method", "did you mean \"ring\"?"},
    {R"({"parallel": {"timeout_seconds": 0}})", "parallel.timeout_seconds",
     "found 0, expected a number above 0"},
    {R"({"parallel": {"timeout_second": 5}})", "parallel.timeout_second", "did you mean timeout_seconds?"},
    {R"({"pipeline": {"stages": 4}})", "pipeline.stages", "each stage has ranks of its own"},
    {R"({"parallel": {"pipeline": 2}})", "parallel.pipeline", "each stage has ranks of its own"},
    {R"({"devices": "host:4", "parallel": {"pipeline": 3}})", "parallel.pipeline",
     "3 does not divide the 4 ranks"},
    {R"({"devices": "host:4", "parallel": {"tensor": 4, "pipeline": 2}})", "parallel.pipeline",
     "tensor 4 x pipeline 2 does not divide the 4 ranks"},
    {R"({"devices": "host:8", "train_batch_size": 16, "parallel": {"tensor": 2, "context": 3}})",
     "parallel.context", "3 does not divide the 4 ranks with the same part of a layer, 2 and 4 do"},
    {R"({"devices": "host:4", "parallel": {"tensor": 3, "context": 2, "pipeline": 2}})", "parallel.context",
     "tensor 3 x context 2 x pipeline 2 does not divide the 4 ranks"},
    {R"({"devices": "host:4", "parallel": {"pipeline": 2}, "pipeline": {"stages": 4}})", "pipeline.stages",
     "is 4, and parallel.pipeline is 2"},
    {R"({"parallel": {"pipeline": 0}})", "parallel.pipeline", "found 0"},
    {R"({"devices": "host:2", "parallel": {"pipeline": 2, "stage_layers": [2]}})", "parallel.stage_layers",
     "has 1 numbers, and 2 stages with 1 chunks each have 2 stretches of layers"},
    {R"({"devices": "host:2", "parallel": {"pipeline": 2, "stage_layers": [2, 0]}})", "parallel.stage_layers",
     "found [2,0], expected a list of whole numbers from 1 to 65536"},
    {R"({"devices": "host:2", "parallel": {"pipeline": 2, "stage_layers": 2}})", "parallel.stage_layers",
     "expected a list of whole numbers"},
    {R"({"parallel": {"pipeline_schedule": "zero_bubbles"}})", "parallel.pipeline_schedule",
     "did you mean \"zero_bubble\"?"},
    {R"({"tensor_parallel": {"autotp_size": 4}})", "tensor_parallel.autotp_size",
     "are on ranks of their own"},
    {R"({"tensor_parallel": {"tp": {"tp_size": 2}}})", "tensor_parallel.tp.tp_size",
     "are on ranks of their own"},
    {R"({"optimizer": {"type": "OneBitAdam"}})", "optimizer.type", "use \"AdamW\""},
    {R"({"optimizer": {"type": "Lamb"}})", "optimizer.type",
     "expected \"AdamW\", \"Adam\", \"SGD\" or \"Lion\""},
    {R"({"optimizer": {"type": "AdamWW"}})", "optimizer.type", "did you mean \"AdamW\"?"},
    {R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})", "optimizer.params.amsgrad",
     "not supported"},
    {R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}, "gradient_clipping": 2})",
     "optimizer.params.max_grad_norm", "is 1, and gradient_clipping is 2"},
    {R"({"scheduler": {"type": "LRRangeTest"}})", "scheduler.type", "not supported"},
    {R"({"scheduler": {"type": "WarmupCosinLR"}})", "scheduler.type", "did you mean \"WarmupCosineLR\"?"},
    {R"({"devices": "host", "aio": {"use_gds": true}})", "aio.use_gds", "trains on the processor"},
};

TEST_F(ConfigErrors, BadConfigurationsNameTheirPlace) {
  EXPECT_GE(std::size(kBad), 45u);
  for (const Bad& bad : kBad) {
    SCOPED_TRACE(bad.overlay);
    const Error error = usage_error([&] { return load_over(bad.overlay); });
    // A key that one of two files does not give is blamed on the file that has its surroundings.
    const std::string base = directory_ + "/base.json: " + bad.path,
                      over = directory_ + "/over.json: " + bad.path;
    const bool placed = error.where() == over || error.where() == base;
    EXPECT_TRUE(placed) << error.what();
    EXPECT_HAS(error.what(), bad.message);
    // What was found is written in the overlay, so that is the file to blame.
    if (error.message().rfind("found", 0) == 0 || error.message() == "is not a known key") {
      EXPECT_EQ(error.where(), over);
    }
  }
}

TEST_F(ConfigErrors, AModelMadeOfSeveralSourcesNamesThem) {
  const Error error =
      usage_error([&] { return load_over(R"({"model": {"n_layers": 3}})", {"model.n_head=4"}); });
  EXPECT_EQ(error.where(), base_ + " + --set + " + directory_ + "/over.json: model");
  EXPECT_HAS(error.what(), "n_layers");
}

TEST_F(ConfigErrors, SwitchesThatAreOffSayNothing) {
  const RunConfig run = load_over(R"({
    "fp16": {"enabled": false, "loss_scale": 128}, "amp": {"enabled": false}, "curriculum_learning": {"enabled": false},
    "elasticity": {"enabled": false, "max_train_batch_size": 4}, "flops_profiler": {"enabled": false, "top_modules": 2},
    "compression_training": {}, "dump_state": false, "sparse_gradients": false, "data_types": {"grad_accum_dtype": "fp32"},
    "pipeline": {"stages": 1}, "tensor_parallel": {"autotp_size": 0}, "gradient_predivide_factor": 1,
    "prescale_gradients": false, "data_parallel_size": 1})");
  EXPECT_EQ(run.warnings, Strings{});
}

TEST_F(ConfigErrors, FeaturesThatAreOnButMissingWarn) {
  const RunConfig run = load_over(R"({
    "wandb": {"enabled": true, "project": "p"}, "comms_logger": {"enabled": true}, "autotuning": {"enabled": true},
    "dump_state": true, "data_types": {"grad_accum_dtype": "bf16"}, "gradient_predivide_factor": 2,
    "compile": {"deepcompile": true},
    "tiers": {"ram": {"latency_seconds": 1}, "nvme": [{"path": "a"}, {"path": "b", "ram": {"duplex": true}}]},
    "activation_checkpointing": {"number_checkpoints": 4, "partition_activations": true}})");
  EXPECT_EQ(
      without_effect(run, directory_ + "/over.json"),
      (std::set<std::string>{"wandb", "comms_logger", "autotuning", "dump_state",
                             "data_types.grad_accum_dtype", "gradient_predivide_factor", "compile",
                             "tiers.ram", "tiers.nvme.1.ram", "activation_checkpointing.number_checkpoints",
                             "activation_checkpointing.partition_activations"}));
}

TEST_F(ConfigErrors, SettingsThatDoNothingBesideOthersAreTold) {
  const RunConfig run = load_over(R"({
    "data": {"validation": 0}, "eval": {"every": 5, "batches": 2}, "sample": {"prompt": "once"},
    "checkpoint": {"keep": 3, "state": "copy"},
    "fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 1,
             "consecutive_hysteresis": true, "min_loss_scale": 2},
    "parallel": {"pipeline_schedule": "gpipe", "pipeline_group": 2, "context_method": "ulysses",
                 "quantized_gradient_bits": 8}})");
  EXPECT_EQ(without_effect(run, directory_ + "/over.json"),
            (std::set<std::string>{"eval.every", "eval.batches", "sample.prompt", "checkpoint.keep",
                                   "checkpoint.state", "fp16.initial_scale_power", "fp16.loss_scale_window",
                                   "fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale",
                                   "parallel.pipeline_schedule", "parallel.pipeline_group",
                                   "parallel.context_method", "parallel.quantized_gradient_bits"}));
  EXPECT_EQ(load_over(R"({"eval": {"every": 5, "batches": 2}, "data": {"validation": 0.1},
    "sample": {"prompt": "once", "tokens": 5}, "checkpoint": {"keep": 3, "state": "copy", "every": 2},
    "fp16": {"enabled": true, "initial_scale_power": 8, "hysteresis": 1}})")
                .warnings,
            Strings{});
}

TEST_F(ConfigErrors, LearningRatesThatAreNotReachedAreTold) {
  EXPECT_TRUE(warns(load_over(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 51}}})"),
                    "warmup_num_steps: 51 steps are more than the 50 of the run"));
  EXPECT_TRUE(warns(load_over(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5,
                      "warmup_max_lr": 0.5}}})"),
                    "warmup_max_lr: 0.5 takes the place of optimizer.params.lr, which is 0.001"));
}

// Whatever is done to a good file, there is an Error or a configuration within its ranges, never anything
// else.
TEST_F(ConfigErrors, MutatedFilesAreRefusedOrValid) {
  std::ifstream in(shipped("deepspeed/full_example.json"));
  const std::string original{std::istreambuf_iterator<char>(in), {}};
  constexpr std::uint32_t kSeed = 20240607;
  std::uint32_t state = kSeed;
  const auto below = [&](std::size_t bound) {
    state = state * 1664525u + 1013904223u;
    return static_cast<std::size_t>((std::uint64_t{state} * bound) >> 32);
  };
  constexpr std::string_view kAlphabet = "{}[]\",:0123456789-.eE truefalsn\n/*";
  int refused = 0, accepted = 0;
  for (int i = 0; i < 600; ++i) {
    std::string text = original;
    for (std::size_t n = 1 + below(3); n > 0; --n) {
      const std::size_t at = below(text.size());
      const std::size_t kind = below(3);
      if (kind == 0) text.erase(at, 1 + below(6));
      if (kind == 1) text[at] = kAlphabet[below(kAlphabet.size())];
      if (kind == 2) text.insert(at, 1, kAlphabet[below(kAlphabet.size())]);
    }
    try {
      const RunConfig run = load_over(text);
      ++accepted;
      EXPECT_GE(run.micro_batch, 1) << "seed " << kSeed << ", round " << i;
      EXPECT_GE(run.optimizer.lr, 0) << "seed " << kSeed << ", round " << i;
      EXPECT_EQ(run.aio.block_size % 4096, 0) << "seed " << kSeed << ", round " << i;
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.code(), Errc::kUsage) << "seed " << kSeed << ", round " << i;
      EXPECT_NE(error.where(), "") << "seed " << kSeed << ", round " << i;
    }
  }
  EXPECT_GT(refused, 200);
  EXPECT_GT(accepted, 10);
}

}  // namespace
}  // namespace zg
