#include "ziggurat/plan/machine_file.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <utility>

#include "plan/machine_texts.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/parse.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kFormat = "ziggurat-machine 1";
constexpr double kUsualSpread = 0.1;  // of measured figures
constexpr const char* kHint =
    "docs/planning.md describes machine files; ziggurat probe --write-machine writes one";

enum class Kind { kBytes, kRate, kFlops, kMoney, kMoneyPerHour };

struct Unit {
  const char* name;
  Kind kind;
  double factor;
};
constexpr Unit kUnits[] = {
    {"B", Kind::kBytes, 1},          {"GB", Kind::kBytes, 1e9},     {"TB", Kind::kBytes, 1e12},
    {"PB", Kind::kBytes, 1e15},      {"GiB", Kind::kBytes, 0x1p30}, {"TiB", Kind::kBytes, 0x1p40},
    {"B/s", Kind::kRate, 1},         {"MB/s", Kind::kRate, 1e6},    {"GB/s", Kind::kRate, 1e9},
    {"TB/s", Kind::kRate, 1e12},     {"FLOP/s", Kind::kFlops, 1},   {"GFLOP/s", Kind::kFlops, 1e9},
    {"TFLOP/s", Kind::kFlops, 1e12}, {"USD", Kind::kMoney, 1},      {"USD/h", Kind::kMoneyPerHour, 1},
};

std::string units_of(Kind kind) {
  std::string text;
  for (const Unit& unit : kUnits) {
    if (unit.kind == kind) text += (text.empty() ? "" : ", ") + std::string(unit.name);
  }
  return text;
}

// An object of the file, all of whose keys are known.
class Reader {
 public:
  Reader(const json& object, std::string where, std::string place, std::initializer_list<const char*> known)
      : object_(object), where_(std::move(where)), place_(std::move(place)) {
    if (!object.is_object()) fail(place_, "is not an object", "write {...}");
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      const auto near = nearest_name(key, std::vector<std::string>(known.begin(), known.end()));
      fail(
          path(key), "is no key of a machine file",
          near ? "did you mean " + *near + "?" : fmt::format("the keys here are {}", fmt::join(known, ", ")));
    }
  }
  [[noreturn]] void fail(const std::string& place, const std::string& what, const std::string& hint) const {
    throw Error(Errc::kUsage, where_ + (place.empty() ? "" : ": " + place), what, hint);
  }
  bool has(const char* key) const { return object_.contains(key); }
  const json& at(const char* key) const {
    if (!has(key)) fail(path(key), "is missing", kHint);
    return object_.at(key);
  }
  std::string text(const char* key) const {
    if (!at(key).is_string() || at(key).get<std::string>().empty())
      fail(path(key), "is " + at(key).dump() + ", not a text", "write \"...\"");
    return at(key).get<std::string>();
  }
  int number(const char* key, int most) const {
    const json& found = at(key);
    if (!found.is_number_integer() || found.get<std::int64_t>() < 1 || found.get<std::int64_t>() > most)
      fail(path(key), "is " + found.dump(), fmt::format("write a whole number from 1 to {}", most));
    return found.get<int>();
  }
  Figure figure(const char* key, Kind kind) const {
    const Reader of(at(key), where_, path(key), {"value", "unit", "measured", "source", "derate", "spread"});
    Figure f;
    f.source = of.text("source");
    f.unit = of.text("unit");
    const auto unit = std::find_if(std::begin(kUnits), std::end(kUnits),
                                   [&](const Unit& u) { return u.name == f.unit && u.kind == kind; });
    if (unit == std::end(kUnits))
      fail(of.path("unit"), "is " + f.unit, "units of this figure: " + units_of(kind));
    if (!of.at("measured").is_boolean())
      fail(of.path("measured"), "is " + of.at("measured").dump(),
           "write true only if this very part was measured");
    f.measured = of.at("measured").get<bool>();
    f.value = of.real("value", 0, 1e18) * unit->factor;
    if (f.measured && of.has("derate")) {
      fail(of.path("derate"), "is given for a measured figure",
           "give \"spread\", the share by which measurements differ");
    }
    if (of.has("spread") && of.has("derate"))
      fail(of.path("derate"), "is given beside a spread",
           "a data sheet's figure has a derate, one that was derived from measurements a spread");
    if (of.has("derate")) f.derate = of.real("derate", 0, 1);
    if (of.has("spread")) {
      f.spread = of.real("spread", 0, 0.9);
    } else if (f.measured) {
      f.spread = kUsualSpread;
    }
    return f;
  }
  std::optional<Figure> figure_if_any(const char* key, Kind kind) const {
    return has(key) ? std::optional(figure(key, kind)) : std::nullopt;
  }
  Reader within(const char* key, std::initializer_list<const char*> known) const {
    return {at(key), where_, path(key), known};
  }

 private:
  std::string path(const std::string& key) const { return place_.empty() ? key : place_ + "." + key; }
  double real(const char* key, double above, double most) const {
    const json& found = at(key);
    const double value = found.is_number() ? found.get<double>() : -1;
    if (!found.is_number() || !(value > above) || !(value <= most))
      fail(path(key), "is " + found.dump(),
           fmt::format("write a number above {:g}, at most {:g}", above, most));
    return value;
  }

  const json& object_;
  std::string where_, place_;
};

