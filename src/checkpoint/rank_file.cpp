#include "ziggurat/checkpoint/rank_file.hpp"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors_header.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/step/tile_elements.hpp"

namespace zg {
namespace {

const char* safetensors_name(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "F64";
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    default:
      return "U8";
  }
}

// As PyTorch's optimizers call them.
const char* moment_name(OptimizerKind kind, int which) {
  if (kind == OptimizerKind::kSgd) return "momentum_buffer";
  return which == 0 ? "exp_avg" : "exp_avg_sq";
}

}  // namespace

std::int64_t CheckpointPart::begin(std::int64_t first) const {
  return kind == Kind::kScale ? first / kQuantBlock : first;
}

std::int64_t CheckpointPart::end(std::int64_t last) const {
  return kind == Kind::kScale ? (last + kQuantBlock - 1) / kQuantBlock : last;
}

View CheckpointPart::of(const StateTile& tile) const {
  return kind == Kind::kMaster ? tile.master : kind == Kind::kMoment ? tile.moment[which] : tile.scale[which];
}

std::vector<CheckpointPart> parts_of(const Layout& layout, std::int32_t unit, const Param& param) {
  using Kind = CheckpointPart::Kind;
  const std::vector<Param>& params = layout.model->units()[static_cast<std::size_t>(unit)].params;
  const auto index = static_cast<std::size_t>(&param - params.data());
  const auto& groups = layout.options.groups;
  if (!groups.empty() && groups[static_cast<std::size_t>(unit)][index] == kFrozen) {
    if (layout.has_codes(unit)) return {};
    return {{param.name, safetensors_name(layout.model->dtype())}};
  }
  const StateFormat& format = layout.state().format();
  const bool codes = format.moments == MomentFormat::kInt8;
  std::vector<CheckpointPart> parts{{param.name, safetensors_name(format.full)}};
  for (int i = 0; i < format.moment_count; ++i) {
    const std::string name = param.name + "." + moment_name(format.kind, i);
    parts.push_back({name, safetensors_name(stored_moment_type(format)), Kind::kMoment, i, codes});
    if (codes) parts.push_back({name + kScaleName, "F32", Kind::kScale, i});
  }
  return parts;
}

// A checkpoint has the experts of all ranks. This rank's model names its own experts only, so the other
// ranks' experts, which have the same shapes, get their names from a model of each of these ranks.
std::vector<CheckpointTensor> tensors_of(const Layout& layout) {
  std::vector<CheckpointTensor> all;
  const Model& model = *layout.model;
  const TensorShard& own = model.shard();
  for (int rank = 0; rank < own.experts.degree; ++rank) {
    TensorShard shard = own;
    shard.experts.index = rank;
    const bool mine = rank == own.experts.index;
    const Model other = mine ? model : Model(model.config(), model.dtype(), host_ops(), 0, shard);
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      const Unit& unit = model.units()[u];
      if (!mine && !unit.is_experts()) continue;
      for (std::size_t i = 0; i < unit.params.size(); ++i) {
        const Param& param = unit.params[i];
        for (const CheckpointPart& part : parts_of(layout, static_cast<std::int32_t>(u), param)) {
          if (part.kind == CheckpointPart::Kind::kScale) continue;
          const std::string name = other.units()[u].params[i].name + part.name.substr(param.name.size());
          all.push_back({name, part.dtype, param.whole_count(), part.kind == CheckpointPart::Kind::kMoment});
        }
      }
    }
  }
  return all;
}

bool has_shards_of_tiles(const Layout& layout, std::int32_t unit) {
  return layout.has_unit(unit) && layout.in_tiles(unit) && layout.is_sharded(unit);
}

std::int64_t format_of(const Layout& layout) {
  bool boxes = layout.options.parts.tensor > 1;
  for (std::size_t u = 0; u < layout.model->units().size(); ++u)
    boxes = boxes || has_shards_of_tiles(layout, static_cast<std::int32_t>(u));
  return boxes ? 2 : 1;
}

std::vector<HeldRange> held_by(const Layout& layout, std::int32_t unit, const Param& param) {
  if (!layout.has_unit(unit)) return {};
  if (layout.in_tiles(unit) && !layout.is_sharded(unit)) return {{0, param.count()}};
  const std::vector<Layout::Elements> shards =
      layout.in_tiles(unit) ? held_of_unit(layout, unit)
                            : std::vector{shard_elements(layout, layout.tile_of(unit, param))};
  std::vector<HeldRange> held;
  for (const Layout::Elements& shard : shards) {
    const std::int64_t first = std::clamp<std::int64_t>(shard.first - param.offset, 0, param.count());
    const std::int64_t end = std::clamp(shard.first + shard.count - param.offset, first, param.count());
    if (first < end) held.push_back({first, end - first});
  }
  return held;
}

bool writes_file(const Layout& layout) {
  std::int32_t unit = 0;
  while (unit <= layout.head_unit() && !layout.gives(unit)) ++unit;
  return unit <= layout.head_unit();
}

