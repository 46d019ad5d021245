// What a command writes to stdout: none of it is lost unsaid.
#pragma once

namespace zg::cli {

// Nobody reads stdout any more, as behind "| head". The command ends at once and quietly, as usual tools do,
// with the exit code that a shell gives them. A run goes on.
struct OutputClosed {};
inline constexpr int kOutputClosed = 141;

// Where stdout is no terminal it is written in large pieces from now on, so that flush_output() mostly knows
// why a write has failed. Call first in main.
void buffer_output();

// Brings all that was printed to stdout. Throws OutputClosed, or Error(kIo) where it cannot be written, as to
// a full disk; what is left of it is dropped then.
void flush_output();

}  // namespace zg::cli
