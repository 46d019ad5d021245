// Records the programs that a store has run: each different one once, and the sequence in which they ran.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "ziggurat/store/program.hpp"

namespace zg {

class Recorder {
 public:
  void ran(const Program& program) {
    const auto [it, fresh] =
        by_hash_.try_emplace(program.hash(), static_cast<std::int32_t>(programs_.size()));
    if (fresh) programs_.push_back(program);
    sequence_.push_back(it->second);
  }
  const std::vector<Program>& programs() const { return programs_; }
  const std::vector<std::int32_t>& sequence() const { return sequence_; }

 private:
  std::vector<Program> programs_;
  std::vector<std::int32_t> sequence_;
  std::unordered_map<std::uint64_t, std::int32_t> by_hash_;
};

}  // namespace zg
