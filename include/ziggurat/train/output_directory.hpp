// The directory in which a run leaves its results (output.dir): log.jsonl, config.json, model/ or adapter/.
#pragma once
#include <memory>
#include <string>

#include "ziggurat/train/observers.hpp"

namespace zg {

class DirectoryLock;

// The run has the directory for itself while this lives: the log and the model of two runs would mix. In the
// first process of a run alone.
class OutputDirectory {
 public:
  // Makes the directory where it is not there, and takes it. Throws Error(kUsage) where another run has it,
  // or it cannot be written to.
  explicit OutputDirectory(const RunConfig& config);
  // Removes the directory again where this one has made it, and nothing is in it.
  ~OutputDirectory();
  // Once the run is prepared: writes config.json, and begins the log, or goes on with the one of the run that
  // was resumed. Says which results of another run it replaces. Throws Error(kIo).
  std::unique_ptr<StepLog> begin(const Trainer& trainer);

 private:
  std::unique_ptr<DirectoryLock> lock_;
};

// The keys of two configurations whose values differ, as "optimizer.params.lr"; the keys of `left_out` are
// not compared. Texts that are no configuration differ in "".
std::vector<std::string> differing_keys(const std::string& a, const std::string& b,
                                        const std::vector<std::string>& left_out);

}  // namespace zg
