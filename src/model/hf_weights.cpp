#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "model/coded_source.hpp"
#include "model/families/family.hpp"
#include "model/foreign_files.hpp"
#include "model/hf_text.hpp"
#include "model/safetensors_values.hpp"
#include "model/units.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

using namespace hf;

// A parameter's matrix in the files, plain or coded, and the matrix's element at which the parameter begins.
struct Place {
  Source source;
  std::int64_t first = 0;
  const CodedSource* coded = nullptr;  // instead of `source`
  bool choice_bias = false;            // of a router

  void read(std::int64_t begin, std::int64_t end, float* out) const {
    if (coded != nullptr) return coded->read(first + begin, first + end, out);
    hf::read_values(source, first + begin, first + end, out);
  }
};

// Reads elements [begin, end) of a parameter that has some columns of a coded matrix. Whole rows are decoded,
// many at a time, since a file may have to be walked over for each call.
void read_some_columns(const Place& place, const Param& param, std::int64_t begin, std::int64_t end,
                       float* out) {
  const std::int64_t cols = param.whole_cols, most = std::max<std::int64_t>(1, (4 << 20) / cols) * cols;
  const std::int64_t stop = (param.whole_element(end - 1) / cols + 1) * cols;
  std::vector<float> window;
  std::int64_t from = 0, to = 0;  // elements of the matrix that are in the window
  param.for_runs(begin, end, [&](std::int64_t at, std::int64_t whole, std::int64_t n) {
    if (whole < from || whole + n > to) {
      from = whole / cols * cols, to = std::min(std::max(stop, from + cols), from + most);
      window.resize(static_cast<std::size_t>(to - from));
      place.read(from, to, window.data());
    }
    std::copy_n(window.begin() + (whole - from), n, out + at - begin);
  });
}

// Coded matrices by the name that their plain weights would have.
using Coded = std::map<std::string, CodedSource>;

// Tensors by name, without prefix. The map is ordered, so that the same one of several mistakes is always
// reported.
using Sources = std::map<std::string, Source>;
using Aliases = std::map<std::string, std::string>;

// The place of a matrix's elements in a file that stores the matrix as [columns, rows].
struct Turned {
  std::int64_t begin, rows, first_row, first_col;  // begin: the matrix's first element in its tensor

  std::int64_t element(std::int64_t row, std::int64_t col) const {
    return begin + (first_col + col) * rows + first_row + row;
  }
};

// A block of a matrix that a file stores transposed, in memory: the file's lines [i0, i1), which are columns
// of the matrix, and in them the elements of the matrix's rows [r0, r1).
class TurnedPart {
 public:
  TurnedPart(const Source& source, const Turned& file) : source_(source), file_(file) {}

  void read(std::int64_t i0, std::int64_t i1, std::int64_t r0, std::int64_t r1) {
    i0_ = i0, r0_ = r0;
    const std::int64_t piece = r1 - r0, lines = i1 - i0, width = source_.width();
    // A single read if most of its bytes are of these rows; else one read for each line.
    const bool whole = 2 * piece >= file_.rows && file_.rows * width * lines <= 2 * kBandBytes;
    stride_ = whole ? file_.rows : piece;
    const std::int64_t count = (lines - 1) * stride_ + piece;
    bytes_.resize(static_cast<std::size_t>(count * width));
    if (whole) return source_.read(file_.element(r0, i0), count, bytes_.data());
    for (std::int64_t i = i0; i < i1; ++i)
      source_.read(file_.element(r0, i), piece, bytes_.data() + (i - i0) * piece * width);
  }
  const char* at(std::int64_t row, std::int64_t col) const {
    return bytes_.data() + ((col - i0_) * stride_ + row - r0_) * source_.width();
  }

 private:
  const Source& source_;
  const Turned& file_;
  std::int64_t i0_ = 0, r0_ = 0, stride_ = 0;
  std::vector<char> bytes_;
};

