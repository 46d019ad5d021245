// The steps that cut a text into the pieces within which merges are made. Pure functions; any thread.
#pragma once
#include <string_view>
#include <vector>

#include "data/hf_file.hpp"

namespace zg {

using Pieces = std::vector<std::string_view>;

// Cuts each piece further; none of the results is empty. Not for Metaspace, which changes the text.
// Throws Error(kUsage) when the effort is spent.
void split_pieces(const HfSplitStep& step, Pieces& pieces, Pattern::Effort& effort);

// Whether the step's result at a blank behind an ASCII letter or digit does not depend on what is on the
// other side.
bool keeps_blanks_first(const HfSplitStep& step);
// Whether a piece always begins at such a blank.
bool begins_at_blank(const HfSplitStep& step);
// Whether no piece has a blank.
bool removes_blanks(const HfSplitStep& step);

}  // namespace zg
