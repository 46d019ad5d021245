// Records that are no documents yet: what they are, and which command makes documents or tokens of them.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace zg {

// Throws Error(kUsage) for a JSON object of the file `path` without "text", "tokens" and "input_ids".
[[noreturn]] void refuse_record(const nlohmann::json& record, const std::string& name);

}  // namespace zg
