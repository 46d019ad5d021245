// The keys that a configuration may have, in tables made from the readers that parse them: for the reference
// in docs/, and for `ziggurat config keys`. Any thread.
#pragma once
#include <string>
#include <vector>

namespace zg {

// Texts may hold `code`, as in Markdown.
struct KeyTable {
  std::string name;  // "aio", "tiers.nvme", ...
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;  // a cell for each column; the first is the key: `aio.queues`
};

// A table of key, type, default and meaning for each section that has keys with an effect. Then two tables of
// DeepSpeed's other keys: those without effect ("deepspeed-no-effect"), and those that are refused
// ("deepspeed-refused").
std::vector<KeyTable> config_key_tables();

}  // namespace zg
