// The formats in few bits that models are written in. Plain values.
#pragma once

namespace zg {

//   kNf4        as bitsandbytes: blocks of 64 elements, scales in fp32; 0.56 bytes an element
//   kNf4Double  as bitsandbytes' double quantisation: the same with scales in 8 bits; 0.52 bytes
//   kFp8        as DeepSeek's files: blocks of 128 x 128; 1 byte
//   kInt4       as compressed-tensors: groups of 128 inputs, or of 64 or 32 where a width asks for it; 0.52
//               bytes
enum class SavedCode { kNf4, kNf4Double, kFp8, kInt4 };

}  // namespace zg
