// Machine files: those of the program are whole, each way to spoil one is named, and --what-if changes what
// it says.
#include "ziggurat/plan/machine_file.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "support/errors.hpp"
#include "support/files.hpp"

namespace zg {
namespace {

using nlohmann::json;

// The figures of a file, at any depth.
template <class Visit>
void visit_figures(const json& object, Visit&& visit) {
  if (!object.is_object()) return;
  if (object.contains("value")) return visit(object);
  for (const auto& one : object) visit_figures(one, visit);
}

TEST(MachineFiles, OfTheProgramAreWholeAndSayWhatTheyAreMadeFrom) {
  const std::vector<std::string> names = machine_names();
  for (const char* name :
       {"a100-8", "h100-8", "h200-8", "b200-8", "gb200-4", "h100-1", "rtx4090-1", "rtx4090-8"})
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const MachineFile m = find_machine(name);
    EXPECT_EQ(m.name, name);
    const std::string number = name.substr(name.rfind('-') + 1);
    EXPECT_EQ(std::to_string(m.gpus->count), number);
    int figures = 0;
    visit_figures(json::parse(m.json()), [&](const json& figure) {
      ++figures;
      const std::string source = figure.at("source");
      EXPECT_FALSE(source.empty());
      // A figure has one kind of range, and what was derived or chosen was not measured.
      EXPECT_FALSE(figure.contains("spread") && figure.contains("derate")) << source;
      const bool measured = figure.at("measured");
      for (const char* other :
           {"derived", "chosen", "example", "data sheet", "announcement", "specification"})
        EXPECT_FALSE(measured && source.find(other) != source.npos) << source;
      EXPECT_EQ(measured || source.find("derived") != source.npos, figure.contains("spread")) << source;
    });
    EXPECT_GE(figures, 8);
    // What is written is read again as the same.
    EXPECT_EQ(parse_machine(m.json(), "again").json(), m.json());
  }
}

TEST(MachineFiles, RangesOfFiguresAreOrdered) {
  for (const std::string& name : machine_names()) {
    const MachineFile m = find_machine(name);
    std::vector<const Figure*> figures = {&m.gpus->products, &m.gpus->to_device, &m.host.memory_rate};
    if (m.drives) figures.push_back(&m.drives->write);
    for (const Figure* f : figures) {
      EXPECT_LT(f->at(Outlook::kSlow), f->expected());
      EXPECT_LT(f->expected(), f->at(Outlook::kFast));
      if (f->spread == 0) {
        EXPECT_EQ(f->at(Outlook::kFast), f->value) << "no better than the data sheet";
      }
    }
  }
}

TEST(MachineFiles, FiguresAreExpectedAsTheirKindSays) {
  json m = json::parse(find_machine("h100-8").json());
  const auto of = [&](json figure) {
    figure["value"] = 100, figure["unit"] = "GB/s", figure["source"] = "a test";
    m["host"]["memory_rate"] = figure;
    const Figure f = parse_machine(m.dump(), "m").host.memory_rate;
    return std::array{f.at(Outlook::kSlow) / 1e9, f.expected() / 1e9, f.at(Outlook::kFast) / 1e9};
  };
  using Range = std::array<double, 3>;
  EXPECT_EQ(of({{"measured", false}}), (Range{100, 100, 100}));
  EXPECT_EQ(of({{"measured", false}, {"derate", 0.5}}), (Range{25, 50, 100}));
  EXPECT_EQ(of({{"measured", false}, {"spread", 0.25}}), (Range{75, 100, 125}));
  EXPECT_EQ(of({{"measured", true}, {"spread", 0.25}}), (Range{75, 100, 125}));
  const Range usual = of({{"measured", true}});
  EXPECT_DOUBLE_EQ(usual[0], 90);
  EXPECT_DOUBLE_EQ(usual[2], 110);
}

TEST(MachineFiles, UnitsAreThoseOfTheirFigures) {
  json m = json::parse(find_machine("h100-8").json());
  m["host"]["memory"] = {{"value", 2}, {"unit", "TiB"}, {"measured", false}, {"source", "x"}};
  EXPECT_EQ(parse_machine(m.dump(), "m").host.memory.value, 2 * 0x1p40);
  m["host"]["memory"]["unit"] = "GB/s";
  const Error error = test::error_of([&] { return parse_machine(m.dump(), "m"); });
  EXPECT_EQ(error.where(), "m: host.memory.unit");
  EXPECT_EQ(error.message(), "is GB/s");
  EXPECT_EQ(error.exit_code(), 2);
}

TEST(MachineFiles, LeaveOutWhatIsNotKnown) {
  json m = json::parse(find_machine("h100-8").json());
  m["host"].erase("cores"), m["gpus"].erase("peers"), m.erase("price_per_hour");
  const MachineFile without = parse_machine(m.dump(), "m");
  EXPECT_EQ(without.host.cores, 0);
  EXPECT_FALSE(without.gpus->peers || without.price_per_hour || without.drives->endurance);
  EXPECT_EQ(json::parse(without.json()), m);
  m.erase("drives");
  EXPECT_FALSE(parse_machine(m.dump(), "m").drives);
}

TEST(MachineFiles, EachMistakeIsNamed) {
  const json good = json::parse(find_machine("h100-8").json());
  const struct {
    const char* path;
    json value;  // null: the key is removed
    const char *where, *what;
  } kMistakes[] = {
      {"/format", "ziggurat-machine 9", "m: format", "is ziggurat-machine 9"},
      {"/gpus/counts", 8, "m: gpus.counts", "is no key of a machine file"},
      {"/gpus/count", 0, "m: gpus.count", "is 0"},
      {"/gpus/count", 1.5, "m: gpus.count", "is 1.5"},
      {"/gpus/products", nullptr, "m: gpus.products", "is missing"},
      {"/gpus/products/value", -1, "m: gpus.products.value", "is -1"},
      {"/gpus/products/value", "640", "m: gpus.products.value", "is \"640\""},
      {"/gpus/to_host/derate", 0.5, "m: gpus.to_host.derate", "is given for a measured figure"},
      {"/gpus/products/derate", 0.5, "m: gpus.products.derate", "is given beside a spread"},
      {"/gpus/products/source", nullptr, "m: gpus.products.source", "is missing"},
      {"/gpus/products/measured", "yes", "m: gpus.products.measured", "is \"yes\""},
      {"/gpus/memory/spread", 1.5, "m: gpus.memory.spread", "is 1.5"},
      {"/host", nullptr, "m: host", "is missing"},
      {"/host/cores", 1, "m: host.cores", "is 1, fewer than the 2 sockets"},
      {"/drives", 8, "m: drives", "is not an object"},
      {"/gpus", nullptr, "m: host.products", "is missing, and there are no GPUs"},
  };
  for (const auto& mistake : kMistakes) {
    SCOPED_TRACE(mistake.path);
    json bad = good;
    const json::json_pointer at(mistake.path);
    if (mistake.value.is_null()) {
      bad[at.parent_pointer()].erase(at.back());
    } else {
      bad[at] = mistake.value;
    }
    const Error error = test::error_of([&] { return parse_machine(bad.dump(), "m"); });
    EXPECT_EQ(error.where(), mistake.where);
    EXPECT_EQ(error.message(), mistake.what);
    EXPECT_FALSE(error.hint().empty());
  }
  EXPECT_EQ(test::error_of([] { return parse_machine("{", "m"); }).exit_code(), 2);
  EXPECT_HAS(test::error_of([] { return find_machine("h100-9"); }).hint(), "h100-");
}

TEST(MachineFiles, WhatIfChangesThem) {
  const MachineFile m = find_machine("h100-8");
  const MachineFile more = what_if(m, "nvme+1,gpus-4,host=4TB,dram*2,pcie*2,compute*3");
  EXPECT_EQ(more.drives->count, 9);
  EXPECT_EQ(more.gpus->count, 4);
  EXPECT_EQ(more.host.memory.value, 4e12);
  EXPECT_EQ(more.host.memory_rate.value, 2 * m.host.memory_rate.value);
  EXPECT_EQ(more.gpus->to_device.value, 2 * m.gpus->to_device.value);
  EXPECT_EQ(more.gpus->products.value, 3 * m.gpus->products.value);
  EXPECT_EQ(what_if(m, "nvme*2").drives->read.value, 2 * m.drives->read.value);
  EXPECT_EQ(what_if(m, "nvme*2").drives->write.value, 2 * m.drives->write.value);
  EXPECT_EQ(what_if(m, "nvlink*2").gpus->peers->value, 2 * m.gpus->peers->value);
  EXPECT_EQ(what_if(m, "gpu=141GB,nvme=4,host+1TB").gpus->memory.value, 141e9);
  EXPECT_EQ(what_if(m, "host+1TB").host.memory.value, m.host.memory.value + 1e12);
  // What is written of a changed machine is the changed machine, and says which figures are not the source's.
  const MachineFile again = parse_machine(more.json(), "again");
  EXPECT_EQ(again.json(), more.json());
  EXPECT_EQ(again.drives->count, 9);
  EXPECT_DOUBLE_EQ(again.host.memory.value, 4e12);
  EXPECT_DOUBLE_EQ(again.gpus->products.value, 3 * m.gpus->products.value);
  EXPECT_HAS(again.gpus->products.source, "(--what-if compute*3)");
  EXPECT_HAS(again.host.memory.source, "(--what-if host=4TB)");
  EXPECT_EQ(again.gpus->memory.source, m.gpus->memory.source);
  EXPECT_TRUE(m.gpus->to_device.measured);
  EXPECT_FALSE(again.gpus->to_device.measured) << "no link of this speed was measured";
  EXPECT_EQ(again.gpus->to_device.spread, m.gpus->to_device.spread);
  for (const char* wrong :
       {"nvme", "nvme+x", "gpus-8", "host=", "host=-1GB", "tape+1", "dram*0", "nvme*x", "=4"}) {
    const Error error = test::error_of([&] { return what_if(m, wrong); });
    EXPECT_EQ(error.where(), std::string("--what-if ") + wrong);
    EXPECT_EQ(error.exit_code(), 2);
  }
}

}  // namespace
}  // namespace zg