ordered_json json_of(const Figure& f) {
  const auto unit =
      std::find_if(std::begin(kUnits), std::end(kUnits), [&](const Unit& u) { return u.name == f.unit; });
  ordered_json o;
  o["value"] = f.value / (unit == std::end(kUnits) ? 1 : unit->factor);
  o["unit"] = f.unit;
  o["measured"] = f.measured;
  if (f.derate != 1) o["derate"] = f.derate;
  if (f.spread != 0) o["spread"] = f.spread;
  o["source"] = f.source;
  return o;
}

void put(ordered_json& object, const char* key, const std::optional<Figure>& figure) {
  if (figure) object[key] = json_of(*figure);
}

}  // namespace

double Figure::at(Outlook outlook) const {
  if (outlook == Outlook::kExpected) return value * derate;
  if (spread > 0) return value * (outlook == Outlook::kFast ? 1 + spread : 1 - spread);
  return outlook == Outlook::kFast ? value : value * derate * derate;
}

MachineFile parse_machine(std::string_view text, const std::string& where) {
  const json object = parse_json(text, where, kHint, {.comments = true});
  const Reader all(object, where, "",
                   {"format", "name", "about", "gpus", "host", "drives", "price_per_hour"});
  if (all.text("format") != kFormat)
    all.fail("format", "is " + all.text("format"), fmt::format("this program reads \"{}\"", kFormat));
  MachineFile m;
  m.name = all.text("name");
  if (all.has("about")) m.about = all.text("about");
  if (all.has("gpus")) {
    const Reader g = all.within(
        "gpus", {"count", "kind", "memory", "products", "memory_rate", "to_device", "to_host", "peers"});
    m.gpus = MachineFile::Gpus{.count = g.number("count", 1024),
                               .kind = g.text("kind"),
                               .memory = g.figure("memory", Kind::kBytes),
                               .products = g.figure("products", Kind::kFlops),
                               .memory_rate = g.figure("memory_rate", Kind::kRate),
                               .to_device = g.figure("to_device", Kind::kRate),
                               .to_host = g.figure("to_host", Kind::kRate),
                               .peers = g.figure_if_any("peers", Kind::kRate)};
  }
  const Reader h = all.within("host", {"sockets", "cores", "memory", "memory_rate", "products"});
  m.host = {.sockets = h.number("sockets", 64),
            .cores = h.has("cores") ? h.number("cores", 8192) : 0,
            .memory = h.figure("memory", Kind::kBytes),
            .memory_rate = h.figure("memory_rate", Kind::kRate),
            .products = h.figure_if_any("products", Kind::kFlops)};
  if (m.host.cores != 0 && m.host.cores < m.host.sockets)
    all.fail("host.cores", fmt::format("is {}, fewer than the {} sockets", m.host.cores, m.host.sockets),
             "count the cores of all sockets");
  if (!m.gpus && !m.host.products)
    all.fail("host.products", "is missing, and there are no GPUs", "say how fast the processor multiplies");
  if (all.has("drives")) {
    const Reader d = all.within("drives", {"count", "bytes", "read", "write", "mixed", "endurance", "price"});
    m.drives = MachineFile::Drives{.count = d.number("count", 1024),
                                   .bytes = d.figure("bytes", Kind::kBytes),
                                   .read = d.figure("read", Kind::kRate),
                                   .write = d.figure("write", Kind::kRate),
                                   .mixed = d.figure_if_any("mixed", Kind::kRate),
                                   .endurance = d.figure_if_any("endurance", Kind::kBytes),
                                   .price = d.figure_if_any("price", Kind::kMoney)};
  }
  m.price_per_hour = all.figure_if_any("price_per_hour", Kind::kMoneyPerHour);
  return m;
}

