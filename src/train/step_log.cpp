#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/train/observers.hpp"

namespace zg {

std::int64_t cut_log(const std::string& path, std::int64_t step, bool evaluated) {
  std::string kept;
  std::int64_t records = 0;
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0 || errno != ENOENT) {
    const InputFile file(path, "the log of a run");
    LineReader lines(file);
    for (std::string line; records < step && lines.next(line);) {
      auto record = nlohmann::ordered_json::parse(line, nullptr, false);
      const auto number = record.is_object() ? record.find("step") : record.end();
      if (number == record.end() || !number->is_number_integer() || *number != records + 1) break;
      if (++records == step && !evaluated && record.erase("val_loss") > 0) line = record.dump();
      kept += line + '\n';
    }
  }
  write_file_atomically(path, kept);
  return records;
}

StepLog::StepLog(const std::string& path, std::int64_t steps_done) : path_(path) {
  const int how = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | (steps_done > 0 ? 0 : O_TRUNC);
  fd_ = ::open(path.c_str(), how, 0644);
  struct stat st {};
  const int error = fd_ < 0 || ::fstat(fd_, &st) != 0 ? errno : 0;
  if (error == 0 && S_ISREG(st.st_mode)) {
    end_ = st.st_size;
    return;
  }
  if (fd_ >= 0) (void)::close(fd_);
  throw Error(
      Errc::kIo, path,
      error != 0 ? "cannot be written: " + errno_text(error) : "is no regular file, so that it can be no log",
      "choose another output.dir");
}

StepLog::~StepLog() {
  if (!waiting_.empty() && write_waiting() == 0) since_ = 0;
  if (dropped_ > 0) log::warning("{} lacks {} records: there was no room for them", path_, dropped_);
  if (since_ > 0)
    log::warning("{} lacks the records from step {} on: there was no room for them", path_, since_);
  if (fd_ >= 0) (void)::close(fd_);
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
  if (s.routers.experts > 0) {
    j["router"] = {{"balance", s.routers.balance},
                   {"z", s.routers.z},
                   {"largest_load", s.routers.largest},
                   {"idle_experts", s.routers.idle}};
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
  j["bytes"] = {{"nvme_read", s.traffic.nvme_read()},
                {"nvme_write", s.traffic.nvme_write()},
                {"h2d", s.traffic[kToDevice]},
                {"d2h", s.traffic[kToHost]},
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
  if (waiting_.size() + line.size() > kMostWaiting) {
    ++dropped_;
  } else {
    waiting_ += line;
  }
  const std::int64_t since = since_ > 0 ? since_ : r.step;
  const int error = write_waiting();
  if (error == 0 && since_ > 0) {
    log::info("{} has all records again, of steps {} to {}, too", path_, since_, r.step);
    since_ = 0;
  } else if (error != 0 && since_ == 0) {
    log::warning(
        "{} cannot be written: {}; records wait in memory from step {} on, and the training goes on: make "
        "room "
        "there",
        path_, errno_text(error), since);
    since_ = since;
  }
}

void StepLog::write_rest_to(const std::string& directory) {
  if (waiting_.empty() || write_waiting() == 0) return;
  const std::string rest = directory + "/log.jsonl";
  try {
    write_file_atomically(rest, waiting_);
  } catch (const Error&) {
    return;  // the destructor says what is lost
  }
  log::warning("{} has the records from step {} on, for which {} had no room", rest, since_, path_);
  waiting_.clear();
  since_ = 0;
}

// Cuts off a line that was written only partly, so that readers of the file find complete lines.
int StepLog::write_waiting() {
  const auto bytes = static_cast<std::int64_t>(waiting_.size());
  std::int64_t done = 0;
  int error = 0;
  while (done < bytes && error == 0) {
    const ssize_t n = ::write(fd_, waiting_.data() + done, static_cast<std::size_t>(bytes - done));
    if (n > 0) {
      done += n;
    } else if (n == 0 || errno != EINTR) {
      error = n == 0 ? EIO : errno;
    }
  }
  if (done < bytes) {
    const std::size_t newline =
        done > 0 ? waiting_.rfind('\n', static_cast<std::size_t>(done - 1)) : waiting_.npos;
    done = newline == waiting_.npos ? 0 : static_cast<std::int64_t>(newline) + 1;
    (void)::ftruncate(fd_, end_ + done);
  }
  end_ += done;
  waiting_.erase(0, static_cast<std::size_t>(done));
  return error;
}

void StepLog::on_checkpoint(std::int64_t) {
  // If this fails, a loss of power may lose lines of the log, and a resumed run says so.
  (void)::fdatasync(fd_);
}

}  // namespace zg
