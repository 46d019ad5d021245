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

// Whether, at a blank after an ASCII letter or digit, the step's result on one side of the cut does not
// depend on the text on the other side.
bool keeps_blanks_first(const HfSplitStep& step);
// Whether a piece always begins at such a blank.
bool begins_at_blank(const HfSplitStep& step);
// Whether no piece contains a blank.
bool removes_blanks(const HfSplitStep& step);

}  // namespace zg
