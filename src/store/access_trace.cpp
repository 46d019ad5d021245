#include "ziggurat/store/access_trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"

namespace zg {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "ziggurat access trace";
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kMostSegments = 1 << 24;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;
// Each program keeps an index over all segments: bounds the memory of many programs over many segments.
constexpr std::int64_t kMostIndexed = 1 << 27;
constexpr JsonBounds kBounds{.depth = 8, .values = 48'000'000};
constexpr const char* kDamaged = "the file is damaged or incomplete: copy or record it again";
constexpr std::int64_t kPage = 4096, kMostGranule = 1 << 30;
constexpr std::size_t kMostPriorities = 255;
constexpr std::int64_t kMostTime = std::int64_t{1} << 40, kMostTimeInAll = std::int64_t{1} << 56;

constexpr Role kRoles[] = {Role::kWeight, Role::kGradient, Role::kOptimizerState, Role::kActivation,
                           Role::kOther};
constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16,
                             DType::kI64, DType::kI32, DType::kU16, DType::kU8};
constexpr Tier kLowest[] = {Tier::kDevice, Tier::kHost, Tier::kNvme};

std::string access_text(const AccessStep& a) {
  std::string text(a.tier == Tier::kDevice ? "d" : "h");
  text += a.access == Access::kRead ? 'r' : a.access == Access::kWrite ? 'w' : 'o';
  if (a.last) text += '!';
  return text;
}

