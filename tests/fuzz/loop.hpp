// The loop of a fuzzer: valid inputs of a parser, changed at random, one after the other, in a process of
// their own. Each must be taken, or refused by one Error of exit code 2, within 5 seconds of the processor
// and 1 GiB of memory.
//
//   ZG_TEST_INPUTS=N   inputs of each parser
//   ZG_TEST_SEED=N     the seed, which a failure prints
//   ZG_FUZZ_CASE=DIR   this input alone, in the test's own process; a failure prints its directory
#pragma once
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fuzz/mutate.hpp"

namespace zg::fuzz {

struct File {
  std::string name, content;
};
// The files of one input. The first decides over others where a parser takes one alone.
using Case = std::vector<File>;
std::string& content_of(Case& input, const std::string& name);
const std::string& content_of(const Case& input, const std::string& name);

// What a parser has taken is not what it says that it takes.
struct Wrong : std::logic_error {
  using std::logic_error::logic_error;
};
inline void require(bool holds, const std::string& what) {
  if (!holds) throw Wrong(what);
}

struct Parser {
  std::string name;
  std::vector<Case> corpus;  // valid inputs
  // Parses the input, and uses what was taken, so that what is wrong with it shows. The directory has the
  // files, with on_disk.
  std::function<void(const Case& input, const std::string& directory)> use;
  bool on_disk = false;
  bool writes = false;     // `use` changes the directory, which is then made anew for each input
  bool takes_all = false;  // whatever is wrong with the files, they are made anew
  // Files that are changed, by their names; empty: all.
  std::vector<std::string> changed = {};
  // Makes checksums and lengths right again after a change: most of the time, so that the parser behind them
  // is reached.
  std::function<void(Case& input, Random& random)> seal = {};
};

// The usual change: of one of the files, by the kind that its name tells.
void mutate(const Parser& parser, Case& input, Random& random);

// Runs the loop. Failures are failures of the calling test.
void fuzz(const Parser& parser);

}  // namespace zg::fuzz
