// The families of models: what files, configurations and people call them.
#pragma once
#include <array>
#include <iterator>
#include <string>

#include "ziggurat/model/config.hpp"

namespace zg::model {

// The names of parameters in a family's files.
struct FileNames {
  const char* model;      // before the names of the model's own parameters, in files of models with a head
  bool kept;              // whether Param::name has it, too
  const char* layers;     // before a layer's number, in Param::name
  const char* embedding;  // the table of tokens
  const char* norm;       // the last norm, without ".weight"
};

struct Family {
  Arch arch;
  const char* name;          // in the "model" section of a run
  const char* model_type;    // in config.json
  const char* architecture;  // the first of "architectures" in config.json
  const char* title;         // for people
  FileNames files = {"model.", true, "model.layers", "model.embed_tokens.weight", "model.norm"};
  FamilyForm form = {};
};
const std::array<Family, std::size(kFamilies)>& families();
const Family& family_of(Arch arch);
// What is before a layer's number in the names of a model with a head: "transformer.h", "model.layers".
std::string layers_with_head(Arch arch);
// All names, each in quotes: "gpt2, llama ... and gemma3", with `last` between the last two.
std::string family_names(const char* quote = "", const char* last = " and ");

}  // namespace zg::model