RankFile::RankFile(const Layout& layout, int rank) : name_(fmt::format("rank-{:05}.safetensors", rank)) {
  for (std::size_t u = 0; u < layout.model->units().size(); ++u) {
    const auto unit = static_cast<std::int32_t>(u);
    const std::vector<Param>& params = layout.model->units()[u].params;
    first_param_.push_back(params.data());
    params_.emplace_back();
    for (const Param& param : params) {
      const std::vector<HeldRange> held =
          layout.gives(unit) ? held_by(layout, unit, param) : std::vector<HeldRange>();
      const bool in_pieces = has_shards_of_tiles(layout, unit);
      const std::size_t first = pieces_.size();
      for (const CheckpointPart& part : parts_of(layout, unit, param)) {
        int number = 0;
        for (const HeldRange& range : held) {
          for_boxes(param, range.first, range.first + range.count,
                    [&](const Band& band, std::int64_t at, const CheckpointBox& box) {
                      if (band.counted) add(param, part, at, box, ++number, in_pieces);
                    });
        }
      }
      params_.back().push_back({first, pieces_.size() - first});
    }
  }
  data_begin_ = static_cast<std::int64_t>(header().size());
}

// Adds a piece: the file's box number `number` of the parameter, whose first element is held element `at`.
// `in_pieces`: some rank's file may have several boxes of it.
void RankFile::add(const Param& param, const CheckpointPart& part, std::int64_t at, const CheckpointBox& box,
                   int number, bool in_pieces) {
  Piece piece;
  // Codes of a tensor shard are in blocks of the shard's own elements. Codes in several pieces also bring
  // each piece's own scales, since the scales of a whole tensor can only be stored as one piece.
  const bool codes = part.in_codes || part.kind == CheckpointPart::Kind::kScale;
  const bool own = codes && (!param.is_whole() || in_pieces);
  const bool long_form = own || box.lines > 1 || number > 1;
  piece.name = part.name + (number > 1 ? fmt::format("[{}]", number) : "");
  piece.first = own ? box.first : part.begin(box.first);
  if (long_form) {
    const bool scales = part.kind == CheckpointPart::Kind::kScale;  // one run for all lines
    piece.note = fmt::format(" {} {} {}", scales ? 1 : box.lines, scales ? 0 : box.stride, at % kQuantBlock);
  }
  piece.begin = part.begin(at);
  piece.count = part.end(at + box.count()) - piece.begin;
  if (part.in_codes && !own) piece.count = round_up(piece.count, kQuantBlock);
  piece.shape = {piece.count};
  if (piece.count == param.whole_count() && !param.vector) piece.shape = {param.rows, param.cols};
  if (box.lines > 1 && part.kind != CheckpointPart::Kind::kScale) piece.shape = {box.lines, box.width};
  const std::int64_t width = part.dtype == "F64"                           ? 8
                             : part.dtype == "F32"                         ? 4
                             : part.dtype == "BF16" || part.dtype == "F16" ? 2
                                                                           : 1;
  piece.offset = data_bytes_;
  piece.bytes = piece.count * width;
  piece.part = part;
  data_bytes_ += piece.bytes;
  pieces_.push_back(std::move(piece));
}

std::string safetensors_header(const nlohmann::ordered_json& json) {
  std::string text = json.dump();
  text.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(text.size()), 8)), ' ');
  const std::uint64_t length = text.size();
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + text;
}

// The header's length does not depend on the hashes.
std::string RankFile::header() const {
  nlohmann::ordered_json notes{{"format", "pt"}}, json;
  for (const Piece& piece : pieces_)
    notes[piece.name] = fmt::format("{} {}{}", piece.first, io::hash_text(piece.hash.value()), piece.note);
  json["__metadata__"] = std::move(notes);
  for (const Piece& piece : pieces_) {
    json[piece.name] = {{"dtype", piece.part.dtype},
                        {"shape", piece.shape},
                        {"data_offsets", {piece.offset, piece.offset + piece.bytes}}};
  }
  return safetensors_header(json);
}

void RankFile::create(Files& files, const std::string& directory) {
  file_ = std::make_unique<NewFile>(files, directory + "/" + name_, bytes());
}

void RankFile::write(const StateTile& tile) {
  const auto unit = static_cast<std::size_t>(tile.unit);
  const Slot& param = params_[unit][static_cast<std::size_t>(tile.param - first_param_[unit])];
  for (std::size_t i = 0; i < param.pieces; ++i) {
    Piece& piece = pieces_[param.first_piece + i];
    const View values = piece.part.of(tile);
    // Entries of the part that the tile and the piece share.
    const std::int64_t tile_begin = piece.part.begin(tile.first);
    const std::int64_t begin = std::max(piece.begin, tile_begin);
    const std::int64_t end = std::min(piece.begin + piece.count, tile_begin + values.count());
    if (begin >= end) continue;
    const std::int64_t width = piece.width(), at = (begin - piece.begin) * width,
                       bytes = (end - begin) * width;
    ZG_ASSERT(at == piece.written && at + bytes <= piece.bytes, "{}: {} bytes at {} of {}, {} are there",
              piece.name, bytes, at, piece.bytes, piece.written);
    const char* const from = static_cast<const char*>(values.data) + (begin - tile_begin) * width;
    file_->write(from, bytes, data_begin_ + piece.offset + at);
    piece.hash.update(from, bytes);
    piece.written += bytes, written_ += bytes;
  }
}

double RankFile::written() const {
  return static_cast<double>(written_) / static_cast<double>(std::max<std::int64_t>(1, data_bytes_));
}

CheckpointFile RankFile::finish() {
  for (const Piece& piece : pieces_) {
    ZG_ASSERT(piece.written == piece.bytes, "{}: {} of {} bytes came", piece.name, piece.written,
              piece.bytes);
  }
  const std::string text = header();
  ZG_ASSERT_EQ(static_cast<std::int64_t>(text.size()), data_begin_);
  file_->write(text.data(), data_begin_, 0);
  file_->sync_and_close();
  return {name_, bytes(), io::hash_of(text)};
}

}  // namespace zg