// Reads elements [begin, end) of a matrix with `cols` columns that the file stores transposed.
void read_transposed(const Source& s, const Turned& file, std::int64_t cols, std::int64_t begin,
                     std::int64_t end, float* out) {
  const std::int64_t stop = (end - 1) / cols + 1;
  // A block of the file's lines is so small that its cache lines are still in the cache for the next values
  // of r, which need them, too.
  constexpr std::int64_t kBlock = 32;
  TurnedPart part(s, file);
  const auto gather = [&](std::int64_t i0, std::int64_t i1, std::int64_t r0, std::int64_t r1, auto type) {
    using T = decltype(type);
    for (std::int64_t r = r0; r < r1; ++r) {
      const std::int64_t lo = std::max(i0, begin - r * cols), hi = std::min(i1, end - r * cols);
      for (std::int64_t i = lo; i < hi; ++i) out[r * cols + i - begin] = to_float(load<T>(part.at(r, i)));
    }
  };
  const std::int64_t most = kBandBytes / s.width();  // elements at a time
  for (std::int64_t r0 = begin / cols; r0 < stop; r0 += most) {
    const std::int64_t r1 = std::min(stop, r0 + most);
    const std::int64_t lines = std::max<std::int64_t>(1, most / (r1 - r0));
    for (std::int64_t i0 = 0; i0 < cols; i0 += lines) {
      const std::int64_t i1 = std::min(cols, i0 + lines);
      part.read(i0, i1, r0, r1);
      with_type(s.dtype, [&](auto type) {
        for (std::int64_t i = i0; i < i1; i += kBlock) gather(i, std::min(i1, i + kBlock), r0, r1, type);
      });
    }
  }
}

bool equal(const Source& a, const Source& b) {
  if (a.entry->shape != b.entry->shape) return false;
  const std::int64_t count = a.entry->count();
  constexpr std::int64_t kChunk = 1 << 16;
  std::vector<float> x(kChunk), y(kChunk);
  for (std::int64_t i = 0; i < count; i += kChunk) {
    const std::int64_t n = std::min(kChunk, count - i);
    hf::read_values(a, i, i + n, x.data());
    hf::read_values(b, i, i + n, y.data());
    // Compared as bits, so that a NaN equals itself.
    if (std::memcmp(x.data(), y.data(), static_cast<std::size_t>(n) * sizeof(float)) != 0) return false;
  }
  return true;
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && std::string_view(text).substr(text.size() - end.size()) == end;
}

// Causal masks, tables of rotary angles and scales of cached keys and values, which some versions of the
// libraries store with the parameters.
bool is_buffer(const std::string& name) {
  for (const char* end :
       {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "rotary_emb.original_inv_freq",
        "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".self_attn.k_scale", ".self_attn.v_scale"}) {
    if (ends_with(name, end)) return true;
  }
  return false;
}

bool begins_with_any(const std::string& name, std::span<const std::string_view> begins) {
  return std::any_of(begins.begin(), begins.end(),
                     [&](std::string_view begin) { return name.rfind(begin, 0) == 0; });
}

// The name as in Param::name. torch.compile() and DataParallel put a prefix before all names; files of models
// with a head have the family's prefix before the model's own names.
std::string own_name(const model::FileNames& files, std::string name) {
  while (begins_with_any(name, std::array<std::string_view, 2>{"_orig_mod.", "module."}))
    name.erase(0, name.find('.') + 1);
  for (const auto& [part, by] : files.renamed) {
    if (const std::size_t at = name.find(part); at != name.npos) name.replace(at, part.size(), by);
  }
  const std::string_view model = files.model;
  if (!files.kept) return name.rfind(model, 0) == 0 ? name.substr(model.size()) : name;
  return begins_with_any(name, files.own) ? files.model + name : name;
}

// Whether a tensor that is not a parameter lies outside of the trained model: another head (score, v_head),
// layers that predict more tokens (mtp), an image encoder. A tensor inside of the model's own layers, or next
// to the output matrix, does not: it would change what these compute.
bool is_beside(const model::FileNames& files, const std::string& name) {
  static constexpr std::string_view kMorePredictions[] = {"mtp.", "model.mtp."};
  if (name.rfind("lm_head.", 0) == 0) return false;
  if (begins_with_any(name, kMorePredictions)) return true;
  return files.kept ? name.rfind(files.model, 0) != 0 : !begins_with_any(name, files.own);
}

// Whether a tensor is of a layer after the model's last one, which predicts a further token, in a family
// whose files have such layers.
bool is_of_extra_layer(const model::FileNames& files, const std::string& name, std::int64_t layers) {
  const std::string prefix = std::string(files.layers) + ".";
  if (!files.extra_layers || name.rfind(prefix, 0) != 0) return false;
  std::int64_t layer = -1;
  const char *const begin = name.data() + prefix.size(), *const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(begin, end, layer);
  return error == std::errc() && stop != end && *stop == '.' && layer >= layers;
}

// Logs one warning that names the tensors that are left out.
void tell_left_out(const std::string& where, const std::vector<std::string>& names) {
  if (names.empty()) return;
  constexpr std::size_t kShown = 4;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, names.size()); ++i)
    text += (i > 0 ? ", " : "") + hf::in_quotes(names[i]);
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  log::warning("{}: {} {} no part of the model that is trained, and {} left out, of what is saved, too",
               where, text, names.size() == 1 ? "is" : "are", names.size() == 1 ? "is" : "are");
}

