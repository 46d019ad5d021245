// Opens an engine and returns the fallbacks it took as texts: make_engine() logs them, the probes report
// them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct Opened {
  std::unique_ptr<Engine> engine;
  std::vector<std::string> warnings, notices;
};
Opened open_engine(const EngineOptions& options, const std::vector<DriveOptions>& drives);

}  // namespace zg::io