std::string MachineFile::json() const {
  ordered_json o;
  o["format"] = kFormat;
  o["name"] = name;
  if (!about.empty()) o["about"] = about;
  if (gpus) {
    ordered_json& g = o["gpus"];
    g["count"] = gpus->count;
    g["kind"] = gpus->kind;
    put(g, "memory", gpus->memory);
    put(g, "products", gpus->products);
    put(g, "memory_rate", gpus->memory_rate);
    put(g, "to_device", gpus->to_device);
    put(g, "to_host", gpus->to_host);
    put(g, "peers", gpus->peers);
  }
  ordered_json& h = o["host"];
  h["sockets"] = host.sockets;
  if (host.cores != 0) h["cores"] = host.cores;
  put(h, "memory", host.memory);
  put(h, "memory_rate", host.memory_rate);
  put(h, "products", host.products);
  if (drives) {
    ordered_json& d = o["drives"];
    d["count"] = drives->count;
    put(d, "bytes", drives->bytes);
    put(d, "read", drives->read);
    put(d, "write", drives->write);
    put(d, "mixed", drives->mixed);
    put(d, "endurance", drives->endurance);
    put(d, "price", drives->price);
  }
  put(o, "price_per_hour", price_per_hour);
  return o.dump(2) + "\n";
}

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const MachineText& one : machine_texts()) names.emplace_back(one.name);
  return names;
}

MachineFile find_machine(const std::string& name) {
  for (const MachineText& one : machine_texts()) {
    if (name == one.name) return parse_machine(one.text, name);
  }
  std::ifstream file(name, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || text.bad()) {
    const auto near = nearest_name(name, machine_names());
    throw Error(
        Errc::kUsage, "--machine " + name, "is neither a machine's name nor a file that can be read",
        fmt::format("{}say here, name a machine file, or one of {}",
                    near ? "did you mean " + *near + "? Else " : "", fmt::join(machine_names(), ", ")));
  }
  return parse_machine(text.str(), name);
}

namespace {

[[noreturn]] void refuse(const std::string& change, const std::string& what) {
  throw Error(Errc::kUsage, "--what-if " + change, what,
              "for example nvme+1, gpus=4, host=4TB, gpu=141GB, nvme*2, pcie*2, dram*2 or compute*2");
}

void name_change(Figure& f, const std::string& change) {
  f.source += " (--what-if " + change + ")";
  f.measured = false;
}

void multiply(MachineFile& m, const std::string& part, double factor, const std::string& change) {
  const auto scale = [&](Figure& f) {
    f.value *= factor;
    name_change(f, change);
  };
  if (part == "dram") {
    scale(m.host.memory_rate);
  } else if (part == "compute") {
    if (m.gpus) scale(m.gpus->products);
    if (m.host.products) scale(*m.host.products);
  } else if (part == "pcie" && m.gpus) {
    scale(m.gpus->to_device), scale(m.gpus->to_host);
  } else if (part == "nvlink" && m.gpus && m.gpus->peers) {
    scale(*m.gpus->peers);
  } else if (part == "nvme" && m.drives) {
    scale(m.drives->read), scale(m.drives->write);
    if (m.drives->mixed) scale(*m.drives->mixed);
  } else {
    refuse(change, part + " has no rate on this machine");
  }
}

void change_one(MachineFile& m, const std::string& change) {
  const std::size_t at = change.find_first_of("+-=*");
  if (at == std::string::npos || at == 0) refuse(change, "is no change");
  const std::string part = change.substr(0, at), value = change.substr(at + 1);
  const char sign = change[at];
  if (sign == '*') {
    const auto factor = number_in<double>(value);
    if (!factor || !(*factor > 0) || *factor > 1000)
      refuse(change, value + " is no factor above 0, at most 1000");
    return multiply(m, part, *factor, change);
  }
  if (part == "nvme" || part == "gpus") {
    int* const count = part == "nvme" ? (m.drives ? &m.drives->count : nullptr)
                       : m.gpus       ? &m.gpus->count
                                      : nullptr;
    if (count == nullptr) refuse(change, "this machine has none whose kind could be taken");
    const auto number = number_in<std::int64_t>(value);
    if (!number || *number < 0 || *number > 1024) refuse(change, value + " is no number from 0 to 1024");
    const std::int64_t now = sign == '=' ? *number : *count + (sign == '+' ? *number : -*number);
    if (now < 1 || now > 1024) refuse(change, fmt::format("would leave {}", now));
    *count = static_cast<int>(now);
    return;
  }
  Figure* const bytes = part == "host"                     ? &m.host.memory
                        : part == "gpu" && m.gpus          ? &m.gpus->memory
                        : part == "nvme_bytes" && m.drives ? &m.drives->bytes
                                                           : nullptr;
  if (bytes == nullptr) refuse(change, part + " is no part of this machine");
  const auto size = parse_bytes(value);
  if (!size || *size <= 0) refuse(change, value + " is no size");
  const auto wanted = static_cast<double>(*size);
  bytes->value = sign == '=' ? wanted : bytes->value + (sign == '+' ? wanted : -wanted);
  if (bytes->value <= 0) refuse(change, "would leave nothing");
  name_change(*bytes, change);
}

}  // namespace

MachineFile what_if(MachineFile machine, const std::string& changes) {
  std::istringstream all(changes);
  for (std::string change; std::getline(all, change, ',');) change_one(machine, change);
  return machine;
}

}  // namespace zg
