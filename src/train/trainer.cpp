#include "ziggurat/train/trainer.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <numeric>

#include "train/drives.hpp"
#include "train/live_line.hpp"
#include "train/metrics.hpp"
#include "train/report.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/generate.hpp"

namespace zg {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void make_output_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    throw Error(Errc::kUsage, "output.dir " + directory, "cannot be created: " + error.message(),
                "choose a directory that can be written");
  }
  std::string name = directory + "/.ziggurat-XXXXXX";
  const int fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) {
    throw Error(Errc::kUsage, "output.dir " + directory, "cannot be written to: " + errno_text(errno),
                "choose a directory that can be written");
  }
  ::close(fd);
  ::unlink(name.c_str());
}

// The trace is written when the run is over: that it can be is found out before. What the file holds stays
// until then.
void check_trace_file(const std::string& path) {
  const int fresh = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  const int fd = fresh >= 0 || errno != EEXIST ? fresh : ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) {
    throw Error(Errc::kUsage, "--trace " + path, "cannot be written: " + errno_text(errno),
                "name a file that can be written");
  }
  ::close(fd);
  if (fresh >= 0) ::unlink(path.c_str());
}

struct Links {
  Roofs roofs;
  std::vector<double> drive_shares;  // empty: equal
};

// Why the first steps may take longer than those that follow. Writing everything once before them would cost
// the drives that same slow pass and gain nothing, so the run does not.
void tell_first_writes(const Roofs& roofs, std::int64_t nvme_bytes) {
  const double more = nvme_seconds(roofs, 0, nvme_bytes, nvme_bytes) - nvme_seconds(roofs, 0, nvme_bytes, 0);
  if (roofs.nvme_first_write > 0.9 * roofs.nvme_write || more < 0.1) return;
  log::info(
      "the drives write {} where nothing was written before, and {} later: {} go there first, by loading "
      "the model and in the first steps, and cost up to {} more",
      format_rate(roofs.nvme_first_write), format_rate(roofs.nvme_write), format_bytes(nvme_bytes),
      format_seconds(more));
}

// The roofs of the links that this run has. The drives are open, and are measured where the tier will lie.
Links measure_links(const RunConfig& config, Session& session) {
  Links links{measure_roofs(config), {}};
  Roofs& roofs = links.roofs;
  io::Engine* io = session.io();
  if (io == nullptr || session.layout().table.nvme_bytes() == 0) return links;
  if (config.aio.backend == io::Backend::kRam) {
    links.drive_shares = programmed_rates(config.tiers.nvme, config.tiers.ram);
    const std::vector<double>& rates = links.drive_shares;
    roofs.nvme_read = roofs.nvme_write = std::accumulate(rates.begin(), rates.end(), 0.0);
    const bool duplex = config.tiers.nvme.front().ram.value_or(config.tiers.ram).duplex;
    roofs.nvme_mixed = roofs.nvme_read * (duplex ? 2 : 1);
    return links;
  }
  const Traffic& planned = session.plan().per_step;
  const auto moved = static_cast<double>(planned.nvme_read + planned.nvme_write);
  // A step that only reads, or only writes, uses no mixture.
  roofs.nvme_mixed_reads =
      moved > 0 ? std::clamp(static_cast<double>(planned.nvme_read) / moved, 0.05, 0.95) : 0.5;
  const std::vector<DriveRates> rates = measure_drives(*io, config.aio.block_size, roofs.nvme_mixed_reads);
  for (std::size_t d = 0; d < rates.size(); ++d) {
    roofs.nvme_read += rates[d].read;
    roofs.nvme_write += rates[d].write;
    roofs.nvme_mixed += rates[d].mixed;
    roofs.nvme_first_write += rates[d].first_write;
    links.drive_shares.push_back(rates[d].mixed);
    if (rates.size() > 1) {
      const io::DriveReport drive = io->report(static_cast<int>(d));
      log::info("{} ({}): {} read, {} write, {} in the step's mixture, while all drives work", drive.name,
                drive.path, format_rate(rates[d].read), format_rate(rates[d].write),
                format_rate(rates[d].mixed));
    }
  }
  tell_first_writes(roofs, session.layout().table.nvme_bytes());
  return links;
}

class Loop {
 public:
  Loop(const RunConfig& config, Session& session, const Roofs& roofs)
      : config_(config), session_(session), roofs_(roofs), log_(config.output_dir + "/log.jsonl") {}

  // On the rank's thread.
  RunSummary run() {
    const auto begin = Clock::now();
    LiveLine live(session_, config_.steps);
    for (std::int64_t step = 0; step < config_.steps; ++step) {
      const bool stop = interrupted();
      if (stop) log::warning("interrupted: this step is the last one");
      const bool last = stop || step + 1 == config_.steps;
      const bool evaluate = session_.data().validation_tokens() > 0 &&
                            (last || (config_.eval_every > 0 && (step + 1) % config_.eval_every == 0));
      StepRecord record;
      record.step = step + 1;
      const UpdateRule rule = session_.rule();
      record.lr = rule.params.lr;
      if (session_.loss_scaler()) record.loss_scale = rule.loss_scale;
      live.begin(step + 1);
      record.result = session_.train_step(step, last || evaluate ? Then::kPause : Then::kTrain);
      live.end();
      note(record);
      if (evaluate) record.val_loss = summary_.val_loss = session_.evaluate();
      log_.write(record);
      show(record);
      if (last) break;
    }
    log::progress("");
    summary_.seconds = seconds_between(begin, Clock::now());
    session_.engine().flush();
    summary_.measured = session_.engine().settled_traffic();
    summary_.formula = session_.forecast();
    summary_.median_step = median(step_seconds_);
    summary_.tokens_per_second =
        static_cast<double>(config_.micro_batch * config_.accumulation_steps * config_.data.seq_len) /
        summary_.median_step;
    return summary_;
  }

