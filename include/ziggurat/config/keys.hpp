// The keys of a configuration, as the readers that parse them know them: for the reference, and for `ziggurat
// config keys`. Any thread.
#pragma once
#include <string>
#include <vector>

namespace zg {

// Texts may hold `code`, as in Markdown.
struct KeyTable {
  std::string name;  // "aio", "tiers.nvme", ...
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;  // each begins with the whole key: `aio.queues`
};

// A table for each section in which something has an effect, in the order in which they are read: key, type,
// default and meaning. Then two of DeepSpeed's keys: those without effect ("deepspeed-no-effect"), and those that
// are refused
// ("deepspeed-refused").
std::vector<KeyTable> config_key_tables();

}  // namespace zg
