// What the writer and the reader of checkpoints agree on. Private to src/train.
#pragma once

namespace zg {

// In the name of a directory that is no checkpoint yet, or no longer.
inline constexpr const char* kUnfinished = ".part-";
// In a file's __metadata__, for each tensor: the first element of the piece, and the XXH3 of its bytes.
inline constexpr const char* kNoteForm = "%lld %16llx";

}  // namespace zg