 private:
  void note(StepRecord& record) {
    const StepResult& s = record.result;
    record.flops = session_.flops_per_step();
    const auto bound = [&] { return bound_of(roofs_, record.flops, s.traffic, s.first_written); };
    record.bound = bound();
    // The speed of drives of memory is known, not measured: a step that beats their bound is a bug, and must
    // show.
    Bound measured = record.bound;
    if (config_.aio.backend == io::Backend::kRam) measured.nvme = 0;
    if (raise_to(roofs_, measured, s.seconds)) record.bound = bound(), summary_.raised = true;
    summary_.roofs = roofs_;
    record.roofs = roofs_;
    record.peak_device = session_.device().arena().peak();
    record.peak_host = session_.host().peak();
    record.peak_nvme = session_.layout().table.nvme_bytes();
    record.skipped = summary_.skipped = session_.skipped();
    if (session_.loss_scaler()) summary_.loss_scale = session_.loss_scaler()->scale();
    if (summary_.steps++ == 0) summary_.first_loss = s.loss;
    summary_.last_loss = s.loss;
    step_seconds_.push_back(s.seconds);
    summary_.step_seconds += s.seconds;
    summary_.stall += s.stall_for;
  }

  void show(const StepRecord& record) const {
    const std::vector<double> recent(
        step_seconds_.end() - std::min<std::ptrdiff_t>(20, static_cast<std::ptrdiff_t>(step_seconds_.size())),
        step_seconds_.end());
    const double step = median(recent);
    if (record.val_loss)
      log::info("step {}: loss {:.4f}, validation loss {:.4f}", record.step, record.result.loss,
                *record.val_loss);
    log::progress(progress_line(record, config_.steps,
                                step * static_cast<double>(config_.steps - record.step),
                                static_cast<double>(record.result.tokens) / step));
  }

  const RunConfig& config_;
  Session& session_;
  Roofs roofs_;
  MetricsLog log_;
  RunSummary summary_;
  std::vector<double> step_seconds_;
};

void print_sample(const RunConfig& config, const std::string& model_dir) {
  Generator generator(model_dir);
  const Tokenizer* tokenizer = generator.tokenizer();
  if (tokenizer == nullptr) {
    log::warning("sample: this data has no tokenizer, so no text is generated");
    return;
  }
  const std::string prompt = config.sample_prompt.empty() ? "\n" : config.sample_prompt;
  GenerateOptions o;
  o.tokens = config.sample_tokens;
  o.temperature = 0.8;
  o.seed = config.seed;
  const auto ids =
      generator.generate(tokenizer->encode(prompt), o, [](std::int32_t) { return !interrupted(); });
  std::printf("\n--- a sample of %zu tokens ---\n%s%s\n", ids.size(), config.sample_prompt.c_str(),
              tokenizer->decode(ids).c_str());
}

}  // namespace

int train(const RunConfig& config, const TrainOptions& options) {
  for (const std::string& warning : config.warnings) log::warning("{}", warning);
  make_output_directory(config.output_dir);
  if (!options.trace_file.empty()) check_trace_file(options.trace_file);
  Trace trace;
  if (!options.trace_file.empty()) trace.start();
  if (options.watchdog != nullptr) options.watchdog->set_file(config.output_dir + "/state.txt");
  Session session(config, &trace, options.watchdog);
  if (options.mode == TrainOptions::Mode::kPlanOnly) {
    const Traffic t = session.plan().per_step;
    std::printf(
        "%s\nit fits: peak device %s, host %s\nbytes per step: nvme read %s, nvme write %s, host->device %s, "
        "device->host %s%s\n",
        session.describe().c_str(),
        format_bytes(session.plan().peak.device + session.layout().workspace_bytes()).c_str(),
        format_bytes(session.plan().peak.host).c_str(), format_bytes(t.nvme_read).c_str(),
        format_bytes(t.nvme_write).c_str(), format_bytes(t.host_to_device).c_str(),
        format_bytes(t.device_to_host).c_str(),
        session.goes_past_host() ? fmt::format("; of the nvme bytes past the host: read {}, written {}",
                                               format_bytes(t.direct_read), format_bytes(t.direct_write))
                                       .c_str()
                                 : "");
    return 0;
  }
  session.open_drives();  // before it is measured: a full drive may be mended, and one in use is left alone
  const Links links = measure_links(config, session);
  const Roofs& roofs = links.roofs;
  session.start(links.drive_shares);
  write_file_atomically(config.output_dir + "/config.json", config.resolved_json);
  log::info("ready\n{}", session.describe());

  RunSummary summary;
  // One thread per device; what it throws is thrown here.
  std::exception_ptr failure;
  {
    NamedThread rank("zg-rank0", [&] {
      try {
        Loop loop(config, session, roofs);
        summary = loop.run();
        log::info("saving the model to {}/model", config.output_dir);
        session.save_model(config.output_dir + "/model");
      } catch (...) {
        failure = std::current_exception();
      }
    });
  }
  log::progress("");
  if (failure) {
    // The timeline up to the failure may tell why; that it cannot be saved must not hide what failed.
    try {
      if (!options.trace_file.empty()) trace.save(options.trace_file);
    } catch (const Error& e) {
      log::warning("{}", e.what());
    }
    std::rethrow_exception(failure);
  }
  if (!options.trace_file.empty()) trace.save(options.trace_file);
  std::fputs(final_report(summary, session).c_str(), stdout);
  if (config.sample_tokens > 0 && !interrupted()) print_sample(config, config.output_dir + "/model");
  std::fflush(stdout);
  return interrupted() ? 130 : 0;
}

}  // namespace zg