// The weight files of a directory, and the tensors that they hold.
class Directory {
 public:
  Directory(const std::string& directory, const model::FileNames& names,
            std::vector<std::unique_ptr<SafeTensors>>& files)
      : names_(names), files_(files) {
    const std::string single = directory + "/model.safetensors", index = single + ".index.json";
    if (hf::is_there(single)) {
      where_ = single;
      const SafeTensors& file = open(single);
      for (const auto& entry : file.entries()) add(file, entry);
    } else if (hf::is_there(index)) {
      where_ = index;
      open_shards(directory);
    } else {
      hf::refuse_without_weights(directory, "model.safetensors or model.safetensors.index.json");
    }
    for (const auto& file : files_) {
      for (const auto& [name, kept] : file->metadata()) {
        aliases_[own_name(names_, name)] = own_name(names_, kept);
      }
    }
  }

  const std::string& where() const { return where_; }
  const Sources& sources() const { return sources_; }

  // The tensor of that name, or the tensor that shares its bytes according to the file's metadata. Null:
  // neither.
  const Source* find(const std::string& name) const {
    if (const auto it = sources_.find(name); it != sources_.end()) return &it->second;
    const auto alias = aliases_.find(name);
    if (alias == aliases_.end()) return nullptr;
    const auto it = sources_.find(alias->second);
    return it == sources_.end() ? nullptr : &it->second;
  }

 private:
  const SafeTensors& open(const std::string& path) {
    files_.push_back(std::make_unique<SafeTensors>(path, "the weights of a model"));
    return *files_.back();
  }

  void add(const SafeTensors& file, const SafeTensors::Entry& entry) {
    const std::string name = own_name(names_, entry.name);
    if (!sources_.emplace(name, Source{&file, &entry}).second) {
      throw Error(Errc::kUsage, file.path(),
                  fmt::format("has {} twice, with and without a prefix such as \"{}\"", hf::in_quotes(name),
                              names_.model),
                  "keep one of the two");
    }
  }

  void open_shards(const std::string& directory) {
    const nlohmann::json index =
        hf::parse_object(hf::read_json_text(where_, "the index of the weights"), where_);
    if (!index.contains("weight_map") || !index["weight_map"].is_object()) {
      throw Error(Errc::kUsage, where_, "has no object \"weight_map\"", "fetch or save the model again");
    }
    std::map<std::string, std::set<std::string>> names_of;  // the tensor names of each file shard
    for (const auto& item : index["weight_map"].items()) {
      const std::string shard = item.value().is_string() ? item.value().get<std::string>() : "";
      if (shard.empty() || shard == "." || shard == ".." ||
          shard.find_first_of(std::string_view("/\0", 2)) != shard.npos) {
        throw Error(Errc::kUsage, where_,
                    fmt::format("{} is mapped to {}; the name of a file beside the index is expected",
                                hf::in_quotes(item.key()), hf::in_quotes(shard)),
                    "fetch or save the model again");
      }
      names_of[shard].insert(item.key());
    }
    for (const auto& [shard, names] : names_of) {
      const std::string path = directory + "/" + shard;
      if (!hf::is_there(path)) {
        throw Error(Errc::kUsage, path,
                    fmt::format("is missing; the index names it for {} tensors", names.size()),
                    "fetch the missing file into the directory");
      }
      add_shard(open(path), names);
    }
  }

