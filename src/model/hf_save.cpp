#include <algorithm>
#include <cstring>

#include "model/plain_tensors.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace hf {
namespace {

const char* name_of_type(DType dtype) {
  return dtype == DType::kBF16 ? "BF16" : "F32";
}

}  // namespace

void PlainTensors::add(WeightFiles& files, const Unit& unit) {
  for (const Param& p : unit.params) add(files, unit, p, dtype_);
  add_choice_bias(files, unit);
}

void PlainTensors::add(WeightFiles& files, const Unit& unit, const Param& p, DType dtype) {
  const std::string& name = p.name_in_files();
  auto place = places_.find(name);
  if (place == places_.end()) {
    const std::int64_t bytes = p.rows_in_files() * p.whole_cols * static_cast<std::int64_t>(size_of(dtype));
    place = places_.emplace(name, files.add({{name, name_of_type(dtype), p.shape_in_files(), bytes}})).first;
    bytes_ += bytes;
  }
  list_.push_back({&unit, &p, dtype, place->second});
}

void PlainTensors::write(OutputFile& file, const WeightFiles& files, std::size_t shard,
                         PlainWriter& writer) const {
  for (const Placed& placed : list_) {
    if (placed.place.shard == shard) writer.write(file, files, placed);
  }
}

void PlainWriter::write(OutputFile& file, const WeightFiles& files, const Placed& t) {
  dtype_ = t.dtype;
  const std::int64_t at = files.tensor(t.place).begin + t.param->file_row * t.param->whole_cols * width();
  t.param->conv1d ? write_transposed(file, at, t) : write_straight(file, at, t);
}

void PlainWriter::store(std::int64_t i, float value) {
  if (dtype_ == DType::kBF16) {
    const bf16 rounded(value);
    std::memcpy(out_.data() + i * 2, &rounded, 2);
  } else {
    std::memcpy(out_.data() + i * 4, &value, 4);
  }
}

void PlainWriter::write_straight(OutputFile& file, std::int64_t at, const Placed& t) {
  const std::int64_t count = t.param->whole_count();
  for (std::int64_t i = 0; i < count; i += kTile) {
    const std::int64_t n = std::min(kTile, count - i);
    read_(*t.unit, *t.param, i, i + n, in_.data());
    for (std::int64_t j = 0; j < n; ++j) store(j, in_[static_cast<std::size_t>(j)]);
    file.write_at(at + i * width(), out_.data(), n * width());
  }
}

// Writes a parameter [rows, cols] to a file as [cols, rows]. A tile of whole rows is read, transposed, and
// written with one write for each row of the file, or with a single write when the tile is the whole
// matrix.
void PlainWriter::write_transposed(OutputFile& file, std::int64_t at, const Placed& t) {
  const std::int64_t rows = t.param->whole_rows, cols = t.param->whole_cols;
  const std::int64_t tile_cols = std::min(cols, kTile),
                     tile_rows = std::clamp<std::int64_t>(kTile / cols, 1, rows);
  for (std::int64_t r = 0; r < rows; r += tile_rows) {
    // A row has several tiles only if it is larger than a tile.
    for (std::int64_t c = 0; c < cols; c += tile_cols) {
      const std::int64_t nr = std::min(tile_rows, rows - r), nc = std::min(tile_cols, cols - c);
      read_(*t.unit, *t.param, r * cols + c, (r + nr - 1) * cols + c + nc, in_.data());
      turn(nr, nc);
      if (nr == rows) {
        file.write_at(at + c * rows * width(), out_.data(), nr * nc * width());
        continue;
      }
      for (std::int64_t j = 0; j < nc; ++j) {
        file.write_at(at + ((c + j) * rows + r) * width(), out_.data() + j * nr * width(), nr * width());
      }
    }
  }
}

// Transposes in_ [nr, nc] to out_ [nc, nr], in blocks that stay in the L1 cache.
void PlainWriter::turn(std::int64_t nr, std::int64_t nc) {
  constexpr std::int64_t kBlock = 32;
  for (std::int64_t r0 = 0; r0 < nr; r0 += kBlock) {
    for (std::int64_t c0 = 0; c0 < nc; c0 += kBlock) {
      for (std::int64_t c = c0; c < std::min(nc, c0 + kBlock); ++c) {
        for (std::int64_t r = r0; r < std::min(nr, r0 + kBlock); ++r) {
          store(c * nr + r, in_[static_cast<std::size_t>(r * nc + c)]);
        }
      }
    }
  }
}

}  // namespace hf

void save_hf(const std::string& directory, const Model& model, DType dtype, const ReadParam& read,
             std::int64_t shard_bytes) {
  ZG_ASSERT(dtype == DType::kF32 || dtype == DType::kBF16, "{}", name_of(dtype));
  ZG_ASSERT_GE(shard_bytes, 1);
  hf::WeightFiles files(shard_bytes);
  hf::PlainTensors tensors(dtype);
  for (const Unit& unit : model.units()) tensors.add(files, unit);
  hf::PlainWriter writer(read);
  files.save(directory, write_hf_config(model.config(), dtype),
             [&](OutputFile& file, std::size_t shard) { tensors.write(file, files, shard, writer); });
}

}  // namespace zg
