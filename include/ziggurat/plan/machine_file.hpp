// The description of a machine that a plan is made for: what it has, and how fast each part is. Each figure
// names its source and whether it was measured. What is not known is left out, and then a plan does not tell
// what needs it. Files in configs/machines/ are part of the program and go by their names.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zg {

// Which end of a figure's range is wanted. A data sheet's figure is at best the sheet's, and expected
// `derate` times that; a figure with a spread is expected as it is, and may be better or worse by its spread.
enum class Outlook : std::uint8_t { kSlow, kExpected, kFast };

struct Figure {
  double value = 0;   // in base units: bytes, bytes/s, FLOP/s, USD, USD/hour
  double derate = 1;  // the share of a data sheet's figure that is expected
  // The share by which measurements differ. 0: the figure is a data sheet's. A figure that is not measured
  // and has a spread was derived from measurements of something else.
  double spread = 0;
  bool measured = false;  // on this very part, as the source says
  std::string unit, source;

  double at(Outlook outlook) const;
  double expected() const { return at(Outlook::kExpected); }
};

struct MachineFile {
  std::string name, about;
  struct Gpus {
    int count = 0;
    std::string kind;
    Figure memory;                // bytes of each
    Figure products;              // FLOP/s of dense bf16 products in training
    Figure memory_rate;           // bytes/s, read and written
    Figure to_device, to_host;    // bytes/s of each, from and to host memory
    std::optional<Figure> peers;  // bytes/s of each, to other GPUs, one way; none: through host memory
  };
  std::optional<Gpus> gpus;  // none: the processor computes
  struct Host {
    int sockets = 1;
    int cores = 0;                   // of all sockets; 0: unknown
    Figure memory;                   // bytes of the machine
    Figure memory_rate;              // bytes/s of all sockets, read and written
    std::optional<Figure> products;  // FLOP/s of bf16 or fp32 products; required without GPUs
  } host;
  struct Drives {
    int count = 0;
    Figure bytes, read, write;  // of each
    // bytes/s of reads and writes together, half of each; none: they take turns.
    std::optional<Figure> mixed;
    std::optional<Figure> endurance;  // bytes that may be written in its life
    std::optional<Figure> price;      // USD of each
  };
  std::optional<Drives> drives;
  std::optional<Figure> price_per_hour;  // USD of the whole machine

  std::string json() const;  // the file's text
};

// Reads a machine file's text. `where` names it in errors. Throws Error(kUsage) for a key that is unknown or
// missing, a unit that does not fit its key, and a value that is out of range.
MachineFile parse_machine(std::string_view text, const std::string& where);
// The machine of this name, or of the file of this name. Throws Error(kUsage), with the names that there are.
MachineFile find_machine(const std::string& name);
std::vector<std::string> machine_names();

// Changes counts and sizes, and names the change in the sources of its figures: "nvme+1" or "gpus-4" adds or
// removes, "host=4TB" or "nvme=8" sets, "pcie*2", "dram*2", "nvme*2" and "compute*2" multiply rates. Several
// are separated by commas. Throws Error(kUsage).
MachineFile what_if(MachineFile machine, const std::string& changes);

}  // namespace zg
