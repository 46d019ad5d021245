#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "ziggurat/base/file.hpp"
#include "ziggurat/train/observers.hpp"

namespace zg {

std::int64_t cut_log(const std::string& path, std::int64_t step, bool evaluated) {
  std::ifstream in(path);
  std::string kept;
  std::int64_t records = 0;
  for (std::string line; records < step && std::getline(in, line);) {
    auto record = nlohmann::ordered_json::parse(line, nullptr, false);
    const auto number = record.is_object() ? record.find("step") : record.end();
    if (number == record.end() || !number->is_number_integer() || *number != records + 1) break;
    if (++records == step && !evaluated && record.erase("val_loss") > 0) line = record.dump();
    kept += line + '\n';
  }
  write_file_atomically(path, kept);
  return records;
}

StepLog::StepLog(const std::string& path, std::int64_t steps_done)
    : path_(path), file_(std::fopen(path.c_str(), steps_done > 0 ? "a" : "w"), &std::fclose) {
  if (!file_)
    throw Error(Errc::kIo, path, "cannot be written: " + errno_text(errno), "choose another output.dir");
}

std::string step_json(const StepRecord& r) {
  const StepResult& s = r.result;
  const auto ms = [](double seconds) { return seconds * 1e3; };
  nlohmann::ordered_json j;
  j["step"] = r.step;
  j["loss"] = s.loss;
  if (r.val_loss) j["val_loss"] = *r.val_loss;
  j["grad_norm"] = s.grad_norm;
  j["lr"] = r.lr;
  if (r.loss_scale) {
    j["loss_scale"] = *r.loss_scale;
    j["skipped"] = r.skipped;
  }
  j["tokens"] = s.tokens;
  j["step_ms"] = ms(s.seconds);
  j["tokens_per_s"] = static_cast<double>(s.tokens) / s.seconds;
  j["mfu"] = r.roofs.flops > 0 ? r.flops / s.seconds / r.roofs.flops : 0.0;
  j["phase_ms"] = {{"forward", ms(s.phases.forward)},
                   {"backward", ms(s.phases.backward)},
                   {"optimizer", ms(s.phases.optimizer)},
                   {"stall", ms(s.stall)}};
  j["stall_ms"] = {{"reads", ms(s.stall_for[StallCause::kReads])},
                   {"write_backs", ms(s.stall_for[StallCause::kWriteBacks])},
                   {"memory", ms(s.stall_for[StallCause::kMemory])},
                   {"copies", ms(s.stall_for[StallCause::kCopies])},
                   {"optimizer", ms(s.stall_for[StallCause::kOptimizer])},
                   {"gathers", ms(s.stall_for[StallCause::kGathers])},
                   {"ranks", ms(s.stall_for[StallCause::kRanks])},
                   {"stages", ms(s.stall_for[StallCause::kStages])},
                   {"parts", ms(s.stall_for[StallCause::kParts])},
                   {"other", ms(s.stall_for[StallCause::kOther])}};
  j["loader_ms"] = ms(r.loader_seconds);
  std::int64_t exchanged = 0;
  for (const CommTraffic& t : s.comm.all) exchanged += t.sent;
  j["bytes"] = {{"nvme_read", s.traffic.nvme_read},
                {"nvme_write", s.traffic.nvme_write},
                {"h2d", s.traffic.host_to_device},
                {"d2h", s.traffic.device_to_host},
                {"comm", exchanged}};
  if (r.ranks() > 1) {
    for (int i = 0; i < kCommAxes; ++i) {
      const auto axis = static_cast<CommAxis>(i);
      if (!is_of_sharding(axis) && s.comm[axis].calls == 0) continue;
      j["comm"][name_of(axis)] = {{"bytes", s.comm[axis].sent}, {"ms", ms(s.comm_seconds[axis])}};
    }
    const Straggler slowest = slowest_of(r.own_seconds), fastest = fastest_of(r.own_seconds);
    j["ranks"] = {{"count", r.ranks()},
                  {"slowest", slowest.rank},
                  {"slowest_ms", ms(slowest.seconds)},
                  {"fastest", fastest.rank},
                  {"fastest_ms", ms(fastest.seconds)}};
  }
  if (!r.stage_seconds.empty()) {
    j["pipeline"] = {{"bubble", r.bubble}, {"bubble_formula", r.bubble_formula}};
    for (const double seconds : r.stage_seconds) j["pipeline"]["stage_ms"].push_back(ms(seconds));
  }
  j["peak_bytes"] = {{"device", r.peak_device}, {"host", r.peak_host}, {"nvme", r.peak_nvme}};
  j["bound_ms"] = ms(r.bound.seconds);
  j["bound_by"] = r.bound.by;
  return j.dump();
}

void StepLog::on_step(const StepRecord& r) {
  const std::string line = step_json(r) + "\n";
  if (std::fputs(line.c_str(), file_.get()) < 0 || std::fflush(file_.get()) != 0) {
    throw Error(Errc::kIo, path_, "cannot be written: " + errno_text(errno), "free space on its file system");
  }
}

void StepLog::on_checkpoint(std::int64_t) {
  // Where it fails, a loss of power may cost lines of the log, and a resumed run says so.
  (void)::fdatasync(fileno(file_.get()));
}

}  // namespace zg
