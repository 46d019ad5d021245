// A model's directory as it is written: safetensors files of a bounded size, their index, config.json.
// Private to src/model.
//
// First all tensors are added, then save() writes the files. For one thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ziggurat/base/file.hpp"

namespace zg::hf {

struct FileTensor {
  std::string name;
  std::string dtype;  // as in the file: "BF16"
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;
  std::int64_t begin = 0;  // in the file; set by save()
};

class WeightFiles {
 public:
  struct Place {
    std::size_t shard = 0, tensor = 0;
  };
  // A file has at most so many bytes of tensors, unless one group alone has more.
  explicit WeightFiles(std::int64_t shard_bytes) : shard_bytes_(shard_bytes) {}

  // Adds tensors that come into one file, and returns the place of the first; the others follow it.
  Place add(const std::vector<FileTensor>& group);
  std::size_t shards() const { return shards_.size(); }
  // While save() runs: the tensor's name, and where its bytes begin.
  const FileTensor& tensor(const Place& place) const { return shards_[place.shard].tensors[place.tensor]; }

  // Writes all files of the directory, each under a temporary name; `write` writes the tensors of one. They
  // get their names when all are complete, and weights of an earlier save that are not replaced are then
  // removed. If anything fails before, the directory is left as it was. Throws Error(kIo).
  using WriteShard = std::function<void(OutputFile& file, std::size_t shard)>;
  void save(const std::string& directory, const std::string& config, const WriteShard& write);

 private:
  struct Shard {
    std::string name;
    std::vector<FileTensor> tensors;
    std::int64_t bytes = 0;
  };
  // Gives all tensors their places, wider types first, so that each lies at a multiple of its type's
  // size. Returns the header.
  std::string header_of(Shard& shard) const;
  std::string index() const;

  std::int64_t shard_bytes_;
  std::vector<Shard> shards_{1};
};

}  // namespace zg::hf
