// Errors for JSON records that are not documents: their kind, and the command that converts them.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace zg {

// Throws Error(kUsage) for a JSON object of the file `path` without "text", "tokens" and "input_ids".
[[noreturn]] void refuse_record(const nlohmann::json& record, const std::string& name);

}  // namespace zg