  // The index and the shard must name the same tensors; buffers may be left out.
  void add_shard(const SafeTensors& file, const std::set<std::string>& names) {
    const std::string hint = "the index and its files are not from one save; fetch or save the model again";
    for (const std::string& name : names) {
      const SafeTensors::Entry* entry = file.find(name);
      if (entry == nullptr) {
        throw Error(Errc::kUsage, file.path(),
                    fmt::format("has no {}, which the index says is here", hf::in_quotes(name)), hint);
      }
      add(file, *entry);
    }
    if (names.size() == file.entries().size()) return;
    for (const auto& entry : file.entries()) {
      if (names.count(entry.name) != 0 || is_buffer(entry.name)) continue;
      throw Error(Errc::kUsage, file.path(),
                  fmt::format("has {}, which the index does not place here", hf::in_quotes(entry.name)),
                  hint);
    }
  }

  const model::FileNames& names_;
  std::vector<std::unique_ptr<SafeTensors>>& files_;
  std::string where_;
  Sources sources_;
  Aliases aliases_;
};

const char* table_name(Arch arch) {
  return model::family_of(arch).files.embedding;
}
constexpr const char* kHeadName = "lm_head.weight";

// The source of one parameter, or null. In a tied model the output matrix may serve as the embedding.
const Source* find_param(const Directory& directory, const ModelConfig& config, const std::string& name) {
  const bool table = config.tied && name == table_name(config.arch);
  const Source* source = directory.find(name);
  return source == nullptr && table ? directory.find(kHeadName) : source;
}

// An expert's matrix in the tensors of all experts of its layer, where transformers has them in place of a
// tensor for each matrix: gate's rows, then up's.
void find_in_all_experts(const ModelConfig& config, const Unit& unit, std::size_t index, Param& p) {
  const model::BlockNames& names = model::family_of(config.arch).files.block;
  const auto each =
      static_cast<std::size_t>(unit.params.size()) / static_cast<std::size_t>(unit.expert_count);
  const std::int64_t expert = unit.first_expert + static_cast<std::int64_t>(index / each);
  const model::ExpertParams of(config, static_cast<std::int64_t>(index / each));
  const bool down = index == of.down;
  const std::size_t layer_end = p.name.find(names.experts);
  p.file_name = p.name.substr(0, layer_end) + (down ? names.all_down : names.all_gate_up);
  p.file_slices = config.experts.count;
  const std::int64_t of_slice = down ? p.whole_rows : 2 * p.whole_rows;
  p.file_rows = of_slice * p.file_slices;
  p.file_row = expert * of_slice + (index == of.up ? p.whole_rows : 0);
}

// What is read from files, as the directory has it: all parameters but adapters, and choice biases.
std::vector<Param> params_in_files(const Directory& directory, const Model& model) {
  const ModelConfig& config = model.config();
  std::vector<Param> list;
  for (const Unit& unit : model.units()) {
    for (std::size_t i = 0; i < unit.params.size(); ++i) {
      if (unit.params[i].adapter) continue;
      Param& p = list.emplace_back(unit.params[i]);
      if (!unit.is_experts() || !p.file_name.empty()) continue;
      Param fused = p;
      find_in_all_experts(config, unit, i, fused);
      const Source* const source = directory.find(fused.file_name);
      if (source != nullptr && float_dtype(source->entry->dtype)) p = std::move(fused);
    }
    if (unit.choice_bias) list.push_back(*unit.choice_bias);
  }
  return list;
}

// The coded matrices among the parameters.
Coded find_coded(const Directory& directory, const std::vector<Param>& params,
                 const Quantization& quantization) {
  Coded coded;
  const FindSource find = [&](const std::string& name) { return directory.find(name); };
  for (const Param& p : params) {
    const std::string& name = p.name_in_files();
    if (p.vector || coded.count(name) != 0) continue;
    if (auto matrix = CodedSource::find(name, p.rows_in_files(), p.whole_cols, quantization, find))
      coded.emplace(name, std::move(*matrix));
  }
  return coded;
}

// Whether it is the bias of a coded matrix of a layer without bias, and all zeros: some programs write such.
bool is_zero_bias(const Source& source, const std::string& name, const Coded& coded) {
  if (!ends_with(name, ".bias")) return false;
  const auto dtype = float_dtype(source.entry->dtype);
  if (!dtype || coded.count(name.substr(0, name.size() - 4) + "weight") == 0) return false;
  std::vector<float> values(static_cast<std::size_t>(source.entry->count()));
  hf::read_values({source.file, source.entry, *dtype}, 0, source.entry->count(), values.data());
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0; });
}

