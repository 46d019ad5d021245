// The families of models: what files, configurations and people call them.
#pragma once
#include <array>
#include <iterator>
#include <string>

#include "ziggurat/model/config.hpp"

namespace zg::model {

struct Family {
  Arch arch;
  const char* name;          // in the "model" section of a run
  const char* model_type;    // in config.json
  const char* architecture;  // the first of "architectures" in config.json
  const char* title;         // for people
};
const std::array<Family, std::size(kFamilies)>& families();
const Family& family_of(Arch arch);
// All names, each in quotes: "gpt2, llama ... and gemma3", with `last` between the last two.
std::string family_names(const char* quote = "", const char* last = " and ");

}  // namespace zg::model
