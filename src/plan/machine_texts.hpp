// The files of configs/machines/, which the build compiles into the program.
#pragma once
#include <span>

namespace zg {

struct MachineText {
  const char* name;
  const char* text;
};
std::span<const MachineText> machine_texts();

}  // namespace zg