// Reads the file's JSON tree; messages name the place in it.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  AccessTrace read() {
    const auto root = parse_json<Json>(read_text_file(path_, "a trace"), path_, kDamaged, kBounds);
    if (!root.is_object() || !root.contains("format") || root["format"] != kFormat) {
      throw Error(Errc::kUsage, path_,
                  fmt::format("is no trace: expected an object with \"format\": \"{}\"", kFormat),
                  "make one with ziggurat trace record CONFIG -o FILE");
    }
    const std::int64_t version = integer(member(root, "", "version"), "version", 1, kMost);
    if (version != kVersion) {
      fail("version", fmt::format("found {}, expected {}", version, kVersion),
           "record the trace again with this program");
    }
    AccessTrace trace;
    const auto drives = static_cast<int>(integer(member(root, "", "drives"), "drives", 0, 4096));
    trace.table = TensorTable(drives, granule(root));
    const Json& budgets = member(root, "", "budgets");
    trace.budgets.device = integer(member(budgets, "budgets", "device"), "budgets.device", 0, kMostBytes);
    trace.budgets.host = integer(member(budgets, "budgets", "host"), "budgets.host", 0, kMostBytes);
    read_tensors(list(member(root, "", "tensors"), "tensors"), trace);
    const Json& programs = list(member(root, "", "programs"), "programs");
    const auto most_programs = static_cast<std::size_t>(kMostIndexed / trace.table.segment_count());
    if (programs.size() > most_programs)
      fail("programs", fmt::format("has {} programs over {} segments, expected at most {}", programs.size(),
                                   trace.table.segment_count(), most_programs));
    for (std::size_t i = 0; i < programs.size(); ++i) {
      trace.programs.push_back(
          program(programs[i], fmt::format("programs[{}]", i), trace.table.segment_count()));
    }
    read_sequence(list(member(root, "", "sequence"), "sequence"), trace);
    return trace;
  }

 private:
  static constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

  [[noreturn]] void fail(const std::string& place, const std::string& what,
                         const std::string& hint = {}) const {
    throw Error(Errc::kUsage, fmt::format("{}: {}", path_, place), what, hint);
  }

  // A value as text, short enough for a message.
  static std::string shown(const Json& j) {
    if (j.is_structured() && j.size() > 8)
      return fmt::format("{} of {} values", j.is_array() ? "a list" : "an object", j.size());
    const std::string text = j.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
  }

  const Json& member(const Json& object, const std::string& place, const char* key) const {
    if (!object.is_object()) fail(place, fmt::format("found {}, expected an object", shown(object)));
    const auto it = object.find(key);
    if (it == object.end()) fail(place.empty() ? key : fmt::format("{}.{}", place, key), "is missing");
    return *it;
  }
  const Json& list(const Json& j, const std::string& place) const {
    if (!j.is_array()) fail(place, fmt::format("found {}, expected a list", shown(j)));
    return j;
  }
  std::int64_t integer(const Json& j, const std::string& place, std::int64_t least, std::int64_t most) const {
    const bool fits = j.is_number_unsigned() ? j.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMost)
                                             : j.is_number_integer();
    if (fits) {
      const auto value = j.get<std::int64_t>();
      if (value >= least && value <= most) return value;
    }
    const std::string range =
        most == kMost ? fmt::format("{} or more", least) : fmt::format("{} to {}", least, most);
    fail(place, fmt::format("found {}, expected a whole number, {}", shown(j), range));
  }
  std::string word(const Json& j, const std::string& place) const {
    if (!j.is_string()) fail(place, fmt::format("found {}, expected a text", shown(j)));
    return j.get<std::string>();
  }
  template <class T, std::size_t n, class Name>
  T one_of(const Json& j, const std::string& place, const T (&values)[n], Name&& name) const {
    std::string known;
    for (const T value : values) {
      if (j.is_string() && j.get_ref<const std::string&>() == name(value)) return value;
      known += fmt::format("{}{}", known.empty() ? "" : ", ", name(value));
    }
    fail(place, fmt::format("found {}, expected one of {}", shown(j), known));
  }

  std::int64_t granule(const Json& root) const {
    constexpr const char* kKey = "device_granule";
    if (!root.contains(kKey)) return kPage;
    const std::int64_t bytes = integer(root[kKey], kKey, kPage, kMostGranule);
    if (bytes % kPage != 0) fail(kKey, fmt::format("found {}, expected a multiple of {}", bytes, kPage));
    return bytes;
  }

  // At most what a tensor's pieces are charged for in any tier, or one more than kMostBytes.
  static std::int64_t charged(const TensorSpec& spec, std::int64_t pieces, std::int64_t granule) {
    const double most = static_cast<double>(spec.count) * static_cast<double>(size_of(spec.dtype)) +
                        static_cast<double>(pieces) * static_cast<double>(granule);
    const double all = most * spec.versions;
    return all > static_cast<double>(kMostBytes) ? kMostBytes + 1 : static_cast<std::int64_t>(all);
  }

  void read_tensors(const Json& tensors, AccessTrace& trace) const {
    std::vector<int> priorities;
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::string place = fmt::format("tensors[{}]", i);
      const Json& t = list(tensors[i], place);
      if (t.size() != 7 && t.size() != 8) {
        fail(place, fmt::format(
                        "found {} values, expected 7 or 8: name, type, elements, role, lowest tier, elements "
                        "of a segment, priority, versions",
                        t.size()));
      }
      const auto at = [&](int k) { return fmt::format("{}[{}]", place, k); };
      TensorSpec spec;
      spec.name = word(t[0], at(0));
      spec.dtype = one_of(t[1], at(1), kDTypes, [](DType d) { return name_of(d); });
      spec.count = integer(t[2], at(2), 1, kMostBytes / static_cast<std::int64_t>(size_of(spec.dtype)));
      spec.role = one_of(t[3], at(3), kRoles, static_cast<const char* (*)(Role)>(name_of));
      spec.lowest = one_of(t[4], at(4), kLowest, [](Tier tier) { return name_of(tier); });
      spec.segment_elements = integer(t[5], at(5), 0, kMost);
      spec.priority = static_cast<int>(
          integer(t[6], at(6), std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
      if (t.size() == 8) spec.versions = static_cast<int>(integer(t[7], at(7), 1, 64));
      const std::int64_t pieces =
          spec.segment_elements == 0 ? 1 : (spec.count - 1) / spec.segment_elements + 1;
      if (pieces > kMostSegments - trace.table.segment_count()) {
        fail(at(5), fmt::format("makes {} segments more, expected at most {} in all", pieces, kMostSegments));
      }
      const auto known = std::lower_bound(priorities.begin(), priorities.end(), spec.priority);
      if (known == priorities.end() || *known != spec.priority) priorities.insert(known, spec.priority);
      if (priorities.size() > kMostPriorities)
        fail(at(6), fmt::format("is one priority more than {}", kMostPriorities));
      // The device's charge is the larger one, and NVMe holds all versions. Checked before the table adds
      // them up.
      bytes += charged(spec, pieces, trace.table.device_granule());
      if (bytes > kMostBytes)
        fail(at(2), fmt::format("found over {} bytes up to here, expected at most that", kMostBytes));
      if (spec.name.empty()) fail(at(0), "is empty, expected a name");
      if (trace.table.find(spec.name) >= 0)
        fail(at(0), fmt::format("found {} a second time, expected a name of its own", shown(t[0])));
      trace.table.add(spec);
    }
    if (tensors.empty()) fail("tensors", "is empty, expected one at least");
  }

  AccessStep access(const Json& segment, const Json& how, const std::string& place,
                    std::int32_t segments) const {
    AccessStep a;
    a.segment = static_cast<SegmentId>(integer(segment, place, 0, segments - 1));
    const std::string text = how.is_string() ? how.get<std::string>() : "";
    const bool known = (text.size() == 2 || (text.size() == 3 && text[2] == '!')) &&
                       (text[0] == 'd' || text[0] == 'h') &&
                       (text[1] == 'r' || text[1] == 'w' || text[1] == 'o');
    if (!known)
      fail(place, fmt::format("found {}, expected an access: d or h, then r, w or o, then ! or nothing",
                              shown(how)));
    a.tier = text[0] == 'd' ? Tier::kDevice : Tier::kHost;
    a.access = text[1] == 'r' ? Access::kRead : text[1] == 'w' ? Access::kWrite : Access::kOverwrite;
    a.last = text.size() == 3;
    return a;
  }

  Program program(const Json& j, const std::string& place, std::int32_t segments) const {
    Program program(word(member(j, place, "name"), place + ".name"));
    const Json& ops = list(member(j, place, "ops"), place + ".ops");
    if (ops.empty()) fail(place + ".ops", "is empty, expected one operation at least");
    const Json* times = j.contains("times") ? &list(j["times"], place + ".times") : nullptr;
    if (times != nullptr && times->size() != ops.size()) {
      fail(place + ".times",
           fmt::format("found {} values, expected one for each of {} operations", times->size(), ops.size()));
    }
    std::int64_t time_in_all = 0;
    std::vector<AccessStep> accesses;
    std::vector<SegmentId> seen(static_cast<std::size_t>(segments), -1);  // the last operation that names it
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const std::string op = fmt::format("{}.ops[{}]", place, i);
      list(ops[i], op);
      if (ops[i].empty() || ops[i].size() % 2 != 0)
        fail(op, fmt::format("found {} values, expected pairs of a segment and its access", ops[i].size()));
      accesses.clear();
      for (std::size_t k = 0; k < ops[i].size(); k += 2) {
        accesses.push_back(access(ops[i][k], ops[i][k + 1], op, segments));
        auto& last = seen[static_cast<std::size_t>(accesses.back().segment)];
        if (last == static_cast<SegmentId>(i))
          fail(op, fmt::format("names segment {} twice, expected each once", accesses.back().segment));
        last = static_cast<SegmentId>(i);
      }
      const auto time =
          times == nullptr ? 1 : integer((*times)[i], fmt::format("{}.times[{}]", place, i), 0, kMostTime);
      time_in_all += time;
      if (time_in_all > kMostTimeInAll)
        fail(fmt::format("{}.times[{}]", place, i),
             fmt::format("makes more than {} in all, expected at most that", kMostTimeInAll));
      program.add_op(accesses, time);
    }
    program.finish(segments);
    return program;
  }

  void read_sequence(const Json& sequence, AccessTrace& trace) const {
    for (std::size_t i = 0; i < sequence.size(); ++i) {
      const std::string place = fmt::format("sequence[{}]", i);
      if (!sequence[i].is_array() || sequence[i].size() != 2)
        fail(place, fmt::format("found {}, expected a program and how often it runs", shown(sequence[i])));
      const auto which =
          integer(sequence[i][0], place, 0, static_cast<std::int64_t>(trace.programs.size()) - 1);
      const auto times = integer(sequence[i][1], place, 1,
                                 kMostTraceRuns - static_cast<std::int64_t>(trace.sequence.size()));
      trace.sequence.insert(trace.sequence.end(), static_cast<std::size_t>(times),
                            static_cast<std::int32_t>(which));
    }
    if (trace.sequence.empty()) fail("sequence", "is empty, expected one program at least");
  }

  const std::string& path_;
};

}  // namespace

