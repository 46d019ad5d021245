#include "ziggurat/checkpoint/pins.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/checkpoint/rank_file.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/step/pinned_weights.hpp"
#include "ziggurat/step/tile_elements.hpp"

namespace zg {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kKind = "ziggurat pinned state";
constexpr std::int64_t kMost = std::int64_t{1} << 48;

// Reads the numbers and texts of a list, one after the other.
class Fields {
 public:
  Fields(const Json& list, const std::string& where) : list_(list), where_(where) {
    if (!list.is_array()) fail();
  }
  // A whole number in [least, most].
  std::int64_t number(std::int64_t least = 0, std::int64_t most = kMost) {
    const Json& value = next();
    if (!value.is_number_integer()) fail();
    const auto n = value.get<std::int64_t>();  // one above 2^63 becomes negative
    if (n < least || n > most) fail();
    return n;
  }
  double rate() {
    const Json& value = next();
    if (!value.is_number() || !(value.get<double>() >= 0)) fail();
    return value.get<double>();
  }
  std::string text() {
    const Json& value = next();
    if (!value.is_string()) fail();
    return value.get<std::string>();
  }
  std::uint64_t hash() {
    const std::string digits = text();
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != digits.npos) fail();
    return std::stoull(digits, nullptr, 16);
  }
  const Json& next() {
    if (at_ >= list_.size()) fail();
    return list_[at_++];
  }
  void finish() const {
    if (at_ != list_.size()) fail();
  }
  [[noreturn]] void fail() const {
    throw Error(Errc::kUsage, where_, "does not say where state lies as this program writes it",
                "the checkpoint is damaged: resume from another one");
  }

 private:
  const Json& list_;
  const std::string& where_;
  std::size_t at_ = 0;
};

std::int64_t width_of(const std::string& dtype) {
  if (dtype == "F64") return 8;
  if (dtype == "F32") return 4;
  return dtype == "U8" ? 1 : 2;
}

bool is_kept_name(const std::string& name) {
  constexpr std::string_view kBegin = "ziggurat-", kEnd = kKeptEnd;
  constexpr std::size_t kDigits = 16;
  return name.size() == kBegin.size() + kDigits + kEnd.size() && name.rfind(kBegin, 0) == 0 &&
         name.substr(kBegin.size() + kDigits) == kEnd &&
         name.substr(kBegin.size(), kDigits).find_first_not_of("0123456789abcdef") == name.npos;
}

const Json& list_in(const Json& json, const char* key, const std::string& where) {
  const auto it = json.find(key);
  if (it == json.end() || !it->is_array()) {
    throw Error(Errc::kUsage, where, fmt::format("has no list \"{}\"", key),
                "the checkpoint is damaged: resume from another one");
  }
  return *it;
}

// The pieces fill the segment, and lie on whole pages of the drives.
PinnedSegment segment_of(const Json& json, std::size_t files, const std::string& where) {
  Fields f(json, where);
  PinnedSegment segment{f.text(), f.number(1), {}};
  segment.stored.version = f.number(1);
  std::int64_t bytes = 0;
  const Json& places = f.next();
  if (!places.is_array()) f.fail();
  for (const Json& one : places) {
    Fields p(one, where);
    const auto drive = static_cast<int>(p.number(0, static_cast<std::int64_t>(files) - 1));
    io::StoredPiece piece{drive, p.number(), p.number(1), p.hash()};
    p.finish();
    if (piece.offset % 4096 != 0 || piece.bytes % 4096 != 0 || piece.bytes > segment.bytes - bytes) p.fail();
    bytes += piece.bytes;
    segment.stored.pieces.push_back(piece);
  }
  if (bytes != segment.bytes) f.fail();
  f.finish();
  return segment;
}

PinnedPiece piece_of(const Json& json, const std::vector<PinnedSegment>& segments, const std::string& where) {
  Fields f(json, where);
  PinnedPiece p;
  p.tensor = f.text(), p.dtype = f.text();
  p.segment = f.number(), p.offset = f.number();
  p.box = {f.number(), f.number(1), f.number(1), f.number()};
  p.high_segment = f.number(-1), p.high_offset = f.number();
  p.scales = f.number(-1), p.phase = f.number();
  f.finish();
  static constexpr const char* kTypes[] = {"F64", "F32", "BF16", "F16", "U8"};
  const bool known = std::find(std::begin(kTypes), std::end(kTypes), p.dtype) != std::end(kTypes);
  const bool fits = p.box.lines <= kMost / p.box.width && (p.box.lines == 1 || p.box.stride >= p.box.width) &&
                    p.box.stride <= kMost / p.box.lines;
  if (!known || !fits || p.segment >= static_cast<std::int64_t>(segments.size()) || p.phase >= kQuantBlock)
    f.fail();
  const auto fits_in = [&](std::int64_t segment, std::int64_t offset, std::int64_t bytes,
                           std::int64_t width) {
    return segment < static_cast<std::int64_t>(segments.size()) && offset % width == 0 &&
           offset + bytes <= segments[static_cast<std::size_t>(segment)].bytes;
  };
  const std::int64_t count = p.box.count(), blocks = (p.phase + count + kQuantBlock - 1) / kQuantBlock;
  const bool split = p.high_segment >= 0, codes = p.dtype == "U8";
  if (!fits_in(p.segment, p.offset, count * p.width(), p.width()) || (p.scales >= 0) != codes ||
      (codes && !fits_in(p.segment, p.scales, 4 * blocks, 4)) || (split && p.dtype != "F32") ||
      (split && !fits_in(p.high_segment, p.high_offset, 2 * count, 2)))
    f.fail();
  return p;
}

}  // namespace

