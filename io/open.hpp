// Opening an engine, with what was fallen back to as a value: make_engine() logs it, the probes report it.
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
