// The module ziggurat._train: whole training runs in this process. It is separate from _core, since it needs
// the engine with all kernels, which users of only the store do not need.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <vector>

#include "python/errors.hpp"
#include "python/gil.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/train/machine.hpp"
#include "ziggurat/train/output_directory.hpp"

namespace zg::python {
namespace {

// Passes each step to a Python function. If that raises, the next step is the last.
class Callback final : public TrainObserver {
 public:
  Callback(nb::callable call, std::atomic<bool>& stop) : call_(std::move(call)), stop_(stop) {}
  void on_step(const StepRecord& record) override {
    if (failure) return;
    const std::string json = step_json(record);
    if (interpreter_ends()) return;  // the run ends with this step
    nb::gil_scoped_acquire held;
    try {
      if (nb::object(call_(json)).ptr() == Py_False) stop_ = true;
    } catch (nb::python_error&) {
      failure = std::current_exception();
      stop_ = true;
    }
  }
  std::exception_ptr failure;

 private:
  nb::callable call_;
  std::atomic<bool>& stop_;
};

nb::dict dict_of(const RunSummary& s) {
  nb::dict out;
  out["steps"] = s.steps, out["seconds"] = s.seconds, out["median_step_seconds"] = s.median_step;
  out["tokens_per_second"] = s.tokens_per_second, out["first_loss"] = s.first_loss,
  out["last_loss"] = s.last_loss;
  out["val_loss"] = s.val_loss, out["skipped"] = s.skipped, out["stopped"] = s.stopped;
  out["peak_host_bytes"] = s.peak_host, out["peak_resident_bytes"] = s.peak_resident;
  out["nvme_read_bytes"] = s.measured.nvme_read(), out["nvme_write_bytes"] = s.measured.nvme_write();
  return out;
}

RunSummary run(const ConfigSource& source, const std::optional<std::string>& resume, TrainObserver& callback,
               const std::atomic<bool>& stop) {
  const RunConfig config = load_config(source, this_machine());
  OutputDirectory output(config);
  Trainer trainer(config, {.stop = [&] { return stop.load(); }, .resume = resume});
  trainer.prepare();
  const std::unique_ptr<StepLog> log = output.begin(trainer);
  const RunSummary summary = trainer.run({log.get(), &callback});
  const std::string saved = trainer.save_model();
  trainer.finish_exports();
  if (saved != config.model_dir()) {
    throw Error(Errc::kIo, config.model_dir(), "could not be written; the model is whole in " + saved,
                "make room and move it there");
  }
  return summary;
}

// on_step(text) gets each step as JSON; if it returns false, the next step is the last. So it is after
// Ctrl-C, and the model is saved.
nb::dict train(const std::vector<std::string>& files, const std::vector<std::string>& overrides,
               const std::optional<std::string>& resume, nb::callable on_step) {
  std::atomic<bool> stop{false};
  Callback callback(on_step, stop);
  bool interrupted = false;
  RunSummary summary;
  {
    WithoutGil released;
    // Only Python's main thread handles signals, so it must not run the training itself.
    auto running = std::async(std::launch::async, [&] {
      return run({.files = files, .overrides = overrides}, resume, callback, stop);
    });
    while (running.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
      if (!interrupted && signal_raised()) stop = interrupted = true;
    }
    summary = running.get();
  }
  if (interrupted) throw_interrupted();
  if (callback.failure) std::rethrow_exception(callback.failure);
  return dict_of(summary);
}

// The directory where a run with this configuration writes its files.
std::string output_dir(const std::vector<std::string>& files, const std::vector<std::string>& overrides) {
  WithoutGil released;
  return load_config({.files = files, .overrides = overrides}, this_machine()).output_dir;
}

}  // namespace
}  // namespace zg::python

NB_MODULE(_train, m) {
  namespace nb = nanobind;
  m.doc() = "Training runs under ziggurat.train(). Use the package, not this module.";
  zg::python::bind_errors();
  m.def("train", zg::python::train, nb::arg("files"), nb::arg("overrides"), nb::arg("resume").none(),
        nb::arg("on_step"));
  m.def("output_dir", zg::python::output_dir);
}
