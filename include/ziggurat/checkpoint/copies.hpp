// Copies of checkpoints in other directories, and access to a checkpoint's values.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/files.hpp"

namespace zg {

// Reads a box of a master weight, or of moment number `moment`, converted to fp32 from the checkpoint's
// format.
void read_values(const Checkpoint& checkpoint, const std::string& tensor, int moment,
                 const CheckpointBox& box, float* out);

// The shapes of a checkpoint's tensors, not split among ranks: vectors [n], matrices [out, in].
class TensorShapes {
 public:
  using Shape = std::vector<std::int64_t>;
  explicit TensorShapes(const Checkpoint& checkpoint);
  // The shape of a parameter, or of one of its moments. Throws Error(kUsage) if the model has no such tensor.
  const Shape& of(const std::string& tensor) const;

 private:
  const std::string path_;
  std::map<std::string, Shape> shapes_;  // by parameter
};

// The most bytes of a file in a copy of pinned state, about as in Hugging Face's models. Every file system
// and network takes files of this size, and a file that was damaged in transit is soon sent again.
inline constexpr std::int64_t kCopyFileBytes = std::int64_t{4} << 30;
std::string export_checkpoint(Files& files, const Checkpoint& checkpoint, const std::string& directory,
                              const std::function<void(std::int64_t)>& progress,
                              std::int64_t file_bytes = kCopyFileBytes);

}  // namespace zg