void refuse_missing(const Directory& directory, const std::vector<Param>& params, const Model& model,
                    const Coded& coded) {
  std::vector<std::string> missing;
  for (const Param& p : params) {
    const std::string& name = p.name_in_files();
    if (coded.count(name) != 0 || find_param(directory, model.config(), name) != nullptr) continue;
    if (missing.empty() || missing.back() != name) missing.push_back(name);
  }
  if (missing.empty()) return;
  if (missing.size() == 1 && missing[0] == kHeadName) {
    throw Error(
        Errc::kUsage, directory.where(),
        "lm_head.weight is missing, and the configuration says that it is not tied to the embedding",
        "if the two are one matrix, set \"tie_word_embeddings\": true in config.json; a model that was "
        "saved without its head cannot be trained on");
  }
  std::string text = "misses " + hf::in_quotes(missing[0]);
  if (model.config().tied && missing[0] == table_name(model.config().arch))
    text += " (or \"lm_head.weight\")";
  if (missing.size() > 1) text += fmt::format(" and {} more of the model's tensors", missing.size() - 1);
  if (!directory.sources().empty()) {
    text += fmt::format("; among the {} there is {}", directory.sources().size(),
                        hf::in_quotes(directory.sources().begin()->first));
  }
  throw Error(Errc::kUsage, directory.where(), text, "config.json and the weights must be of the same model");
}

// Checks the source's shape and dtype against the parameter, and returns it with its dtype filled in.
Source checked(const Source& source, const Param& p) {
  const SafeTensors::Entry& entry = *source.entry;
  const std::vector<std::int64_t> expected = p.shape_in_files();
  if (entry.shape != expected) {
    throw Error(Errc::kUsage, source.file->path(),
                fmt::format("{} has the shape {}; the configuration asks for {}", hf::in_quotes(entry.name),
                            hf::shape_text(entry.shape), hf::shape_text(expected)),
                "config.json and the weights must be of the same model");
  }
  const auto dtype = float_dtype(entry.dtype);
  if (!dtype) {
    throw Error(Errc::kUsage, source.file->path(),
                fmt::format("{} has the dtype {}; F64, F32, F16 and BF16 can be read",
                            hf::in_quotes(entry.name), entry.dtype),
                "convert the weights to one of these");
  }
  return {source.file, source.entry, *dtype};
}

// Refuses files that store a tied matrix under both names with different values.
void refuse_untied_pair(const Directory& directory, const ModelConfig& config, const Param& table) {
  const Source *head = directory.find(kHeadName), *embedding = directory.find(table.name);
  if (head == nullptr || embedding == nullptr || head->entry == embedding->entry) return;
  if (equal(checked(*head, table), checked(*embedding, table))) return;
  throw Error(Errc::kUsage, directory.where(),
              fmt::format("{} and {} differ, and the configuration says that they are tied",
                          hf::in_quotes(table_name(config.arch)), hf::in_quotes(kHeadName)),
              "set \"tie_word_embeddings\": false in config.json");
}

}  // namespace

struct HfWeights::State {
  std::vector<std::unique_ptr<SafeTensors>> files;
  Coded coded;
  std::map<std::string, Place> params;
};

