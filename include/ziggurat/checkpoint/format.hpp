// What the writer and the reader of checkpoints agree on.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace zg {

// The largest number of a checkpoint, of steps and of all else that a manifest counts: adding some to it is
// no overflow.
inline constexpr std::int64_t kMostNumber = 1'000'000'000'000'000;

// Whether a file of a checkpoint's directory has a name that this program gives: manifest.json, index.json,
// rank-00000.safetensors, rank-00000.pins, state-00001-of-00003.safetensors. Others are the user's.
bool is_of_checkpoint(std::string_view name);

// In the name of a directory that is no checkpoint yet, or no longer.
inline constexpr const char* kUnfinished = ".part-";
// The end of such a name, of one that is being removed.
inline constexpr const char* kRemoved = ".part-removed";
// In a file's __metadata__, for each entry, which is a piece of a tensor: the first element, and the XXH3 of
// the bytes. Of a piece that is one of several in the file, a box, or codes in blocks of a part's elements,
// also the lines, their stride, and the place of the first element in its block. Names of such entries may
// end in a number, as in "h.0.attn.c_attn.weight.exp_avg[2]".
inline constexpr const char* kNoteForm = "%lld %16llx %lld %lld %lld";
// The codes' scales, one for each block: their name has this behind that of the codes.
inline constexpr const char* kScaleName = ".scale";

// The current time as manifests have it, in UTC ("2026-11-23T05:54:24Z"), and this program's version.
std::string now_text();
std::string program_version();

}  // namespace zg