void save_trace(const AccessTrace& trace, const std::string& path, std::int64_t largest) {
  fmt::memory_buffer out;
  const auto put = [&out](fmt::string_view format, const auto&... values) {
    fmt::vformat_to(std::back_inserter(out), format, fmt::make_format_args(values...));
  };
  const auto quoted = [](const std::string& text) {
    return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  // Times that are all 1 are left out.
  const auto put_times = [&put](const Program& program) {
    bool all_one = true;
    for (std::int32_t op = 0; op < program.op_count(); ++op) all_one = all_one && program.time(op) == 1;
    if (all_one) return;
    put(", \"times\": [");
    for (std::int32_t op = 0; op < program.op_count(); ++op)
      put("{}{}", op == 0 ? "" : ", ", program.time(op));
    put("]");
  };
  put("{{\"format\": \"{}\", \"version\": {},\n \"drives\": {}, \"budgets\": {{\"device\": {}, \"host\": "
      "{}}},\n",
      kFormat, kVersion, trace.table.drives(), std::min(trace.budgets.device, kMostBytes),
      std::min(trace.budgets.host, kMostBytes));
  if (trace.table.device_granule() != kPage) put(" \"device_granule\": {},\n", trace.table.device_granule());
  put(" \"tensors\": [");
  for (TensorId id = 0; id < trace.table.tensor_count(); ++id) {
    const TensorSpec& s = trace.table.tensor(id).spec;
    put("{}\n  [{}, \"{}\", {}, \"{}\", \"{}\", {}, {}", id == 0 ? "" : ",", quoted(s.name), name_of(s.dtype),
        s.count, name_of(s.role), name_of(s.lowest), s.segment_elements, s.priority);
    if (s.versions != 1) put(", {}", s.versions);
    put("]");
  }
  put("],\n \"programs\": [");
  for (std::size_t p = 0; p < trace.programs.size(); ++p) {
    const Program& program = trace.programs[p];
    put("{}\n  {{\"name\": {}, \"ops\": [", p == 0 ? "" : ",", quoted(program.name()));
    for (std::int32_t op = 0; op < program.op_count(); ++op) {
      put("{}\n   [", op == 0 ? "" : ",");
      bool first = true;
      for (const AccessStep& a : program.op(op)) {
        put("{}{}, \"{}\"", first ? "" : ", ", a.segment, access_text(a));
        first = false;
      }
      put("]");
    }
    put("]");
    put_times(program);
    put("}}");
  }
  put("],\n \"sequence\": [");
  for (std::size_t i = 0; i < trace.sequence.size();) {
    std::size_t end = i + 1;
    while (end < trace.sequence.size() && trace.sequence[end] == trace.sequence[i]) ++end;
    put("{}[{}, {}]", i == 0 ? "" : ", ", trace.sequence[i], end - i);
    i = end;
  }
  put("]}}\n");
  const std::string text = fmt::to_string(out);
  std::string problem = json_out_of_bounds(text, kBounds);
  if (static_cast<std::int64_t>(text.size()) > largest)
    problem = fmt::format("has {} bytes, {} at most expected", text.size(), largest);
  if (!problem.empty())  // nobody could load it
    throw Error(Errc::kUsage, path, "the trace " + problem,
                "record a model with fewer layers or micro-batches, or larger segments");
  write_file_atomically(path, text);
}

AccessTrace load_trace(const std::string& path) {
  return Reader(path).read();
}

}  // namespace zg