std::int64_t PinnedPiece::width() const {
  return high_segment >= 0 ? 2 : width_of(dtype);
}

bool PinnedPiece::operator==(const PinnedPiece& o) const {
  return tensor == o.tensor && dtype == o.dtype && segment == o.segment && offset == o.offset &&
         box.first == o.box.first && box.lines == o.box.lines && box.width == o.box.width &&
         box.stride == o.box.stride && high_segment == o.high_segment && high_offset == o.high_offset &&
         scales == o.scales && phase == o.phase;
}

std::int64_t PinnedState::bytes() const {
  std::int64_t sum = 0;
  for (const PinnedSegment& segment : segments) sum += segment.bytes;
  return sum;
}

bool PinnedState::has_form_of(const PinnedState& other) const {
  return pieces == other.pieces &&
         std::equal(segments.begin(), segments.end(), other.segments.begin(), other.segments.end(),
                    [](const auto& a, const auto& b) { return a.name == b.name && a.bytes == b.bytes; });
}

std::string PinnedState::text() const {
  Json j;
  j["kind"] = kKind;
  j["drives"] = Json::array();
  for (const KeptFile& file : files) j["drives"].push_back(Json::array({file.directory, file.name}));
  j["rates"] = Json::array();
  for (const DriveRates& r : rates)
    j["rates"].push_back(Json::array({r.read, r.write, r.mixed, r.first_write}));
  j["segments"] = Json::array();
  for (const PinnedSegment& segment : segments) {
    Json places = Json::array();
    for (const io::StoredPiece& p : segment.stored.pieces)
      places.push_back(Json::array({p.drive, p.offset, p.bytes, io::hash_text(p.checksum)}));
    j["segments"].push_back(
        Json::array({segment.name, segment.bytes, segment.stored.version, std::move(places)}));
  }
  j["tensors"] = Json::array();
  for (const PinnedPiece& p : pieces) {
    j["tensors"].push_back(
        Json::array({p.tensor, p.dtype, p.segment, p.offset, p.box.first, p.box.lines, p.box.width,
                     p.box.stride, p.high_segment, p.high_offset, p.scales, p.phase}));
  }
  return j.dump(0, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string pins_name(int rank) {
  return fmt::format("rank-{:05}.pins", rank);
}

PinnedState parse_pinned(const std::string& text, const std::string& where) {
  const auto json = parse_json<Json>(text, where, "the checkpoint is damaged: resume from another one");
  if (!json.is_object() || json.value("kind", Json()) != kKind) {
    throw Error(Errc::kUsage, where, "does not say where state is pinned",
                "the checkpoint is damaged: resume from another one");
  }
  PinnedState state;
  for (const Json& one : list_in(json, "drives", where)) {
    Fields f(one, where);
    state.files.push_back({f.text(), f.text()});
    if (state.files.back().directory.empty() || !is_kept_name(state.files.back().name)) f.fail();
    f.finish();
  }
  for (const Json& one : list_in(json, "rates", where)) {
    Fields f(one, where);
    state.rates.push_back({f.rate(), f.rate(), f.rate(), f.rate()});
    f.finish();
  }
  for (const Json& one : list_in(json, "segments", where))
    state.segments.push_back(segment_of(one, state.files.size(), where));
  for (const Json& one : list_in(json, "tensors", where))
    state.pieces.push_back(piece_of(one, state.segments, where));
  return state;
}

namespace {

// Lists the segments and pieces of a rank, tile by tile.
class Form {
 public:
  explicit Form(const Layout& layout) : layout_(layout) {}

  PinnedState take() {
    for (tile_ = 0; tile_ < static_cast<std::int32_t>(layout_.tiles.size()); ++tile_) {
      if (!layout_.gives(unit())) continue;
      shard_ =
          layout_.tile(tile_).weight != Layout::kNone ? held_of_tile(layout_, tile_) : Layout::Elements{};
      weight_ = -1;
      if (pins_weight(layout_, tile_)) weight_ = add(layout_.whole(layout_.tile(tile_).stored));
      for (std::int32_t i = 0; i < layout_.state_segments(tile_); ++i) {
        const std::int64_t index = add(layout_.state_segment(tile_, i));
        visit_ranges(layout_, tile_, i,
                     [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
                       add_trained(index, layout_.state_elements(tile_, i), range, first, count);
                     });
      }
      if (weight_ >= 0 && holds_frozen(layout_, tile_)) add_frozen();
    }
    return std::move(form_);
  }

 private:
  std::int32_t unit() const { return layout_.tile(tile_).unit; }
  const std::vector<Param>& params() const {
    return layout_.model->units()[static_cast<std::size_t>(unit())].params;
  }
  std::int64_t add(SegmentId id) {
    form_.segments.push_back({layout_.table.segment_name(id), layout_.table.segment(id).charge, {}});
    return static_cast<std::int64_t>(form_.segments.size()) - 1;
  }

  // Adds the pieces of held elements [first, end). Calls f(piece, distance of its first element from
  // `first`).
  template <class F>
  void add_pieces(const Param& param, const CheckpointPart& part, std::int64_t segment, std::int64_t first,
                  std::int64_t end, const F& f) {
    for_boxes(param, first, end, [&](const Band& band, std::int64_t at, const CheckpointBox& box) {
      if (!band.counted) return;
      PinnedPiece p{part.name, part.dtype, segment, 0, box};
      f(p, at - first);
      form_.pieces.push_back(std::move(p));
    });
  }

  void add_trained(std::int64_t index, const Layout::Elements& segment, const Layout::StateRange& range,
                   std::int64_t first, std::int64_t count) {
    const Param& param = params()[static_cast<std::size_t>(range.param)];
    const std::int64_t skip = first - range.param_first, end = std::min(first + count, param.count());
    // The views' memory is not accessed: only their offsets from the begin are used.
    char begin = 0;
    const OptimizerState state =
        layout_.state().part(&begin, segment.count, range.state_first + skip - segment.first, count);
    const auto offset_of = [&](const View& view) {
      return reinterpret_cast<std::intptr_t>(view.data) - reinterpret_cast<std::intptr_t>(&begin);
    };
    const bool split = layout_.state().format().master == MasterFormat::kSplit;
    for (const CheckpointPart& part : parts_of(layout_, unit(), param)) {
      if (part.kind == CheckpointPart::Kind::kScale) continue;
      const bool master = part.kind == CheckpointPart::Kind::kMaster;
      const View& view = master ? state.master : state.moment[part.which];
      add_pieces(param, part, index, first, end, [&](PinnedPiece& p, std::int64_t distance) {
        if (master && split) {
          p.high_segment = weight_;
          p.high_offset = 2 * (range.unit_first + skip - shard_.first + distance);
        }
        p.offset = offset_of(view) + distance * p.width();
        if (!part.in_codes) return;
        p.scales = offset_of(state.scale[part.which]) + distance / kQuantBlock * 4;
        p.phase = distance % kQuantBlock;
      });
    }
  }

  void add_frozen() {
    for (std::size_t i = 0; i < params().size(); ++i) {
      const Param& param = params()[i];
      if (layout_.options.groups[static_cast<std::size_t>(unit())][i] != kFrozen) continue;
      const std::int64_t first = std::max<std::int64_t>(0, shard_.first - param.offset);
      const std::int64_t end = std::min(param.count(), shard_.first + shard_.count - param.offset);
      if (first >= end) continue;
      add_pieces(param, parts_of(layout_, unit(), param).front(), weight_, first, end,
                 [&](PinnedPiece& p, std::int64_t distance) {
                   p.offset = (param.offset + first - shard_.first + distance) * p.width();
                 });
    }
  }

  const Layout& layout_;
  PinnedState form_;
  std::int32_t tile_ = 0;
  Layout::Elements shard_;    // elements of the tile's weight
  std::int64_t weight_ = -1;  // the weight's segment, if it is pinned
};

}  // namespace

PinnedState pinned_form(const Layout& layout) {
  return pinned_segments(layout).empty() ? PinnedState{} : Form(layout).take();
}

std::vector<PinnedState> pins_in(const std::string& checkpoint) {
  const std::string name = checkpoint + "/" + kManifestName;
  std::vector<PinnedState> all;
  const CheckpointManifest m = parse_manifest(read_text_file(name, "the manifest of a checkpoint"), name);
  for (const CheckpointFile& file : m.files) {
    if (!file.is_pins()) continue;
    all.push_back(read_pinned(checkpoint + "/" + file.name, file));
    int rank = m.ranks;  // of a file that no rank has written
    (void)std::sscanf(file.name.c_str(), "rank-%8d.pins", &rank);
    all.back().rank = std::min(rank, m.ranks);
  }
  return all;
}

PinnedState read_pinned(const std::string& path, const CheckpointFile& wanted) {
  const std::string text = read_text_file(path, "what a checkpoint pins");
  if (static_cast<std::int64_t>(text.size()) != wanted.bytes || io::hash_of(text) != wanted.header_hash) {
    throw Error(Errc::kUsage, path, "has another size or XXH3 than its manifest says: it was changed",
                "the checkpoint is damaged: resume from another one");
  }
  return parse_pinned(text, path);
}

}  // namespace zg