// The files have all experts, whichever of them the model has.
HfWeights::HfWeights(const std::string& directory_path, const Model& of) : state_(std::make_unique<State>()) {
  const Model model = of.shard().experts.degree > 1 ? of.with_all_experts() : of;
  const ModelConfig& config = model.config();
  const Directory directory(directory_path, model::family_of(config.arch).files, state_->files);
  const std::vector<Param> params = params_in_files(directory, model);
  state_->coded = find_coded(directory, params, read_quantization(directory_path));
  refuse_missing(directory, params, model, state_->coded);
  std::set<std::string> known;
  for (const auto& [name, matrix] : state_->coded) known.insert(matrix.names().begin(), matrix.names().end());
  for (const Param& p : params) {
    Place& place = state_->params[p.name];
    place.first = p.file_row * p.whole_cols, place.choice_bias = p.offset < 0;
    if (const auto coded = state_->coded.find(p.name_in_files()); coded != state_->coded.end()) {
      place.coded = &coded->second;
      continue;
    }
    place.source = checked(*find_param(directory, config, p.name_in_files()), p);
    known.insert(p.name_in_files());
    if (config.tied && p.name == table_name(config.arch)) refuse_untied_pair(directory, config, p);
  }
  std::vector<std::string> left_out;
  const model::FileNames& names = model::family_of(config.arch).files;
  for (const auto& [name, source] : directory.sources()) {
    const bool tied_head = config.tied && name == kHeadName;
    if (known.count(name) != 0 || tied_head || is_buffer(name)) continue;
    if (is_zero_bias(source, name, state_->coded)) continue;
    if (is_beside(names, name) || is_of_extra_layer(names, name, config.layers)) {
      left_out.push_back(source.entry->name);
      continue;
    }
    throw Error(Errc::kUsage, source.file->path(),
                fmt::format("{} is no tensor of this model ({}, {} layers)",
                            hf::in_quotes(source.entry->name), name_of(config.arch), config.layers),
                "config.json and the weights must be of the same model");
  }
  tell_left_out(directory.where(), left_out);
}

HfWeights::~HfWeights() = default;

std::vector<float> HfWeights::choice_biases(const Model& model) const {
  const ModelConfig& c = model.config();
  std::vector<float> biases;
  if (!c.experts.choice_bias) return biases;
  biases.resize(static_cast<std::size_t>(c.layers * c.experts.count));
  for (const Unit& unit : model.units()) {
    if (unit.choice_bias)
      read(*unit.choice_bias, 0, c.experts.count, biases.data() + unit.layer * c.experts.count);
  }
  return biases;
}

bool HfWeights::any_coded() const {
  return !state_->coded.empty();
}

bool HfWeights::is_coded(const Param& param) const {
  const auto it = state_->params.find(param.name);
  return it != state_->params.end() && it->second.coded != nullptr;
}

std::optional<ParamCode> HfWeights::code_of(const Param& param) const {
  const auto it = state_->params.find(param.name);
  if (it == state_->params.end() || it->second.coded == nullptr) return std::nullopt;
  return it->second.coded->code();
}

void HfWeights::read_codes(const Param& param, std::int64_t first_row, std::int64_t rows,
                           const CodePlaces& places, std::byte* base) const {
  const auto it = state_->params.find(param.name);
  ZG_ASSERT(it != state_->params.end() && it->second.coded != nullptr, "{} has no codes", param.name);
  it->second.coded->read_codes(code_part(param, first_row, rows), places, base);
}

std::vector<std::string> HfWeights::files() const {
  std::vector<std::string> paths;
  for (const auto& file : state_->files) paths.push_back(file->path());
  return paths;
}

bool HfWeights::all_bf16() const {
  return std::all_of(state_->params.begin(), state_->params.end(), [](const auto& of) {
    const Place& place = of.second;
    return place.coded != nullptr || place.choice_bias || place.source.dtype == DType::kBF16;
  });
}

void HfWeights::read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const {
  const auto it = state_->params.find(param.name);
  ZG_ASSERT(it != state_->params.end(), "no parameter {}", param.name);
  ZG_ASSERT(0 <= begin && begin <= end && end <= param.count(), "{} [{}, {})", param.name, begin, end);
  const Place& place = it->second;
  if (begin == end) return;
  if (place.coded != nullptr && param.cols != param.whole_cols)
    return read_some_columns(place, param, begin, end, out);
  if (!param.conv1d || place.coded != nullptr) {
    param.for_runs(begin, end, [&](std::int64_t at, std::int64_t whole, std::int64_t n) {
      place.read(whole, whole + n, out + at - begin);
    });
    return;
  }
  for (const Band& band : param.bands) {
    const std::int64_t offset = band.line * param.cols;
    const std::int64_t from = std::max(begin, offset), to = std::min(end, offset + band.lines * param.cols);
    if (from >= to) continue;
    read_transposed(place.source, {place.first, param.whole_rows, band.whole_line, param.first_col},
                    param.cols, from - offset, to - offset, out + from - begin);
  }
}

}  // namespace zg
