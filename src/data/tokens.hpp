// Opens token files of the user, which any program may have written: as their companion files describe them,
// and with checks for signs that they are read with the wrong type.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "data/token_description.hpp"
#include "ziggurat/data/token_file.hpp"

namespace zg {

struct Tokens {
  std::shared_ptr<const TokenFile> file;
  std::shared_ptr<const MaskFile> mask;  // null: all are targets
};

// `dtype` is used if no companion file states the type; none: uint16, or uint32 if the contents look like it.
// Throws Error(kUsage) for files of other programs, and for ids that are wider than the type.
Tokens open_raw_tokens(const std::string& path, std::optional<DType> dtype);

// Throws Error(kUsage) for the first id that is negative or not below `limit` (above 0), the size of `whose`
// vocabulary ("model's"). ids[0] is the file's token `first`.
void check_token_ids(const Tokens& tokens, std::int64_t first, std::span<const std::int32_t> ids,
                     std::int64_t limit, const char* whose);
// Throws Error(kUsage) for the id at `position`, which is outside of `vocabulary`.
[[noreturn]] void throw_bad_token(const std::string& path, std::int64_t position, std::int32_t id,
                                  const std::string& vocabulary, const std::string& hint);

}  // namespace zg
