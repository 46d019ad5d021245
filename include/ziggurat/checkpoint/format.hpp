// Constants and names that the writer and the reader of checkpoints share.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace zg {

// The largest checkpoint number, number of steps, or other count in a manifest. It leaves room to add to it
// without overflow.
inline constexpr std::int64_t kMostNumber = 1'000'000'000'000'000;

// Whether a file of a checkpoint's directory has a name that this program gives: manifest.json, index.json,
// rank-00000.safetensors, rank-00000.pins, state-00001-of-00003.safetensors. Others are the user's.
bool is_of_checkpoint(std::string_view name);

// Part of the name of a directory whose checkpoint is incomplete: being written or being removed.
inline constexpr const char* kUnfinished = ".part-";
// The end of the name of a checkpoint that is being removed.
inline constexpr const char* kRemoved = ".part-removed";
// The form of the notes in a file's __metadata__, one for each entry, which is a piece of a tensor: the first
// element, and the XXH3 of the bytes. The long form adds the number of lines, their stride, and the first
// element's place in its block. It is used for a piece that is one of several in the file, that is a box, or
// that has codes in blocks of a shard's elements. Names of such entries may end in a number, as in
// "h.0.attn.c_attn.weight.exp_avg[2]".
inline constexpr const char* kNoteForm = "%lld %16llx %lld %lld %lld";
// Suffix that turns the name of a codes entry into the name of its scales, one scale for each block.
inline constexpr const char* kScaleName = ".scale";

// The current time in the manifests' form, in UTC ("2026-11-23T05:54:24Z"), and this program's version.
std::string now_text();
std::string program_version();

}  // namespace zg
