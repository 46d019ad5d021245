// The section "checkpoint": when a run saves its state, and what a resumed run may change.
#include <filesystem>

#include "config/sections.hpp"

namespace zg::config {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMost = 1'000'000'000;  // as the steps

const Keys& export_keys() {
  using E = CheckpointConfig::Export;
  static const Keys keys({
      {"path", TextSpec{},
       "Directory of copies of the checkpoints, on any file system, for this run alone. "
       "They are made while the training goes on and need no drive of `tiers.nvme`; `train "
       "--resume` goes on from a copy that is newer than what `checkpoint.path` has.",
       "required"},
      {"every", &E::every, IntSpec{.min = 1, .max = kMost},
       "Every n-th checkpoint is copied, and the last one of a run that has done all its "
       "steps. If another copy is still being made, the next checkpoint is copied instead."},
      {"keep", &E::keep, IntSpec{.min = 1, .max = kMost},
       "Number of newest copies that are kept. Older ones are removed when a new one is complete."},
  });
  return keys;
}

}  // namespace

const Keys& checkpoint_keys() {
  using C = CheckpointConfig;
  constexpr const char* kOneForm = "there is one form, which every number of ranks loads";
  static const Keys keys({
      {"every", &C::every, IntSpec{.max = kMost}, "Steps between checkpoints; 0: none by steps."},
      {"every_seconds", &C::every_seconds, NumberSpec{.range = kSeconds},
       "Seconds between checkpoints, counted from when the training went on after the last "
       "one; the next one follows the step that is then under way. 0: none by time."},
      {"keep", &C::keep, IntSpec{.min = 1, .max = kMost},
       "Number of newest checkpoints that are kept. Older ones are removed when a new one is complete."},
      {"on_interrupt", BoolSpec{},
       "Whether a run that is interrupted (Ctrl-C) writes a checkpoint before it ends.",
       "`true` where `every` or `every_seconds` asks for checkpoints"},
      {"state", &C::state,
       ChoiceSpec(C::State::kAuto,
                  {{"auto", C::State::kAuto}, {"pin", C::State::kPin}, {"copy", C::State::kCopy}}),
       "What becomes of state that lies on the drives of `tiers.nvme`. `\"pin\"`: it stays in "
       "the drives' files, where the checkpoint names and pins it, and only what is dirty "
       "in memory is written back; the drives need room for `keep` + 1 versions of the "
       "state, one more with `export`. `\"copy\"`: all state is copied into the checkpoint. "
       "`\"auto\"`: `\"pin\"` where that can be done; else the start of the run says why it "
       "copies."},
      {"path", TextSpec{}, "Directory of the checkpoints. All processes of a run must see it.",
       "`checkpoints` in `output.dir`"},
      {"export", SectionSpec{export_keys},
       "Copies checkpoints elsewhere, behind the training. A copy needs no drive of `tiers.nvme`, and `train "
       "--resume` finds it where `path` has no checkpoint that is newer.",
       "no copies"},
      {"allow", FormSpec{},
       "Keys that a resumed run may change although results depend on them, by the names that the refusal "
       "shows.",
       "`[]`", "list of texts"},
      {"tag_validation", kIgnoredText, "all ranks agree on a checkpoint before it is written"},
      {"load_universal", kIgnoredFlag, kOneForm},
      {"use_node_local_storage", kIgnoredFlag, "all processes write to one directory"},
      {"parallel_write", kIgnoredObject, "each rank writes its own part in any case"},
      {"writer", kIgnoredObject, kOneForm},
  });
  return keys;
}

void read_checkpoint(Section& root, RunConfig& run) {
  CheckpointConfig& out = run.checkpoint;
  out.path = run.output_dir + "/checkpoints";
  auto section = root.section("checkpoint");
  if (!section) return;
  section->read_into(out);
  out.on_interrupt = section->has("on_interrupt") ? section->boolean("on_interrupt") : out.regular();
  out.path = section->text("path", out.path);
  if (out.path.empty()) section->wrong("path", "a directory");
  if (auto exports = section->section("export")) {
    exports->require("path", "e.g. \"path\": \"/mnt/backup/run\"");
    out.exports.path = exports->text("path");
    if (out.exports.path.empty()) exports->wrong("path", "a directory");
    exports->read_into(out.exports);
    exports->finish();
    if (!out.asked()) {
      section->fail("export", "copies checkpoints, and the run writes none",
                    "say when it shall: checkpoint.every, every_seconds or on_interrupt");
    }
    std::error_code unknown;
    const auto whole = [&](const std::string& path) {
      return fs::weakly_canonical(fs::absolute(path + "/.", unknown), unknown);
    };
    if (whole(out.exports.path) == whole(out.path)) {
      section->fail("export.path", "is the directory of the checkpoints themselves",
                    "name another directory, best on other drives");
    }
  }
  if (const Json* allow = section->find("allow")) {
    if (!allow->is_array()) section->wrong("allow", "a list of keys, e.g. [\"optimizer.params.lr\"]");
    for (const Json& key : *allow) {
      if (!key.is_string()) section->wrong("allow", "a list of keys, e.g. [\"optimizer.params.lr\"]");
      out.allow.push_back(key.get<std::string>());
    }
  }
  section->finish();
}

}  // namespace zg::config
