// The directory in which a run leaves its results (output.dir): log.jsonl, config.json, model/ or adapter/.
#pragma once
#include <memory>
#include <string>

#include "ziggurat/train/observers.hpp"

namespace zg {

class DirectoryLock;

// Gives the run exclusive use of the directory while this object lives, since otherwise the logs and models
// of two runs could mix. Only the first process of a run has one.
class OutputDirectory {
 public:
  // Makes the directory if it does not exist, and locks it. Throws Error(kUsage) if another run has locked
  // it, or if it cannot be written to.
  explicit OutputDirectory(const RunConfig& config);
  // Removes the directory if this object has made it and it is empty.
  ~OutputDirectory();
  // To be called once the run is prepared. Writes config.json, and begins the log or continues the log of the
  // run that is resumed. Warns which results of another run it replaces. Throws Error(kIo).
  std::unique_ptr<StepLog> begin(const Trainer& trainer);

 private:
  std::unique_ptr<DirectoryLock> lock_;
};

// The keys whose values differ in two configurations, as "optimizer.params.lr". The keys in `left_out` are
// not compared. For a text that is no configuration the result is the key "".
std::vector<std::string> differing_keys(const std::string& a, const std::string& b,
                                        const std::vector<std::string>& left_out);

}  // namespace zg
